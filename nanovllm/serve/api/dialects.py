"""POST /v1/responses and /v1/messages: chats in two other dialects (responses.py, anthropic.py), answered by the same
engine requests as chat completions."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import orjson

from nanovllm.serve.api import anthropic, responses
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import answer
from nanovllm.serve.api.chat import ChatAnswer, encode, prepare
from nanovllm.serve.errors import ApiError
from nanovllm.serve.http.call import Call
from nanovllm.serve.parsers import Delta, joined
from nanovllm.serve.request import Completion

if TYPE_CHECKING:
    from nanovllm.serve.front import Front


def _events(events: Iterable[dict[str, Any]]) -> bytes:
    """Server-sent events; each is named by its type."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (each["type"].encode(), orjson.dumps(each)) for each in events)


class ResponsesAnswer(ChatAnswer):
    """One answer in the form of OpenAI's Responses API."""

    id_prefix = "resp_"
    writer: responses.ResponseWriter

    def head(self, completion: Completion) -> bytes:
        return _events(self.writer.start())

    def chunk(self, completion: Completion, text: str) -> bytes:
        return _events(self.writer.write(self.read(completion, text)))

    def ending(self) -> bytes:
        return _events(self.writer.finish(self._reason(), self.usage()))

    def failure(self, error: ApiError) -> bytes:
        return _events(self.writer.fail(error))

    def response(self) -> bytes:
        [completion] = self.completions
        self.writer.write(self.read(completion, "".join(completion.pieces)))
        self.writer.finish(self._reason(), self.usage())
        return orjson.dumps(self.writer.response(self._reason(), self.usage()))

    def _reason(self) -> str:
        return self.finish_reason(self.completions[0]) or "stop"


class MessagesAnswer(ChatAnswer):
    """One answer in the form of Anthropic's Messages API."""

    id_prefix = "msg_"
    writer: anthropic.MessageWriter

    def head(self, completion: Completion) -> bytes:
        return _events(self.writer.start(self.num_prompt_tokens))

    def chunk(self, completion: Completion, text: str) -> bytes:
        return _events(self.writer.write(self.read(completion, text)))

    def ending(self) -> bytes:
        return _events(self.writer.finish(self._stop(self.writer.made_calls), self.usage()))

    def failure(self, error: ApiError) -> bytes:
        return _events([anthropic.error_body(error)])

    def response(self) -> bytes:
        [completion] = self.completions
        deltas: list[Delta] = joined(self.read(completion, "".join(completion.pieces)))
        stop = self._stop(any(delta.kind == "call" for delta in deltas))
        name = self.fields.model or self.front.name
        return orjson.dumps(anthropic.message(self.id, name, deltas, stop, self.usage()))

    def _stop(self, made_calls: bool) -> dict[str, Any]:
        [completion] = self.completions
        reason = self.finish_reason(completion) or "stop"
        return anthropic.stop_fields(reason, completion.stop_reason, made_calls)


async def create_response(front: "Front", call: Call) -> None:
    front.admit()
    body = await call.json()
    api.convert(api.ResponsesFields, body)
    ready = await prepare(front, call, responses.chat_request(body))
    request = ready.answer_as(ResponsesAnswer, front, call)
    name = ready.fields.model or front.name
    request.writer = responses.ResponseWriter(request.id, name, request.created, body)
    await answer(call, request, ready.params, [ready.max_tokens])


async def create_message(front: "Front", call: Call) -> None:
    front.admit()
    body = await call.json()
    api.convert(api.MessagesFields, body)
    ready = await prepare(front, call, anthropic.chat_request(body))
    request = ready.answer_as(MessagesAnswer, front, call)
    request.writer = anthropic.MessageWriter(request.id, ready.fields.model or front.name)
    await answer(call, request, ready.params, [ready.max_tokens])


async def count_tokens(front: "Front", call: Call) -> None:
    front.admit()
    body = await call.json()
    api.convert(api.CountFields, body)
    fields, _ = api.read(api.ChatFields, anthropic.chat_request({"max_tokens": 1, **body}), False)
    front.check_model(fields.model)
    _, ids = await encode(front, fields)
    await call.respond_json({"input_tokens": len(ids)})


def message_error(error: ApiError) -> bytes:
    """The body of an error of these two, in Anthropic's own envelope."""
    return orjson.dumps(anthropic.error_body(error))
