"""POST /v1/responses and /v1/messages: chats in two other dialects (responses.py, anthropic.py), answered by the same
engine requests as chat completions."""

from collections.abc import Callable
from functools import partial
from typing import Any

from nanovllm.serve.api import anthropic, responses
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import serve
from nanovllm.serve.api.chat import check_body, encode, is_short, prepare_chat
from nanovllm.serve.api.messages import LeftOut
from nanovllm.serve.api.reading import note_ignored, read
from nanovllm.serve.api.responses_input import readable
from nanovllm.serve.api.responses_tools import ResponsesTools
from nanovllm.serve.errors import ApiError
from nanovllm.serve.formats.messages import MessagesFormat
from nanovllm.serve.formats.responses import ResponsesFormat
from nanovllm.serve.front import Front
from nanovllm.serve.http.call import Call
from nanovllm.serve.output_items import OutputItems
from nanovllm.serve.request import Prepared
from nanovllm.serve.served_model import ServedModel


def response_error(error: ApiError) -> bytes:
    """The body of an error of /v1/responses."""
    error.rename({"messages": "input", "response_format": "text.format", "reasoning_effort": "reasoning.effort"})
    return error.body()


def _read_response(
    items: OutputItems, model: ServedModel, call: Call, body: dict[str, Any]
) -> tuple[dict[str, Any], ResponsesTools]:
    """The chat completion request for a Responses request, and its tools. Raises ApiError."""
    check_body(model, call, body, "input")
    body = readable(body, partial(items.find, call.key))
    fields, left_out = read(model, call, responses.ResponsesFields, body), LeftOut("input")
    tools = ResponsesTools(responses.tools_of(fields))
    request = responses.chat_request(fields, tools, left_out)
    note_ignored(model.options, call, *tools.ignored, *left_out.names)
    return request, tools


def _prepare_response(items: OutputItems, model: ServedModel, call: Call, body: dict[str, Any]) -> Prepared:
    request, tools = _read_response(items, model, call, body)
    return prepare_chat(model, call, request, tools.text_grammars)._replace(given=(body, tools))


async def create_response(front: Front, call: Call) -> None:
    prepare = partial(_prepare_response, front.output_items)
    request = await serve(front, call, prepare, ResponsesFormat, is_short)
    if isinstance(form := request.format, ResponsesFormat) and form.stores and not request.has_left:
        front.output_items.keep(call.key, form.items)


def _read_message(
    kind: type[anthropic.CountFields], model: ServedModel, call: Call, body: dict[str, Any]
) -> dict[str, Any]:
    """The chat completion request for a Messages request. Raises ApiError."""
    check_body(model, call, body, "messages")
    left_out = LeftOut("messages")
    request = anthropic.chat_request(read(model, call, kind, body), left_out)
    note_ignored(model.options, call, *left_out.names)
    return request


def _prepare_message(model: ServedModel, call: Call, body: dict[str, Any]) -> Prepared:
    return prepare_chat(model, call, _read_message(anthropic.MessagesFields, model, call, body))


async def create_message(front: Front, call: Call) -> None:
    _name_as_anthropic(call)
    await serve(front, call, _prepare_message, MessagesFormat, is_short)


async def _count(front: Front, call: Call, to_chat: Callable[[ServedModel, Call, dict[str, Any]], Any]) -> int:
    """Tokens of the prompt of a request, of which `to_chat` makes a chat completion request. Raises ApiError."""
    front.admission.admit(call.key)
    await call.receive()

    def work(body: dict[str, Any]) -> int:
        _, ids = encode(front.model, call, read(front.model, call, api.ChatFields, to_chat(front.model, call, body)))
        return len(ids)

    return await front.pool.read(call, work, is_short)


async def count_message(front: Front, call: Call) -> None:
    _name_as_anthropic(call)
    count = await _count(front, call, partial(_read_message, anthropic.CountFields))
    await call.respond_json({"input_tokens": count})


async def count_response(front: Front, call: Call) -> None:
    count = await _count(front, call, lambda *given: _read_response(front.output_items, *given)[0])
    await call.respond_json({"object": "response.input_tokens", "input_tokens": count})


def _name_as_anthropic(call: Call) -> None:
    """Gives the response the header in which Anthropic's clients look for its id."""
    call.notes.append((b"request-id", call.request_id.encode()))
