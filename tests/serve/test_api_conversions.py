"""Messages and Responses requests as chats, and answers as their official clients read them."""

import json
from typing import Any

import msgspec
import pytest

from nanovllm.serve.api import anthropic, responses, shapes
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.responses_tools import ResponsesTools, Tool
from nanovllm.serve.errors import ApiError
from nanovllm.serve.parsers import Delta, check_tools

ANSWER = [
    Delta("reasoning", "I need "),
    Delta("reasoning", "the weather."),
    Delta("content", "Let me "),
    Delta("content", "see."),
    Delta("call", "", 0, "get_weather", "call_1"),
    Delta("arguments", '{"city": ', 0),
    Delta("arguments", '"Paris"}', 0),
    Delta("call", "", 1, "now", "call_2"),
    Delta("arguments", "{}", 1),
]
USAGE = shapes.Usage(30, 12, 42, shapes.PromptDetails(16), shapes.OutputDetails(5))
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Paris?"},
    {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "user", "content": "And Rome?"},
]
"""The chat that both dialects ask for below."""
SAMPLING = {"seed": 3, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "stop_token_ids": [7]}
SHARED = SAMPLING | {
    "structured_outputs": {"regex": "a+"},
    "cache_salt": "x",
    "chat_template_kwargs": {"polite": True},
    "logit_bias": {"5": 1.0},
    "bad_words": ["no"],
}
"""Fields that chat completions take and the other dialects have no words for."""


def of_messages(body: dict[str, Any]) -> dict[str, Any]:
    return anthropic.chat_request(api.read(anthropic.MessagesFields, body)[0])


def of_responses(body: dict[str, Any]) -> dict[str, Any]:
    fields = api.read(responses.ResponsesFields, body)[0]
    return responses.chat_request(fields, ResponsesTools(fields.tools or ()))


def test_all_dialects_take_what_is_sampled_by() -> None:
    for request in (
        of_messages({"messages": [{"role": "user", "content": "a"}], "max_tokens": 5} | SHARED),
        of_responses({"input": "a"} | SHARED),
    ):
        assert {name: request[name] for name in SHARED} == SHARED
        assert api.read(api.ChatFields, request)[1] == []


def test_a_last_text_of_the_assistant_is_continued() -> None:
    """As with Anthropic's; a call that waits for its result is not."""
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    text = {"type": "text", "text": "{"}
    for role, content, continues in (
        ("assistant", "{", True), ("assistant", [text], True), ("assistant", [text, call], None), ("user", "{", None),
        ("assistant", "", None),
    ):  # fmt: skip
        messages = [{"role": "user", "content": "a"}, {"role": role, "content": content}]
        assert of_messages({"messages": messages, "max_tokens": 5}).get("continue_final_message") is continues


CONSTRAINTS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "output_format", "grammar", "regex")


@pytest.mark.parametrize(
    ("kind", "body", "more"),
    [
        (api.ChatFields, {"messages": [{"role": "user", "content": "a"}]}, ["output_config", "max_output_tokens"]),
        (api.CompletionFields, {"prompt": "a"}, ["output_config", "stop_sequences"]),
        (responses.ResponsesFields, {"input": "a"}, ["response_format", "max_tokens", "background", "logprobs"]),
        (anthropic.MessagesFields, MESSAGE := {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
         ["response_format", "max_completion_tokens", "mcp_servers"]),
        (anthropic.CountFields, MESSAGE, []),
        (api.GenerateFields, {"token_ids": [5], "sampling_params": {}}, ["response_format"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_what_constrains_an_answer_is_never_ignored(kind: Any, body: dict[str, Any], more: list[str]) -> None:
    for name in (*CONSTRAINTS, *more):
        with pytest.raises(ApiError, match=f"{name}: not supported; ") as caught:
            api.read(kind, body | {name: ["a"]})
        assert (caught.value.status, caught.value.param) == (400, name)
        assert api.read(kind, body | {name: None})[1] == []
    assert api.read(kind, body | {"no_such": 1})[1] == ["no_such"]


def test_a_constraint_of_unknown_kind_is_refused() -> None:
    for wanted in ({"structural_tag": "{}"}, {"regex": "a", "whitespace_pattern": " "}, {}):
        fields = api.convert(api.CompletionFields, {"prompt": "a", "structured_outputs": wanted})
        with pytest.raises(ApiError, match="structured_outputs: must hold exactly one of json, regex"):
            api.structured(fields)


# --- Anthropic

MESSAGES_BODY = {
    "model": "demo",
    "max_tokens": 100,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Weather in Paris?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And Rome?"},
            ],
        },
    ],
    "tools": [{"name": "get_weather", "description": "Weather", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "stop_sequences": ["END"],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "temperature": 0.5,
}


def test_a_messages_request_is_a_chat() -> None:
    request = of_messages(MESSAGES_BODY)
    assert request == {
        "model": "demo",
        "max_completion_tokens": 100,
        "messages": ASKED,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "stop": ["END"],
        "chat_template_kwargs": {"enable_thinking": True},
        "temperature": 0.5,
    }
    choice = check_tools(request["tools"], request["tool_choice"], request["parallel_tool_calls"])
    assert choice is not None and choice.mode == "required" and not choice.parallel


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages=.*: must be array of length >= 1"),
        ({"messages": [{"role": "tool", "content": ""}]}, "role='tool': must be one of 'user', 'assistant'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image': must be one of.*; images, sound"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "must be in a message of role 'assist"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content: is required"),
        ({"tools": [{"type": "bash_20250124", "name": "bash", "input_schema": {}}]}, "type='bash.*must be 'custom'"),
        ({"tools": [{"name": "bash"}]}, r"tools\[0\].input_schema: is required"),
        ({"tools": None}, "tool_choice.type='any': needs tools"),
    ],
)
def test_what_a_messages_request_must_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        of_messages({**MESSAGES_BODY, **change})
    body = anthropic.error_body(caught.value)
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


def test_the_form_of_a_message_is_held_to() -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    request = of_messages({**MESSAGES_BODY, "output_config": config})
    assert request["reasoning_effort"] == "low"
    wanted = api.structured(api.read(api.ChatFields, request)[0])
    assert wanted is not None and wanted.json == SCHEMA


def message_events() -> list[dict[str, Any]]:
    writer = anthropic.MessageWriter("msg_1", "demo")
    events = writer.start(USAGE)
    for delta in ANSWER:
        events += writer.write([delta])
    return events + writer.finish("tool_calls", None, USAGE)


def whole_message(reason: str = "tool_calls", stop: str | None = None, calls: bool = True) -> dict[str, Any]:
    writer = anthropic.MessageWriter("msg_1", "demo")
    writer.write(ANSWER if calls else ANSWER[:4])
    writer.finish(reason, stop, USAGE)
    return writer.whole


def test_the_official_client_reads_messages() -> None:
    sdk = pytest.importorskip("anthropic")
    message = sdk.types.Message.model_validate(whole_message(), strict=True)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].thinking == "I need the weather." and message.content[1].text == "Let me see."
    assert message.content[2].input == {"city": "Paris"} and message.content[3].input == {}
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (14, 16)


def test_the_official_client_puts_streamed_messages_together() -> None:
    sdk = pytest.importorskip("anthropic")
    httpx = pytest.importorskip("httpx2")
    lines = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in message_events())
    headers = {"content-type": "text/event-stream"}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=lines, headers=headers))
    client = sdk.Anthropic(api_key="x", http_client=sdk.DefaultHttpxClient(transport=transport))
    asked = {name: MESSAGES_BODY[name] for name in ("model", "max_tokens", "messages", "tools")}
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    expected = sdk.types.Message.model_validate(whole_message())
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in expected.content]
    assert streamed.stop_reason == expected.stop_reason and streamed.usage.output_tokens == 12


@pytest.mark.parametrize(
    ("reason", "stop", "calls", "expected"),
    [
        ("stop", None, False, ("end_turn", None)),
        ("stop", "END", False, ("stop_sequence", "END")),
        ("stop", None, True, ("tool_use", None)),
        ("length", None, True, ("max_tokens", None)),
    ],
)
def test_why_a_message_ended(reason: str, stop: str | None, calls: bool, expected: tuple[str, str | None]) -> None:
    found = whole_message(reason, stop, calls)
    assert (found["stop_reason"], found["stop_sequence"]) == expected


# --- Responses

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
        "response_format": {"type": "json_schema", "json_schema": RESPONSES_BODY["text"]["format"]},
    }
    choice = check_tools(request["tools"], request["tool_choice"])
    assert choice is not None and choice.mode == "named"
    assert of_responses({"input": "Hi"})["messages"] == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": None}, "input: is required"),
        ({"input": [{"type": "computer_call"}]}, "type='computer_call': must be one of 'message', 'function_call'"),
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
        ({"previous_response_id": "resp_1"}, "previous_response_id: not supported; nothing is stored"),
    ],
)  # fmt: skip
def test_what_a_responses_request_must_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        of_responses({**RESPONSES_BODY, **change})


def writer_of(body: dict[str, Any]) -> responses.ResponseWriter:
    tools = ResponsesTools(msgspec.convert(body.get("tools", []), list[Tool]))
    return responses.ResponseWriter("resp_1", "demo", 1_700_000_000, body, {"temperature": 0.25}, tools)


def test_the_official_client_reads_responses() -> None:
    types = pytest.importorskip("openai.types.responses")
    writer = writer_of(RESPONSES_BODY)
    writer.write(ANSWER)
    writer.finish("tool_calls", None, USAGE)
    response = types.Response.model_validate(writer.whole)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output_text == "Let me see." and response.output[2].arguments == '{"city": "Paris"}'
    assert response.temperature == 0.25
    assert response.status == "completed" and response.usage.output_tokens_details.reasoning_tokens == 5
    writer.finish("length", None, USAGE)
    assert writer.whole["incomplete_details"] == {"reason": "max_output_tokens"}


def test_the_official_client_reads_streamed_responses() -> None:
    pydantic = pytest.importorskip("pydantic")
    types = pytest.importorskip("openai.types.responses")
    adapter = pydantic.TypeAdapter(types.ResponseStreamEvent)
    writer = writer_of(RESPONSES_BODY)
    events = writer.start(USAGE)
    for delta in ANSWER:
        events += writer.write([delta])
    events += writer.finish("tool_calls", None, USAGE)
    parsed = [adapter.validate_python(event) for event in events]
    assert [type(event).__name__ for event in parsed if not hasattr(event, "sequence_number")] == []
    assert [event.sequence_number for event in parsed] == [*range(len(parsed))]
    assert [event.type for event in parsed] == [event["type"] for event in events]
    texts = dict.fromkeys(("output_text", "reasoning_text", "function_call_arguments"), "")
    for event in parsed:
        for kind in texts:
            if event.type == f"response.{kind}.delta":
                texts[kind] += event.delta
    assert texts["output_text"] == "Let me see." and texts["reasoning_text"] == "I need the weather."
    assert texts["function_call_arguments"] == '{"city": "Paris"}{}'
    assert parsed[-1].type == "response.completed" and len(parsed[-1].response.output) == 4
    assert writer.fail(ApiError(500, "no", "engine_dead"))[0]["code"] == "engine_dead"


# --- Tools of coding agents

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
    request = responses.chat_request(fields, tools)
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


def test_instructions_and_a_developers_message_are_one_system_message() -> None:
    """As coding agents send both, and templates take the first message alone."""
    said = [{"type": "input_text", "text": "Use tools."}]
    items = [
        {"type": "message", "role": "developer", "content": said},
        {"type": "message", "role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"role": "developer", "content": "Later."},
    ]
    found = of_responses({"instructions": "Be brief.", "input": items, "text": {"verbosity": "low"}})["messages"]
    assert [(one["role"], one["content"]) for one in found] == [
        *(("system", "Be brief.\n\nUse tools."), ("user", "Hi"), ("developer", "Later.")),
    ]


def test_the_official_client_reads_calls_of_custom_and_namespace_tools() -> None:
    pydantic = pytest.importorskip("pydantic")
    types = pytest.importorskip("openai.types.responses")
    adapter = pydantic.TypeAdapter(types.ResponseStreamEvent)
    writer = writer_of(AGENT_BODY)
    events = writer.start(USAGE)
    for delta in (
        *(Delta("call", "", 0, "apply_patch", "c1"), Delta("arguments", '{"input": "a\\n', 0)),
        *(Delta("arguments", 'b"}', 0), Delta("call", "", 1, "mcp__shop__buy", "c2"), Delta("arguments", "{}", 1)),
    ):
        events += writer.write([delta])
    events += writer.finish("tool_calls", None, USAGE)
    parsed = [adapter.validate_python(event) for event in events]
    inputs = [event.delta for event in parsed if event.type == "response.custom_tool_call_input.delta"]
    assert inputs == ["a\nb"]
    custom, bought = parsed[-1].response.output
    assert (custom.type, custom.name, custom.input, custom.call_id) == ("custom_tool_call", "apply_patch", "a\nb", "c1")
    assert (bought.type, bought.name, bought.namespace, bought.arguments) == (
        *("function_call", "buy", "mcp__shop", "{}"),
    )
