"""A chat that calls a tool, and its answer, for tests of the dialects: Messages and Responses."""

from typing import Any
from unittest.mock import Mock

from nanovllm.engine.prompt import Prompt
from nanovllm.serve.api import anthropic, responses
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.messages import LeftOut
from nanovllm.serve.api.responses_input import readable
from nanovllm.serve.api.responses_tools import ResponsesTools
from nanovllm.serve.formats import shapes
from nanovllm.serve.formats.items import ItemsFormat
from nanovllm.serve.formats.messages import MessagesFormat
from nanovllm.serve.formats.responses import ResponsesFormat
from nanovllm.serve.parsers import Delta
from nanovllm.serve.request import Prepared

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
    return without(body)[0]


def without(body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The chat for a Messages request, and the names of what was left out."""
    left_out = LeftOut("messages")
    return anthropic.chat_request(api.read(anthropic.MessagesFields, body)[0], left_out), [*left_out.names]


def of_responses(body: dict[str, Any]) -> dict[str, Any]:
    return response_without(body)[0]


def response_without(body: dict[str, Any], **known: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The chat for a Responses request, likewise. `known`: output items by their ids."""
    fields, left_out = api.read(responses.ResponsesFields, readable(body, known.get))[0], LeftOut("input")
    tools = ResponsesTools(responses.tools_of(fields))
    request = responses.chat_request(fields, tools, left_out)
    return request, [*tools.ignored, *left_out.names]


def message_format() -> MessagesFormat:
    return MessagesFormat(*_asked("msg_1"))


def response_format(body: dict[str, Any], tools: ResponsesTools | None = None) -> ResponsesFormat:
    return ResponsesFormat(*_asked("resp_1", (body, tools or ResponsesTools(()))))


def _asked(answer_id: str, given: Any = None) -> tuple[Any, Any, Prepared]:
    """The model, the call and the request of an answer with this id."""
    served = Mock(info={"eos_token_ids": []}, fingerprint="f")
    served.name = "demo"
    syntax: Any = Mock(tags_seen=lambda skips: {})
    prepared = Prepared(api.CommonFields(), [Prompt([5])], {"temperature": 0.25}, [9], syntax, given)
    return served, Mock(given_id=answer_id), prepared


def all_events(form: ItemsFormat, deltas: list[Delta]) -> list[dict[str, Any]]:
    """Events of an answer that comes delta by delta."""
    events = form.start(USAGE)
    for delta in deltas:
        events += form.add([delta])
    return [*events, *form.finish("tool_calls", None, USAGE)]
