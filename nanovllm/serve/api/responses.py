"""OpenAI's Responses API in terms of chat completions: requests one way, answers and stream events the other.

Pure functions and one stateful writer; nothing here knows of connections, and nothing is stored.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.serve.errors import ApiError, bad_request, require_list
from nanovllm.serve.parsers import Delta

Event = dict[str, Any]
"""An event's data; its "type" is the event's name."""

_SAME = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "metadata", "user", "service_tier"),
    *("prompt_cache_key", "safety_identifier", "store"),
)
_STATEFUL = ("previous_response_id", "conversation", "prompt", "background")


def chat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion request for a Responses request. Raises ApiError (400) naming the field that is wrong."""
    for name in _STATEFUL:
        if body.get(name):
            raise bad_request(f"{name}: not supported; nothing is stored between requests", name, "unsupported_field")
    request = {name: body[name] for name in _SAME if body.get(name) is not None}
    if body.get("max_output_tokens") is not None:
        request["max_completion_tokens"] = body["max_output_tokens"]
    messages = _messages(body.get("input"))
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    request["messages"] = messages
    if body.get("stream"):
        request["stream_options"] = {"include_usage": True}
    if body.get("tools"):
        request["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(require_list(body["tools"], "tools"))]
        request["tool_choice"] = _tool_choice(body.get("tool_choice"))
    reasoning = body.get("reasoning")
    if isinstance(reasoning, Mapping) and reasoning.get("effort") is not None:
        request["reasoning_effort"] = reasoning["effort"]
    text = body.get("text")
    form = text.get("format") if isinstance(text, Mapping) else None
    if isinstance(form, Mapping) and form.get("type") not in (None, "text"):
        schema = {name: value for name, value in form.items() if name != "type"}
        is_schema = form["type"] == "json_schema"
        request["response_format"] = {"type": form["type"], **({"json_schema": schema} if is_schema else {})}
    return request


def _messages(items: Any) -> list[dict[str, Any]]:
    """Messages for input items; calls and reasoning become part of the assistant's message that they belong to."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise bad_request("input: must be a text or a list of at least one item", "input")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message":
            _add_message(messages, item, f"input[{i}]")
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _text(item.get("output"), f"input[{i}].output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            thoughts = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
            if thoughts:
                messages.append({"role": "assistant", "content": None, "reasoning_content": thoughts})
        else:
            raise bad_request(f"input[{i}].type={str(kind)[:50]!r}: not supported", "input")
    return [one if one["content"] is not None or "tool_calls" in one else {**one, "content": ""} for one in messages]


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    role, content = item.get("role"), _text(item.get("content"), f"{where}.content")
    if role not in ("system", "developer", "user", "assistant"):
        raise bad_request(f"{where}.role={str(role)[:50]!r}: must be system, developer, user or assistant", "input")
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == role and last["content"] is None and "tool_calls" not in last:
        last["content"] = content  # after its reasoning
    else:
        messages.append({"role": role, "content": content})


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that a call belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in require_list(content, where):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in ("input_text", "output_text", "text", "refusal") or not isinstance(text, str):
            raise bad_request(f"{where}: type={str(kind)[:50]!r}: must be a text; only text is taken", "input")
        texts.append(text)
    return "\n".join(texts)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise bad_request(f"{where}.type={str(kind)[:50]!r}: must be 'function'; no other tools are run here", "tools")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        tools = [{"type": "function", "function": {"name": one.get("name")}} for one in choice.get("tools") or []]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return choice


def usage(chat_usage: Mapping[str, Any]) -> dict[str, Any]:
    details = chat_usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": chat_usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": chat_usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": chat_usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": chat_usage["total_tokens"],
    }


class ResponseWriter:
    """One answer: its output items, as they grow and as a whole."""

    def __init__(self, response_id: str, model: str, created: int, body: Mapping[str, Any]) -> None:
        """`response_id`: resp_...; `body`: the request, whose settings the response repeats."""
        self._id, self._suffix = response_id, response_id.partition("_")[2]
        text = body.get("text")
        self._settings = {
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": model,
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "temperature": body.get("temperature", 1.0),
            "text": text if isinstance(text, Mapping) else {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p", 1.0),
            "truncation": "disabled",
        }
        self._created = created
        self._items: list[dict[str, Any]] = []
        self._open: tuple[str, int] | None = None
        """Kind and call of the last item, while it grows."""
        self._pieces: list[str] = []
        self._sequence = 0

    def response(self, finish_reason: str | None, chat_usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """The response object; `finish_reason` None: it goes on."""
        status = {None: "in_progress", "length": "incomplete", "abort": "incomplete"}.get(finish_reason, "completed")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if finish_reason == "length" else None,
            "output": [*self._items],
            **self._settings,
            "usage": None if chat_usage is None else usage(chat_usage),
        }

    def start(self) -> list[Event]:
        return [
            self._event("response.created", response=self.response(None, None)),
            self._event("response.in_progress", response=self.response(None, None)),
        ]

    def write(self, deltas: Iterable[Delta]) -> list[Event]:
        """What the answer has gained, as events."""
        events: list[Event] = []
        for delta in deltas:
            kind = "arguments" if delta.kind == "call" else delta.kind
            if self._open != (kind, delta.call_index):
                events += self._close("completed") + self._begin(kind, delta)
            if delta.text:
                self._pieces.append(delta.text)
                extra: dict[str, Any] = {"logprobs": []} if kind == "content" else {}
                events.append(self._part_event(f"{_EVENT_OF[kind]}.delta", delta=delta.text, **extra))
        return events

    def finish(self, finish_reason: str, chat_usage: Mapping[str, Any]) -> list[Event]:
        events = self._close("incomplete" if finish_reason in ("length", "abort") else "completed")
        whole = self.response(finish_reason, chat_usage)
        return [*events, self._event(f"response.{whole['status']}", response=whole)]

    def fail(self, error: ApiError) -> list[Event]:
        return [self._event("error", code=error.code, message=error.message, param=error.param)]

    def _event(self, kind: str, **data: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **data}

    def _part_event(self, kind: str, **data: Any) -> Event:
        item = self._items[-1]
        part = {} if item["type"] == "function_call" else {"content_index": 0}
        return self._event(kind, item_id=item["id"], output_index=len(self._items) - 1, **part, **data)

    def _begin(self, kind: str, delta: Delta) -> list[Event]:
        self._open, self._pieces = (kind, delta.call_index), []
        number = f"{self._suffix}_{len(self._items)}"
        item: dict[str, Any] = {"id": f"msg_{number}", "type": "message", "role": "assistant", "content": []}
        if kind == "reasoning":
            item = {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": []}
        elif kind == "arguments":
            call = {"call_id": delta.id, "name": delta.name, "arguments": ""}
            item = {"id": f"fc_{number}", "type": "function_call", **call}
        self._items.append({**item, "status": "in_progress"})
        added = self._event("response.output_item.added", output_index=len(self._items) - 1, item={**self._items[-1]})
        if kind == "arguments":
            return [added]
        return [added, self._part_event("response.content_part.added", part=_part(kind, ""))]

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        kind, item, text = self._open[0], self._items[-1], "".join(self._pieces)
        self._open = None
        if kind == "arguments":
            item["arguments"] = text
            events = [self._part_event(f"{_EVENT_OF[kind]}.done", name=item["name"], arguments=text)]
        else:
            item["content"] = [_part(kind, text)]
            extra: dict[str, Any] = {"logprobs": []} if kind == "content" else {}
            events = [
                self._part_event(f"{_EVENT_OF[kind]}.done", text=text, **extra),
                self._part_event("response.content_part.done", part=_part(kind, text)),
            ]
        item["status"] = status
        done = self._event("response.output_item.done", output_index=len(self._items) - 1, item={**item})
        return [*events, done]


_EVENT_OF = {
    "content": "response.output_text",
    "reasoning": "response.reasoning_text",
    "arguments": "response.function_call_arguments",
}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
