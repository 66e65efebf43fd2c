"""A chat that calls a tool, and its answer, for tests of the dialects: Messages and Responses."""

from typing import Any

from nanovllm.serve.api import anthropic, responses, shapes
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.responses_tools import ResponsesTools
from nanovllm.serve.parsers import Delta

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
"""The chat that the tests of both dialects ask for."""


def of_messages(body: dict[str, Any]) -> dict[str, Any]:
    return anthropic.chat_request(api.read(anthropic.MessagesFields, body)[0])


def of_responses(body: dict[str, Any]) -> dict[str, Any]:
    fields = api.read(responses.ResponsesFields, body)[0]
    return responses.chat_request(fields, ResponsesTools(fields.tools or ()))


def all_events(writer: Any, deltas: list[Delta]) -> list[dict[str, Any]]:
    """Events of an answer that comes delta by delta. writer: of a dialect."""
    events = writer.start(USAGE)
    for delta in deltas:
        events += writer.write([delta])
    return [*events, *writer.finish("tool_calls", None, USAGE)]
