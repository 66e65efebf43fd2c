"""Messages requests as chats, and answers as Anthropic's client reads them."""

import json
from typing import Any

import pytest
from conversation import ANSWER, ASKED, FUNCTION, SCHEMA, USAGE, all_events, message_format, of_messages, without
from serving import user

from nanovllm.serve.errors import ApiError
from nanovllm.serve.formats.messages import error_body

MESSAGES_BODY = {
    "model": "demo",
    "max_tokens": 100,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Paris"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "And Rome?"},
        ]},
    ],
    "tools": [{"name": "get_weather", "description": "Weather", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "stop_sequences": ["END"],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "temperature": 0.5,
}  # fmt: skip


def test_a_messages_request_is_a_chat() -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    request = of_messages({**MESSAGES_BODY, "output_config": config})
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
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    }


def test_a_format_has_two_names() -> None:
    """The newer one counts first; inspect-ai sends the older."""
    older = of_messages({**MESSAGES_BODY, "output_format": {"type": "json_schema", "schema": SCHEMA}})
    assert older["response_format"] == {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    both = {"output_format": {"type": "json_object"}, "output_config": {"format": {"type": "text"}}}
    assert of_messages({**MESSAGES_BODY, **both})["response_format"]["type"] == "text"


def test_a_last_text_of_the_assistant_is_continued() -> None:
    """As with Anthropic's; a call that waits for its result is not."""
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    text = {"type": "text", "text": "{"}
    for role, content, continues in (
        ("assistant", "{", True), ("assistant", [text], True), ("assistant", [text, call], None), ("user", "{", None),
        ("assistant", "", None),
    ):  # fmt: skip
        messages = [*user("a"), {"role": role, "content": content}]
        assert of_messages({"messages": messages, "max_tokens": 5}).get("continue_final_message") is continues


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages=.*: must be array of length >= 1"),
        ({"messages": [{"role": "tool", "content": ""}]}, "role='tool': must be one of 'user', 'assistant'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "be a text; images, .*again without"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "must be in a message of role 'assist"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content: is required"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.*must be 'custom' or.*runs none"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]}, r"0\].content=5: must"),
        ({"tools": [{"name": "bash"}]}, r"tools\[0\].input_schema: is required"),
        ({"tools": None}, "tool_choice.type='any': needs tools"),
        ({"output_config": {"format": {"type": "yaml"}}}, "^output_config.format.type='yaml': must be one of 'text', "),
    ],
)
def test_what_a_messages_request_must_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        of_messages({**MESSAGES_BODY, **change})
    body = error_body(caught.value)
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
SEARCHED = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result"}]}
IMAGE_GONE, PDF_GONE = (f"[{kind} left out: this model reads text only]" for kind in ("image", "document"))


def result(content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "call_1", "content": content}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("content", "expected", "names"),
    [
        ([result([PICTURE, text("a")])], [IMAGE_GONE + "\na"], ["messages.image"]),
        ([result("ok"), PDF], ["ok", PDF_GONE], ["messages.document"]),
        ([result([{"type": "tool_reference", "tool_name": "Read"}])], ["Read"], []),
        ([{"type": "document", "title": "T", "source": {"type": "text", "data": "plain"}}], ["T\nplain"], []),
        ([{"type": "document", "source": {"type": "content", "content": [text("a"), PICTURE]}}],
         ["a\n" + IMAGE_GONE], ["messages.image"]),
        ([{"type": "search_result", "title": "T", "source": "http://x", "content": [text("found")]}],
         ["T\nhttp://x\nfound"], []),
    ],
)  # fmt: skip
def test_what_is_no_text_is_left_out_and_named(content: list[Any], expected: list[str], names: list[str]) -> None:
    asked = {"max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    request, left_out = without(asked)
    assert [message["content"] for message in request["messages"]] == expected
    assert left_out == names


def test_a_chat_goes_on_whatever_its_history_holds() -> None:
    """Also blocks of tools that a provider ran, and of types that are not known yet."""
    used = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    messages = [
        {"role": "user", "content": [PICTURE, text("What is it?")]},
        {"role": "assistant", "content": [used, SEARCHED, {"type": "from_tomorrow", "content": 5}, text("A cat.")]},
        {"role": "user", "content": [result([PICTURE])]},
        {"role": "user", "content": [PICTURE]},
        {"role": "user", "content": "Go on."},
    ]
    request, left_out = without({"max_tokens": 5, "messages": messages})
    kinds = ("image", "server_tool_use", "web_search_tool_result", "from_tomorrow")
    assert left_out == [f"messages.{kind}" for kind in kinds]
    said = "".join(message["content"] for message in request["messages"])
    assert all(f"[{kind} left out" in said for kind in kinds) and "A cat." in said
    for later in ([], [{"role": "system", "content": "be brief"}]):  # a picture that is new
        with pytest.raises(ApiError, match=r"messages\[0\].content\[0\].type='image'"):
            of_messages({"max_tokens": 5, "messages": [messages[0], *later]})


def test_the_line_about_billing_is_dropped() -> None:
    line, asked = "x-anthropic-billing-header: cc_version=2.1.332.be0;", {"max_tokens": 5, "messages": user("Hi")}
    for system in ([text(line), text("Be brief.")], [text(line + "\nBe brief.")], line + "\nBe brief."):
        assert of_messages({**asked, "system": system})["messages"] == [
            {"role": "system", "content": "Be brief."}, *user("Hi")
        ]  # fmt: skip
    assert of_messages({**asked, "system": [text(line)]})["messages"] == user("Hi")
    late = {"role": "system", "content": [text(line), text("z")]}
    assert line not in str(of_messages({**asked, "messages": [*user("Hi"), late]}))


def test_tools_of_a_provider_are_named_and_those_with_a_known_schema_taken() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 5},
        {"type": "memory_20250818", "name": "memory"}, {"type": "custom", "name": "f", "input_schema": SCHEMA},
    ]  # fmt: skip
    asked = {"max_tokens": 5, "messages": user("Hi"), "tools": tools, "mcp_servers": [], "container": {}}
    request, left_out = without(asked)
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in request["tools"]}
    assert [*functions] == ["bash", "str_replace_based_edit_tool", "memory", "f"]
    assert functions["bash"]["properties"]["command"] == {"type": "string"}
    assert functions["memory"]["properties"]["command"]["enum"][-1] == "rename"
    assert left_out == ["tools.web_search_20250305"]


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_know() -> None:
    error = ApiError(400, "This model's maximum context length is 100 tokens.", "context_length_exceeded")
    error.excess = 120, 99
    assert error_body(error)["error"]["message"] == "prompt is too long: 120 tokens > 99 maximum"


def test_thinking_has_a_signature_before_its_end() -> None:
    events = all_events(message_format(), ANSWER)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == 0]
    assert [delta["type"] for delta in deltas] == ["thinking_delta", "thinking_delta", "signature_delta"]
    assert whole_message()["content"][0]["signature"] == deltas[-1]["signature"] != ""


def whole_message(reason: str = "tool_calls", stop: str | None = None, calls: bool = True) -> dict[str, Any]:
    writer = message_format()
    writer.add(ANSWER if calls else ANSWER[:4])
    writer.finish(reason, stop, USAGE)
    return writer.answer


def test_the_official_client_reads_messages_streamed_and_not() -> None:
    sdk, httpx = pytest.importorskip("anthropic"), pytest.importorskip("httpx2")
    message = sdk.types.Message.model_validate(whole_message(), strict=True)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].thinking == "I need the weather." and message.content[1].text == "Let me see."
    assert message.content[2].input == {"city": "Paris"} and message.content[3].input == {}
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (14, 16)

    events = all_events(message_format(), ANSWER)
    lines = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    headers = {"content-type": "text/event-stream"}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=lines, headers=headers))
    client = sdk.Anthropic(api_key="x", http_client=sdk.DefaultHttpxClient(transport=transport))
    asked = {name: MESSAGES_BODY[name] for name in ("model", "max_tokens", "messages", "tools")}
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in message.content]
    assert streamed.stop_reason == message.stop_reason and streamed.usage.output_tokens == 12


def test_why_a_message_ended() -> None:
    for reason, stop, calls, expected in (
        ("stop", None, False, ("end_turn", None)), ("stop", "END", False, ("stop_sequence", "END")),
        ("stop", None, True, ("tool_use", None)), ("length", None, True, ("max_tokens", None)),
        ("abort", None, False, ("max_tokens", None)),
    ):  # fmt: skip
        found = whole_message(reason, stop, calls)
        assert (found["stop_reason"], found["stop_sequence"]) == expected
