"""Responses requests as chats, the tools of coding agents among them, and answers as OpenAI's client reads them."""

from typing import Any

import msgspec
import pytest
from conversation import (
    ANSWER,
    ASKED,
    FUNCTION,
    SCHEMA,
    USAGE,
    all_events,
    of_responses,
    response_format,
    response_without,
)

from nanovllm.serve import limits
from nanovllm.serve.api import fields as api
from nanovllm.serve.api import responses
from nanovllm.serve.api.responses_tools import ResponsesTools, Tool
from nanovllm.serve.errors import ApiError
from nanovllm.serve.formats.responses import ResponsesFormat
from nanovllm.serve.output_items import OutputItems
from nanovllm.serve.parsers import Delta, check_tools

RESPONSES_BODY = {
    "model": "demo",
    "instructions": "Be brief.",
    "max_output_tokens": 100,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather in Paris?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"role": "user", "content": "And Rome?"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "get_weather"},
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}},
    "store": False,
}


def test_a_responses_request_is_a_chat() -> None:
    request = of_responses(RESPONSES_BODY)
    assert request == {
        "model": "demo",
        "max_completion_tokens": 100,
        "messages": ASKED,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    }
    assert of_responses({"input": "Hi"})["messages"] == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": None}, "input: is required"),
        ({"input": [{"type": "computer_call"}], "instructions": None}, "input: must hold at least one message"),
        ({"input": [{"type": "reasoning", "content": 5}]}, r"input\[0\].content=5: must be str | array"),
        ({"input": [{"role": "user"}]}, r"input\[0\].content: is required"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "_image': .*; images, sound and"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name: is required"),
        ({"tools": [{"type": "web_search"}]}, "tool_choice: must be absent, 'auto' or 'none' where no tools"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice: must be absent, 'auto' or 'none' where no tools"),
        ({"top_logprobs": 2}, r"top_logprobs: needs include=\['message.output_text.logprobs'\]"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}] * 129}]},
         r"tools\[0\].tools=.*: must be array of length <= 128"),
        ({"tool_choice": "some"}, "tool_choice='some': must be one of 'auto', 'none', 'required'"),
        ({"text": {"format": {"type": "yaml"}}}, "^text.format.type='yaml': must be one of 'text', 'json_object', 'js"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "^text.format.schema=5: must be object"),
        ({"text": {"format": {"type": "json_schema", "json_schema": {"schema": {}}}}},
         "^text.format.json_schema: not supported"),
        ({"metadata": 1}, "^metadata=1: must be object"), ({"metadata": {"a": 1}}, "^metadata.*: must be str"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: not supported; nothing is stored"),
    ],
)  # fmt: skip
def test_what_a_responses_request_must_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        of_responses({**RESPONSES_BODY, **change})


def writer_of(body: dict[str, Any]) -> ResponsesFormat:
    return response_format(body, ResponsesTools(msgspec.convert(body.get("tools", []), list[Tool])))


def read_by_client(events: list[dict[str, Any]]) -> list[Any]:
    pydantic = pytest.importorskip("pydantic")
    types = pytest.importorskip("openai.types.responses")
    adapter = pydantic.TypeAdapter(types.ResponseStreamEvent)
    return [adapter.validate_python(event) for event in events]


def test_the_official_client_reads_responses() -> None:
    writer = writer_of(RESPONSES_BODY)
    events = all_events(writer, ANSWER)
    parsed = read_by_client(events)
    assert [type(event).__name__ for event in parsed if not hasattr(event, "sequence_number")] == []
    assert [event.sequence_number for event in parsed] == [*range(len(parsed))]
    assert [event.type for event in parsed] == [event["type"] for event in events]
    for kind, text in (
        ("output_text", "Let me see."), ("reasoning_text", "I need the weather."),
        ("function_call_arguments", '{"city": "Paris"}{}'),
    ):  # fmt: skip
        assert "".join(event.delta for event in parsed if event.type == f"response.{kind}.delta") == text
    response = parsed[-1].response
    assert parsed[-1].type == "response.completed" and response.status == "completed"
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output_text == "Let me see." and response.output[2].arguments == '{"city": "Paris"}'
    assert response.temperature == 0.25 and response.usage.output_tokens_details.reasoning_tokens == 5
    writer.finish("length", None, USAGE)
    assert writer.answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert writer.error(ApiError(500, "no", "engine_dead"))["code"] == "engine_dead"


# -- tools of coding agents

PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits", "format": {
    "type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}
PICK = {"type": "custom", "name": "pick", "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"}}
SPACE = {"type": "namespace", "name": "mcp__shop", "description": "Shop", "tools": [
    {"type": "function", "name": "buy", "parameters": SCHEMA}, {"type": "custom", "name": "say"}]}
AGENT_BODY = {
    "input": [
        {"role": "user", "content": "Go"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** \"x\""},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call", "call_id": "c2", "name": "buy", "namespace": "mcp__shop", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "ok"},
    ],
    "tools": [{"type": "function", **FUNCTION}, PATCH, PICK, SPACE, {"type": "web_search"}],
    "tool_choice": {"type": "custom", "name": "apply_patch"},
    "include": ["reasoning.encrypted_content"],
}


def test_custom_and_namespace_tools_are_functions_of_the_chat() -> None:
    fields = api.read(responses.ResponsesFields, AGENT_BODY)[0]
    tools = ResponsesTools(fields.tools or ())
    assert tools.ignored == ["tools.web_search"]
    assert tools.text_grammars == {"apply_patch": "start: /.+/", "pick": "start: /a|b/"}
    request = of_responses(AGENT_BODY)
    choice = check_tools(request["tools"], request["tool_choice"], text_grammars=tools.text_grammars)
    assert choice is not None
    assert [(tool.name, tool.text_grammar) for tool in choice.tools] == [("apply_patch", "start: /.+/")]
    functions = {tool["function"]["name"]: tool["function"] for tool in request["tools"]}
    assert [*functions] == ["get_weather", "apply_patch", "pick", "mcp__shop__buy", "mcp__shop__say"]
    assert functions["pick"]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert "start: /.+/" in functions["apply_patch"]["description"]
    calls = [call["function"] for one in request["messages"] for call in one.get("tool_calls", ())]
    assert calls == [
        {"name": "apply_patch", "arguments": '{"input": "*** \\"x\\""}'},
        {"name": "mcp__shop__buy", "arguments": "{}"},
    ]


def test_instructions_come_before_messages_of_a_developer() -> None:
    said = [{"type": "input_text", "text": "Use tools."}]
    items = [
        {"type": "message", "role": "developer", "content": said},
        {"type": "message", "role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"role": "developer", "content": "Later."},
    ]
    found = of_responses({"instructions": "Be brief.", "input": items, "text": {"verbosity": "low"}})["messages"]
    expected = [("system", "Be brief."), ("developer", "Use tools."), ("user", "Hi"), ("developer", "Later.")]
    assert [(one["role"], one["content"]) for one in found] == expected


def test_the_official_client_reads_calls_of_custom_and_namespace_tools() -> None:
    calls = [
        Delta("call", "", 0, "apply_patch", "c1"),
        Delta("arguments", '{"input": "a\\n', 0),
        Delta("arguments", 'b"}', 0),
        Delta("call", "", 1, "mcp__shop__buy", "c2"),
        Delta("arguments", "{}", 1),
    ]
    parsed = read_by_client(all_events(writer_of(AGENT_BODY), calls))
    inputs = [event.delta for event in parsed if event.type == "response.custom_tool_call_input.delta"]
    assert inputs == ["a\nb"]
    custom, bought = parsed[-1].response.output
    assert (custom.type, custom.name, custom.input, custom.call_id) == ("custom_tool_call", "apply_patch", "a\nb", "c1")
    expected = ("function_call", "buy", "mcp__shop", "{}")
    assert (bought.type, bought.name, bought.namespace, bought.arguments) == expected


# -- histories of other servers, and of this one

SHOT = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
GONE = "[image left out: this model reads text only]"


def test_items_of_other_servers_are_named_and_pictures_left_out() -> None:
    output = {"type": "function_call_output", "call_id": "c", "output": [SHOT, {"type": "input_text", "text": "a"}]}
    foreign = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "local_shell_call", "call_id": "l", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "l", "output": {"stdout": "a"}},
        {"type": "tool_search_call", "arguments": {"query": "x"}}, {"type": "compaction", "encrypted_content": "gAAA"},
        {"type": "mcp_list_tools", "tools": [{"name": "f", "input_schema": {}}]}, {"type": "mcp_call", "output": None},
        {"type": "item_reference", "id": "msg_9"}, {"id": "rs_9"},
    ]  # fmt: skip
    items = [
        {"role": "user", "content": [SHOT]},
        {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"},
        output,
        {"role": "user", "content": [SHOT]},
        *foreign,
        {"role": "user", "content": "Go on."},
    ]
    request, left_out = response_without({"input": items, "include": ["from.tomorrow"]})
    assert [one["content"] for one in request["messages"]] == [GONE, None, f"{GONE}\na", GONE, "Go on."]
    kinds = [*dict.fromkeys(item.get("type", "item_reference") for item in foreign)]
    assert left_out == ["include.from.tomorrow", "input.input_image", *(f"input.{kind}" for kind in kinds)]
    assert response_without({"input": items[:4]})[0]["messages"][-1]["content"] == GONE  # beside a tool's result
    with pytest.raises(ApiError, match=r"input\[0\].content\[0\].type='input_image': .*again without it"):
        of_responses({"input": items[:1]})


def test_references_to_known_items_are_these_items() -> None:
    writer = writer_of({})
    all_events(writer, ANSWER)
    references = [{"type": "item_reference", "id": item["id"]} for item in writer.items]
    output = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
    known = {item["id"]: item for item in writer.items}
    for answer in (references, writer.items):
        request, left_out = response_without({"input": [{"role": "user", "content": "Hi"}, *answer, output]}, **known)
        said = request["messages"][1]
        assert (said["reasoning_content"], said["content"]) == ("I need the weather.", "Let me see.")
        assert [call["id"] for call in said["tool_calls"]] == ["call_1", "call_2"] and left_out == []


def test_output_items_are_kept_by_key_and_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OUTPUT_ITEMS_BYTES", 4000)
    kept = OutputItems()
    for number in range(100):
        kept.keep(0, [{"id": f"msg_{number}", "text": "x" * 100}, {"id": "msg_same", "text": str(number)}])
    assert kept.find(0, "msg_99") == {"id": "msg_99", "text": "x" * 100} and kept.find(1, "msg_99") is None
    assert kept.find(0, "msg_0") is None and len(kept._items) < 10
    assert kept.find(0, "msg_same") == {"id": "msg_same", "text": "99"}


def test_reasoning_comes_back_where_clients_resend_no_text() -> None:
    for include, is_sealed in ((["reasoning.encrypted_content"], True), ([], False)):
        writer = writer_of({"include": include})
        events = all_events(writer, ANSWER)
        [done] = [event["item"] for event in events if event["type"] == "response.output_item.done"][:1]
        assert ("encrypted_content" in done) is ("encrypted_content" in writer.items[0]) is is_sealed
        if is_sealed:
            resent = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": done["encrypted_content"]}
            items = [{"role": "user", "content": "Hi"}, resent, {"role": "assistant", "content": "Yes"}]
            assert of_responses({"input": items})["messages"][1]["reasoning_content"] == "I need the weather."
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo"}
    request, left_out = response_without({"input": [{"role": "user", "content": "Hi"}, foreign]})
    assert (len(request["messages"]), left_out) == (1, ["input.reasoning.encrypted_content"])


def test_tools_among_the_input_are_tools() -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [PATCH, SPACE, {"type": "web_search"}]}
    request, left_out = response_without({"input": [more, {"role": "user", "content": "Hi"}], "tools": [PATCH]})
    assert [tool["function"]["name"] for tool in request["tools"]] == [
        "apply_patch", "mcp__shop__buy", "mcp__shop__say"
    ]  # fmt: skip
    assert left_out == ["tools.web_search"] and len(request["messages"]) == 1


def test_an_answer_may_begin_before_its_first_token() -> None:
    """With events that the official client knows; their numbers go on."""
    writer = writer_of({})
    events = [*writer.start(USAGE), *writer._state("response.in_progress"), *writer.add(ANSWER[:1])]
    assert [event["type"] for event in events[:3]] == [
        "response.created", "response.in_progress", "response.in_progress"
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    read_by_client(events)
