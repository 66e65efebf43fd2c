"""Anthropic's Messages API in terms of chat completions: requests one way, answers and stream events the other.

Pure functions and one stateful writer; nothing here knows of connections.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.serve.errors import ApiError, bad_request, require_list
from nanovllm.serve.parsers import Delta

Event = dict[str, Any]
"""An event's data; its "type" is the event's name."""

_SAME = ("model", "stream", "temperature", "top_p", "top_k", "metadata", "service_tier")
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}
_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def chat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion request for a Messages request. Raises ApiError (400) naming the field that is wrong."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages: must be a list of at least one message", "messages")
    if "max_tokens" not in body:
        raise bad_request("max_tokens: is required", "max_tokens", "missing_required_parameter")
    request = {name: body[name] for name in _SAME if body.get(name) is not None}
    request["max_completion_tokens"] = body["max_tokens"]
    request["messages"] = [
        *_system(body.get("system")),
        *(one for i, message in enumerate(messages) for one in _messages(message, f"messages[{i}]")),
    ]
    if body.get("stop_sequences"):
        request["stop"] = body["stop_sequences"]
    if body.get("stream"):
        request["stream_options"] = {"include_usage": True}
    if body.get("tools"):
        request["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(require_list(body["tools"], "tools"))]
        request |= _tool_choice(body.get("tool_choice") or {"type": "auto"})
    thinking = body.get("thinking")
    if isinstance(thinking, Mapping):
        request["chat_template_kwargs"] = {"enable_thinking": thinking.get("type") in ("enabled", "adaptive")}
    return request


def _text(content: Any, where: str) -> str:
    """A text, or text blocks joined."""
    if isinstance(content, str):
        return content
    blocks = require_list(content, where)
    for block in blocks:
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise bad_request(f"{where}: must be a text or blocks of type 'text'", where.partition("[")[0])
    return "\n".join(block["text"] for block in blocks)


def _system(system: Any) -> list[dict[str, Any]]:
    return [] if not system else [{"role": "system", "content": _text(system, "system")}]


def _messages(message: Any, where: str) -> list[dict[str, Any]]:
    """One message's equals: results of tools are messages of their own, before what the user says beside them."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role={str(role)[:50]!r}: must be 'user' or 'assistant'", "messages")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    texts, thoughts, calls, results = [], [], [], []
    for i, block in enumerate(require_list(content, f"{where}.content")):
        kind = block.get("type") if isinstance(block, Mapping) else None
        place = f"{where}.content[{i}]"
        if kind == "text":
            texts.append(_text([block], place))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use" and role == "assistant":
            given = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": given}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            said = _text(block.get("content") or "", f"{place}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said})
        elif kind != "redacted_thinking":
            raise bad_request(f"{place}.type={str(kind)[:50]!r}: only text and tools are taken", "messages")
    out: dict[str, Any] = {"role": role, "content": "\n".join(texts) if texts or not calls else None}
    if thoughts:
        out["reasoning_content"] = "\n".join(thoughts)
    if calls:
        out["tool_calls"] = calls
    return [*results, out] if texts or calls or thoughts or not results else results


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") != "custom":
        raise bad_request(f"{where}: must be a tool with name and input_schema; no other kinds are taken", "tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> dict[str, Any]:
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind not in ("auto", "any", "tool", "none"):
        raise bad_request(f"tool_choice.type={str(kind)[:50]!r}: must be auto, any, tool or none", "tool_choice")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    wanted = {"auto": "auto", "any": "required", "none": "none", "tool": named}[kind]
    return {"tool_choice": wanted, "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False)}


def usage(chat_usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = chat_usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": chat_usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": chat_usage["completion_tokens"],
    }


def stop_fields(finish_reason: str, stop_reason: int | str | None, made_calls: bool) -> dict[str, Any]:
    """Why an answer ended; `stop_reason`: the stop text that ended it, as vLLM's field of this name."""
    if isinstance(stop_reason, str) and finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    reason = "tool_use" if made_calls and finish_reason == "stop" else _STOP_REASONS[finish_reason]
    return {"stop_reason": reason, "stop_sequence": None}


def message(
    message_id: str, model: str, deltas: Iterable[Delta], stop: Mapping[str, Any], chat_usage: Mapping[str, Any]
) -> dict[str, Any]:
    """An unstreamed answer, from all of its deltas."""
    writer = MessageWriter(message_id, model)
    blocks: list[dict[str, Any]] = []
    for event in writer.write(deltas):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[-1]
            if delta["type"] == "input_json_delta":
                block["input"] = block["input"] or ""
                block["input"] += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _object(block["input"])
    head: dict[str, Any] = {"id": message_id, "type": "message", "role": "assistant", "model": model}
    return {**head, "content": blocks, **stop, "usage": usage(chat_usage)}


def _object(text: Any) -> Any:
    """A call's arguments; of one that was cut, an empty object."""
    try:
        return json.loads(text) if text else {}
    except ValueError:
        return {}


class MessageWriter:
    """The events of one streamed answer."""

    def __init__(self, message_id: str, model: str) -> None:
        self._id, self._model = message_id, model
        self._num_blocks = 0
        self._open: tuple[str, int] | None = None
        """Kind and call of the block that is open."""
        self.made_calls = False

    def start(self, num_prompt_tokens: int, num_cached_tokens: int = 0) -> list[Event]:
        empty = {"prompt_tokens": num_prompt_tokens, "completion_tokens": 0}
        empty_usage = usage({**empty, "prompt_tokens_details": {"cached_tokens": num_cached_tokens}})
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": []}
        message = {**head, "stop_reason": None, "stop_sequence": None, "usage": empty_usage}
        return [{"type": "message_start", "message": message}]

    def write(self, deltas: Iterable[Delta]) -> list[Event]:
        """What an answer has gained, as events."""
        events: list[Event] = []
        for delta in deltas:
            if delta.kind == "call":
                self.made_calls = True
                block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
                events += self._begin(("arguments", delta.call_index), block)
                continue
            if self._open != (delta.kind, delta.call_index):
                block = {"type": "text", "text": ""}
                if delta.kind == "reasoning":
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                events += self._begin((delta.kind, delta.call_index), block)
            piece = {
                "content": {"type": "text_delta", "text": delta.text},
                "reasoning": {"type": "thinking_delta", "thinking": delta.text},
                "arguments": {"type": "input_json_delta", "partial_json": delta.text},
            }[delta.kind]
            events.append({"type": "content_block_delta", "index": self._num_blocks - 1, "delta": piece})
        return events

    def finish(self, stop: Mapping[str, Any], chat_usage: Mapping[str, Any]) -> list[Event]:
        end = {"type": "message_delta", "delta": dict(stop), "usage": usage(chat_usage)}
        return [*self._close(), end, {"type": "message_stop"}]

    def _begin(self, kind: tuple[str, int], block: Mapping[str, Any]) -> list[Event]:
        events = self._close()
        self._open = kind
        self._num_blocks += 1
        return [*events, {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": dict(block)}]

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._num_blocks - 1}]


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's own envelope; also the data of a stream's "error" event."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
