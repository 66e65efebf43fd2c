"""The format of Anthropic's /v1/messages."""

import json
from typing import Any

import msgspec

from nanovllm.serve.errors import ApiError
from nanovllm.serve.formats.items import Event, ItemsFormat, Kind, written
from nanovllm.serve.formats.shapes import Usage
from nanovllm.serve.http.call import Call
from nanovllm.serve.parsers import Delta
from nanovllm.serve.request import Prepared, Request
from nanovllm.serve.served_model import ServedModel

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "max_tokens"}
_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def _usage(of_chat: Usage) -> dict[str, Any]:
    cached = of_chat.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": of_chat.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": of_chat.completion_tokens,
    }


class MessagesFormat(ItemsFormat):
    """A message, and its events."""

    id_prefix = "msg_"

    def __init__(self, served: ServedModel, call: Call, prepared: Prepared) -> None:
        super().__init__(served, call, prepared)
        self.answer = {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": [],
            "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip

    def sign_of_life(self, request: Request) -> bytes:
        return written([{"type": "ping"}])  # message_start waits for the first token, with which its usage is known

    def start(self, usage: Usage) -> list[Event]:
        return [{"type": "message_start", "message": {**self.answer, "usage": _usage(usage)}}]

    def finish(self, reason: str, stop: int | str | None, usage: Usage) -> list[Event]:
        events = self.end_item(reason != "length")
        end: dict[str, Any] = {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}
        if reason == "stop" and isinstance(stop, str):
            end = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        elif reason == "stop" and any(block["type"] == "tool_use" for block in self.items):  # a call that was asked for
            end["stop_reason"] = "tool_use"
        self.answer |= {"content": self.items, **end, "usage": _usage(usage)}
        return [*events, {"type": "message_delta", "delta": end, "usage": _usage(usage)}, {"type": "message_stop"}]

    def error(self, error: ApiError) -> Event:
        return error_body(error)

    def _event(self, kind: str, **data: Any) -> Event:
        return {"type": f"content_block_{kind}", "index": len(self.items) - 1, **data}

    def begin(self, kind: Kind, delta: Delta) -> list[Event]:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif kind == "arguments":
            block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
        self.items.append(block)
        return [self._event("start", content_block={**block})]

    def gain(self, kind: Kind, text: str) -> list[Event]:
        name, field = _DELTAS[kind]
        return [self._event("delta", delta={"type": name, field: text})]

    def close(self, kind: Kind, text: str, is_complete: bool) -> list[Event]:
        if kind == "arguments":
            self.items[-1]["input"] = _object(text)
        else:
            self.items[-1][_DELTAS[kind][1]] = text
        if kind == "reasoning":  # clients send thinking back only if it has some signature
            self.items[-1]["signature"] = self.answer["id"]
            signature = {"type": "signature_delta", "signature": self.answer["id"]}
            return [self._event("delta", delta=signature), self._event("stop")]
        return [self._event("stop")]


_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "arguments": ("input_json_delta", "partial_json"),
}


def _object(text: str) -> Any:
    """A call's arguments; of one that was cut, an empty object."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's own envelope; also the data of a stream's "error" event."""
    error.rename({"response_format": "output_config.format", "reasoning_effort": "output_config.effort"})
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.excess is not None:  # the words by which clients know that they have to shorten the chat
        message = "prompt is too long: {} tokens > {} maximum".format(*error.excess)
    return {"type": "error", "error": {"type": kind, "message": message}}


def message_error(error: ApiError) -> bytes:
    """The body of an error in this envelope."""
    return msgspec.json.encode(error_body(error))
