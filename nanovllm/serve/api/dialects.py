"""POST /v1/responses and /v1/messages: chats in two other dialects (responses.py, anthropic.py), answered by the same
engine requests as chat completions."""


from typing import Any

import msgspec

from nanovllm.serve.api import anthropic, responses
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import Prepared, answer
from nanovllm.serve.api.chat import ChatAnswer, encode, prepare, work_on_chat
from nanovllm.serve.api.reading import note_ignored, read
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


async def create_response(front: Front, call: Call) -> None:
    front.admission.admit(call.key)

    def work(body: dict[str, Any]) -> tuple[Prepared, dict[str, Any], ResponsesTools]:
        fields = read(front.model, call, responses.ResponsesFields, body)
        tools = ResponsesTools(fields.tools or ())
        note_ignored(front.options, call, tools.ignored)
        request = responses.chat_request(fields, tools)
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


async def create_message(front: Front, call: Call) -> None:
    front.admission.admit(call.key)

    def work(body: dict[str, Any]) -> Prepared:
        fields = read(front.model, call, anthropic.MessagesFields, body)
        return prepare(front.model, call, anthropic.chat_request(fields))

    request = MessagesAnswer(front, call, await work_on_chat(front, call, work, "messages"))
    request.writer = anthropic.MessageWriter(request.id, request.model)
    await answer(request)


async def count_tokens(front: Front, call: Call) -> None:
    front.admission.admit(call.key)

    def work(body: dict[str, Any]) -> int:
        request = anthropic.chat_request(read(front.model, call, anthropic.CountFields, body))
        _, ids = encode(front.model, read(front.model, call, api.ChatFields, request))
        return len(ids)

    await call.respond_json({"input_tokens": await work_on_chat(front, call, work, "messages")})


def message_error(error: ApiError) -> bytes:
    """The body of an error of these two, in Anthropic's own envelope."""
    return msgspec.json.encode(anthropic.error_body(error))
