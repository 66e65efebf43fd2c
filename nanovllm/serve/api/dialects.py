"""POST /v1/responses and /v1/messages: chats in two other dialects (responses.py, anthropic.py), answered by the same
engine requests as chat completions."""

from collections.abc import Callable
from typing import Any

import msgspec

from nanovllm.serve.api import anthropic, responses
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import Prepared, answer
from nanovllm.serve.api.chat import ChatAnswer, encode, prepare, work_on_chat
from nanovllm.serve.api.messages import LeftOut
from nanovllm.serve.api.reading import note_ignored, read
from nanovllm.serve.api.responses_input import readable
from nanovllm.serve.api.responses_tools import ResponsesTools
from nanovllm.serve.api.writer import Event
from nanovllm.serve.errors import ApiError
from nanovllm.serve.front import Front
from nanovllm.serve.http.call import Call
from nanovllm.serve.request import Completion


def _bytes(events: list[Event]) -> bytes:
    """Server-sent events; each is named by its type."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (each["type"].encode(), msgspec.json.encode(each)) for each in events)


class DialectAnswer(ChatAnswer):
    """One answer in the form that its writer gives it."""

    writer: responses.ResponseWriter | anthropic.MessageWriter
    counts_events = True

    def head(self, completion: Completion) -> bytes:
        return _bytes(self.writer.start(self.usage()))

    def chunk(self, completion: Completion, text: str) -> bytes:
        return _bytes(self.writer.write(self.read(completion, text)))

    def ending(self) -> bytes:
        [completion] = self.completions
        reason = self.finish_reason(completion) or "stop"
        return _bytes(self.writer.finish(reason, completion.stop_reason, self.usage()))

    def failure(self, error: ApiError) -> bytes:
        return _bytes(self.writer.fail(error))

    def response(self) -> bytes:
        [completion] = self.completions
        self.chunk(completion, "".join(completion.pieces))
        self.ending()
        return msgspec.json.encode(self.writer.whole)


class ResponsesAnswer(DialectAnswer):
    id_prefix = "resp_"
    writer: responses.ResponseWriter

    def sign_of_life(self) -> bytes:
        [completion] = self.completions
        if completion.has_begun:
            return _bytes(self.writer.go_on())
        completion.has_begun = True
        return self.head(completion)

    def chunk(self, completion: Completion, text: str) -> bytes:
        if completion.lines:
            begin = completion.state or 0
            completion.state = begin + len(completion.lines)
            num_hidden = max(0, sum(each.num_reasoning_tokens for each in self.texts) - begin)
            self.writer.add_logprobs(self.entries(completion.lines[num_hidden:]))
            completion.lines = []
        return super().chunk(completion, text)


class MessagesAnswer(DialectAnswer):
    id_prefix = "msg_"
    writer: anthropic.MessageWriter

    def sign_of_life(self) -> bytes:
        return _bytes([{"type": "ping"}])  # message_start waits for the first token, with which its usage is known


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
    request = ResponsesAnswer(front, call, prepared)
    about = request.id, request.model, request.created
    request.writer = responses.ResponseWriter(*about, body, request.params, tools)
    await answer(request)
    if body.get("store") is not False and not request.has_left:
        front.output_items.keep(call.key, request.writer.items)


async def create_message(front: Front, call: Call) -> None:
    _name_as_anthropic(call)
    front.admission.admit(call.key)

    def work(body: dict[str, Any]) -> Prepared:
        return prepare(front.model, call, _read_message(front, call, anthropic.MessagesFields, body))

    request = MessagesAnswer(front, call, await work_on_chat(front, call, work, "messages"))
    request.writer = anthropic.MessageWriter(request.id, request.model)
    await answer(request)


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


def message_error(error: ApiError) -> bytes:
    """The body of an error of these two, in Anthropic's own envelope."""
    return msgspec.json.encode(anthropic.error_body(error))
