"""Messages requests as chats, and answers as Anthropic's client reads them."""

import json
from typing import Any

import pytest
from conversation import ANSWER, ASKED, FUNCTION, SCHEMA, USAGE, all_events, of_messages
from serving import user

from nanovllm.serve.api import anthropic
from nanovllm.serve.errors import ApiError

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
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image': must be one of.*; images, sound"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "must be in a message of role 'assist"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content: is required"),
        ({"tools": [{"type": "bash_20250124", "name": "bash", "input_schema": {}}]}, "type='bash.*must be 'custom'"),
        ({"tools": [{"name": "bash"}]}, r"tools\[0\].input_schema: is required"),
        ({"tools": None}, "tool_choice.type='any': needs tools"),
        ({"output_config": {"format": {"type": "yaml"}}}, "^output_config.format.type='yaml': must be one of 'text', "),
    ],
)
def test_what_a_messages_request_must_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        of_messages({**MESSAGES_BODY, **change})
    body = anthropic.error_body(caught.value)
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


def whole_message(reason: str = "tool_calls", stop: str | None = None, calls: bool = True) -> dict[str, Any]:
    writer = anthropic.MessageWriter("msg_1", "demo")
    writer.write(ANSWER if calls else ANSWER[:4])
    writer.finish(reason, stop, USAGE)
    return writer.whole


def test_the_official_client_reads_messages_streamed_and_not() -> None:
    sdk, httpx = pytest.importorskip("anthropic"), pytest.importorskip("httpx2")
    message = sdk.types.Message.model_validate(whole_message(), strict=True)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].thinking == "I need the weather." and message.content[1].text == "Let me see."
    assert message.content[2].input == {"city": "Paris"} and message.content[3].input == {}
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (14, 16)

    events = all_events(anthropic.MessageWriter("msg_1", "demo"), ANSWER)
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
    ):  # fmt: skip
        found = whole_message(reason, stop, calls)
        assert (found["stop_reason"], found["stop_sequence"]) == expected
