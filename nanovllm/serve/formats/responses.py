"""The format of OpenAI's /v1/responses."""

from typing import Any

from msgspec import UNSET

from nanovllm.serve.api.responses import ENCRYPTED
from nanovllm.serve.api.responses_input import sealed
from nanovllm.serve.api.responses_tools import ResponsesTools, custom_input
from nanovllm.serve.errors import ApiError
from nanovllm.serve.formats.items import Event, ItemsFormat, Kind, written
from nanovllm.serve.formats.shapes import ContentToken, Usage
from nanovllm.serve.http.call import Call
from nanovllm.serve.parsers import Delta
from nanovllm.serve.request import Prepared, Request, Row
from nanovllm.serve.served_model import ServedModel


def _usage(of_chat: Usage) -> dict[str, Any]:
    cached, details = of_chat.prompt_tokens_details.cached_tokens, of_chat.completion_tokens_details
    return {
        "input_tokens": of_chat.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": of_chat.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0 if details is UNSET else details.reasoning_tokens},
        "total_tokens": of_chat.total_tokens,
    }


class ResponsesFormat(ItemsFormat):
    """A response object, and its events."""

    id_prefix = "resp_"
    given: tuple[dict[str, Any], ResponsesTools]

    def __init__(self, served: ServedModel, call: Call, prepared: Prepared) -> None:
        """`prepared.given`: the request's body, whose settings the response repeats, and its tools."""
        super().__init__(served, call, prepared)
        body, self._tools = self.given
        self.stores = body.get("store") is not False
        """Whether later requests may name its items."""
        self._unclosed: list[ContentToken] = []
        """Log-probabilities of the text that grows."""
        self._num_told = 0
        """Log-probabilities of that text that events have sent."""
        self._suffix = self.id.removeprefix("resp_")
        self._seals = ENCRYPTED in (body.get("include") or ())
        params = prepared.params
        self.answer = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": self.model,
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "temperature": params.get("temperature", 1.0),
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_logprobs": body.get("top_logprobs") or 0,
            "top_p": params.get("top_p", 1.0),
            "truncation": body.get("truncation") or "disabled",
            "usage": None,
        }
        self._sequence = 0

    def sign_of_life(self, request: Request) -> bytes:
        [row] = request.rows
        if row.has_begun:
            return written(self._state("response.in_progress"))
        row.has_begun = True
        return self.head(row)

    def chunk(self, row: Row, text: str) -> bytes:
        if row.lines:
            begin = row.state or 0
            row.state = begin + len(row.lines)
            num_hidden = max(0, sum(each.num_reasoning_tokens for each in self.texts) - begin)
            self._unclosed += self.entries(row.lines[num_hidden:])
            row.lines = []
        return super().chunk(row, text)

    def start(self, usage: Usage) -> list[Event]:
        return self._state("response.created", "response.in_progress")

    def _state(self, *kinds: str) -> list[Event]:
        return [self._event(kind, response={**self.answer}) for kind in kinds]

    def gain(self, kind: Kind, text: str) -> list[Event]:
        if self.items[-1]["type"] == "custom_tool_call":
            return []  # JSON until it is whole
        return [self._part_event(f"{_EVENT_OF[kind]}.delta", delta=text, **self._details(kind, self._num_told))]

    def _details(self, kind: Kind, begin: int) -> dict[str, Any]:
        """Log-probabilities of the text's tokens from `begin` on."""
        if kind != "content":
            return {}
        self._num_told = len(self._unclosed)
        return {"logprobs": self._unclosed[begin:]}

    def finish(self, reason: str, stop: int | str | None, usage: Usage) -> list[Event]:
        is_complete = reason not in ("length", "abort")
        events = self.end_item(is_complete)
        self.answer |= {"status": _STATUS[is_complete], "output": self.items, "usage": _usage(usage)}
        if reason == "length":
            self.answer["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._event(f"response.{_STATUS[is_complete]}", response=self.answer)]

    def error(self, error: ApiError) -> Event:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _event(self, kind: str, **data: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **data}

    def _item_event(self, kind: str) -> Event:
        return self._event(f"response.output_item.{kind}", output_index=len(self.items) - 1, item={**self.items[-1]})

    def _part_event(self, kind: str, **data: Any) -> Event:
        item = self.items[-1]
        part = {"content_index": 0} if item["type"] in ("message", "reasoning") else {}
        return self._event(kind, item_id=item["id"], output_index=len(self.items) - 1, **part, **data)

    def begin(self, kind: Kind, delta: Delta) -> list[Event]:
        number = f"{self._suffix}_{len(self.items)}"
        item: dict[str, Any] = {"id": f"msg_{number}", "type": "message", "role": "assistant", "content": []}
        if kind == "reasoning":
            item = {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": []}
        elif kind == "arguments":
            item = self._tools.item(number, delta.id, delta.name)
        self.items.append({**item, "status": "in_progress"})
        added = self._item_event("added")
        if kind == "arguments":
            return [added]
        return [added, self._part_event("response.content_part.added", part=_part(kind, ""))]

    def close(self, kind: Kind, text: str, is_complete: bool) -> list[Event]:
        item = self.items[-1]
        if item["type"] == "custom_tool_call":
            item["input"] = custom_input(text)
            events = [
                self._part_event("response.custom_tool_call_input.delta", delta=item["input"]),
                self._part_event("response.custom_tool_call_input.done", input=item["input"]),
            ]
        elif kind == "arguments":
            item["arguments"] = text
            events = [self._part_event(f"{_EVENT_OF[kind]}.done", name=item["name"], arguments=text)]
        else:
            details = self._details(kind, 0)
            if kind == "content":
                self._unclosed, self._num_told = [], 0
            part = _part(kind, text) | details
            item["content"] = [part]
            if kind == "reasoning" and self._seals:
                item["encrypted_content"] = sealed(text)
            events = [
                self._part_event(f"{_EVENT_OF[kind]}.done", text=text, **details),
                self._part_event("response.content_part.done", part=part),
            ]
        item["status"] = _STATUS[is_complete]
        return [*events, self._item_event("done")]


_STATUS = {True: "completed", False: "incomplete"}
_EVENT_OF = {
    "content": "response.output_text",
    "reasoning": "response.reasoning_text",
    "arguments": "response.function_call_arguments",
}


def _part(kind: Kind, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
