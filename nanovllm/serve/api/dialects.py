"""POST /v1/responses and /v1/messages: chats in two other dialects (responses.py, anthropic.py), answered by the same
engine requests as chat completions."""

from collections.abc import Callable
from functools import partial
from typing import Any

from nanovllm.serve.api import anthropic, responses
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import answer
from nanovllm.serve.api.chat import encode, prepare, work_on_chat
from nanovllm.serve.api.messages import LeftOut
from nanovllm.serve.api.reading import note_ignored, read
from nanovllm.serve.api.responses_input import readable
from nanovllm.serve.api.responses_tools import ResponsesTools
from nanovllm.serve.errors import ApiError
from nanovllm.serve.formats.messages import MessagesFormat
from nanovllm.serve.formats.responses import ResponsesFormat
from nanovllm.serve.front import Front
from nanovllm.serve.http.call import Call
from nanovllm.serve.request import Prepared


def _read_response(front: Front, call: Call, body: dict[str, Any]) -> tuple[dict[str, Any], ResponsesTools]:
    """The chat completion request for a Responses request, and its tools. Raises ApiError."""
    body = readable(body, lambda item_id: front.output_items.find(call.key, item_id))
    fields, left_out = read(front.model, call, responses.ResponsesFields, body), LeftOut("input")
    tools = ResponsesTools(responses.tools_of(fields))
    request = responses.chat_request(fields, tools, left_out)
    note_ignored(front.options, call, [*tools.ignored, *left_out.names])
    return request, tools


async def create_response(front: Front, call: Call) -> None:
    front.admission.admit(call.key)

    def work(body: dict[str, Any]) -> tuple[Prepared, dict[str, Any], ResponsesTools]:
        request, tools = _read_response(front, call, body)
        try:
            return prepare(front.model, call, request, tools.text_grammars), body, tools
        except ApiError as error:
            if error.param == "messages":
                error.param = "input"
            raise

    prepared, body, tools = await work_on_chat(front, call, work, "input")
    request = await answer(front, call, prepared, partial(ResponsesFormat, body=body, tools=tools))
    if body.get("store") is not False and not request.has_left and isinstance(request.format, ResponsesFormat):
        front.output_items.keep(call.key, request.format.items)


async def create_message(front: Front, call: Call) -> None:
    _name_as_anthropic(call)
    front.admission.admit(call.key)

    def work(body: dict[str, Any]) -> Prepared:
        return prepare(front.model, call, _read_message(front, call, anthropic.MessagesFields, body))

    await answer(front, call, await work_on_chat(front, call, work, "messages"), MessagesFormat)


def _read_message(front: Front, call: Call, kind: type[anthropic.CountFields], body: dict[str, Any]) -> dict[str, Any]:
    """The chat completion request for a Messages request. Raises ApiError."""
    left_out = LeftOut("messages")
    request = anthropic.chat_request(read(front.model, call, kind, body), left_out)
    note_ignored(front.options, call, left_out.names)
    return request


async def _count(front: Front, call: Call, to_chat: Callable[[dict[str, Any]], dict[str, Any]], text: str) -> int:
    """Tokens of the prompt of a request, of which `to_chat` makes a chat completion request. Raises ApiError."""
    front.admission.admit(call.key)

    def work(body: dict[str, Any]) -> int:
        _, ids = encode(front.model, call, read(front.model, call, api.ChatFields, to_chat(body)))
        return len(ids)

    return await work_on_chat(front, call, work, text)


async def count_message(front: Front, call: Call) -> None:
    _name_as_anthropic(call)
    count = await _count(front, call, lambda body: _read_message(front, call, anthropic.CountFields, body), "messages")
    await call.respond_json({"input_tokens": count})


async def count_response(front: Front, call: Call) -> None:
    count = await _count(front, call, lambda body: _read_response(front, call, body)[0], "input")
    await call.respond_json({"object": "response.input_tokens", "input_tokens": count})


def _name_as_anthropic(call: Call) -> None:
    """Gives the response the header in which Anthropic's clients look for its id."""
    call.notes.append((b"request-id", call.request_id.encode()))
