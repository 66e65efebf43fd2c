"""OpenAI's Responses API in terms of chat completions: requests one way, answers and stream events the other.

Nothing here knows of connections, and nothing is stored.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta

from nanovllm.serve.api.fields import Positive, Share, Temperature, convert
from nanovllm.serve.api.shapes import Usage
from nanovllm.serve.api.writer import Event, Kind, Writer
from nanovllm.serve.errors import ApiError, bad_request
from nanovllm.serve.limits import MESSAGES
from nanovllm.serve.parsers import Delta
from nanovllm.serve.parsers.tools import MAX_TOOLS


class Part(msgspec.Struct):
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str = ""


class Item(msgspec.Struct):
    """Of a request's input."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class Tool(msgspec.Struct, omit_defaults=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: str | None = None
    tools: list[dict[str, Any]] = []


class ResponsesFields(msgspec.Struct):
    """Of /v1/responses."""

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


_STATEFUL = ("previous_response_id", "conversation", "prompt", "background")


def chat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion request for a Responses request. Raises ApiError (400) naming the field that is wrong."""
    for name in _STATEFUL:
        if body.get(name):
            raise bad_request(f"{name}: not supported; nothing is stored between requests", code="unsupported_field")
    fields = convert(ResponsesFields, body)
    names = ("model", "stream", "temperature", "top_p", "parallel_tool_calls")
    request = {name: value for name in names if (value := getattr(fields, name)) is not None}
    if fields.max_output_tokens is not None:
        request["max_completion_tokens"] = fields.max_output_tokens
    request["messages"] = _messages(fields)
    if fields.stream:
        request["stream_options"] = {"include_usage": True}
    if fields.tools:
        request["tools"] = [_function(msgspec.to_builtins(tool)) for tool in fields.tools]
        request["tool_choice"] = _tool_choice(fields.tool_choice)
    request["reasoning_effort"] = (fields.reasoning or {}).get("effort")
    if isinstance(form := (fields.text or {}).get("format"), dict):
        request["response_format"] = {"type": form.get("type"), "json_schema": form}
    return request


def _messages(fields: ResponsesFields) -> list[dict[str, Any]]:
    """Messages for input items; calls and reasoning become part of the assistant's message that they belong to."""
    messages: list[dict[str, Any]] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        return [*messages, {"role": "user", "content": fields.input}]
    for i, item in enumerate(fields.input):
        if item.type == "message":
            _add_message(messages, item.role, _text(item.content, f"input[{i}].content"))
        elif item.type == "function_call":
            call = _function({"name": item.name, "arguments": item.arguments or "{}"}) | {"id": item.call_id}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output":
            output = _text(item.output, f"input[{i}].output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif thoughts := _text(item.content or item.summary or "", ""):
            messages.append({"role": "assistant", "content": None, "reasoning_content": thoughts})
    return [one if one["content"] is not None or "tool_calls" in one else {**one, "content": ""} for one in messages]


def _add_message(messages: list[dict[str, Any]], role: str, content: str) -> None:
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == role and last["content"] is None and "tool_calls" not in last:
        last["content"] = content  # after its reasoning
    else:
        messages.append({"role": role, "content": content})


def _text(content: str | list[Part] | None, where: str) -> str:
    if content is None:
        raise bad_request(f"{where}: is required")
    return content if isinstance(content, str) else "\n".join(part.text or part.refusal for part in content)


def _function(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in function.items() if name != "type"}}


def _tool_choice(choice: str | ToolChoice | None) -> Any:
    if not isinstance(choice, ToolChoice):
        return choice
    if choice.type == "function":
        return _function({"name": choice.name})
    tools = [_function({"name": one.get("name")}) for one in choice.tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


def usage(of_chat: Usage) -> dict[str, Any]:
    cached, details = of_chat.prompt_tokens_details.cached_tokens, of_chat.completion_tokens_details
    return {
        "input_tokens": of_chat.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": of_chat.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0 if details is UNSET else details.reasoning_tokens},
        "total_tokens": of_chat.total_tokens,
    }


class ResponseWriter(Writer):
    """A response object, and its events."""

    def __init__(self, response_id: str, model: str, created: int, body: Mapping[str, Any]) -> None:
        """`response_id`: resp_...; `body`: the request, whose settings the response repeats."""
        super().__init__()
        self._suffix = response_id.partition("_")[2]
        self.whole = {
            "id": response_id,
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": model,
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "temperature": body.get("temperature", 1.0),
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None,
        }
        self._sequence = 0

    def start(self, chat_usage: Usage) -> list[Event]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response={**self.whole}) for kind in kinds]

    def gain(self, kind: Kind, text: str) -> Event:
        return self._part_event(f"{_EVENT_OF[kind]}.delta", delta=text, **_EXTRA.get(kind, {}))

    def finish(self, reason: str, stop: int | str | None, chat_usage: Usage) -> list[Event]:
        is_complete = reason not in ("length", "abort")
        events = self.end_item(is_complete)
        self.whole |= {"status": _STATUS[is_complete], "output": self.items, "usage": usage(chat_usage)}
        if reason == "length":
            self.whole["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._event(f"response.{_STATUS[is_complete]}", response=self.whole)]

    def fail(self, error: ApiError) -> list[Event]:
        return [self._event("error", code=error.code, message=error.message, param=error.param)]

    def _event(self, kind: str, **data: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **data}

    def _item_event(self, kind: str) -> Event:
        return self._event(
            f"response.output_item.{kind}", output_index=len(self.items) - 1, item={**self.items[-1]}
        )

    def _part_event(self, kind: str, **data: Any) -> Event:
        item = self.items[-1]
        part = {} if item["type"] == "function_call" else {"content_index": 0}
        return self._event(kind, item_id=item["id"], output_index=len(self.items) - 1, **part, **data)

    def begin(self, kind: Kind, delta: Delta) -> list[Event]:
        number = f"{self._suffix}_{len(self.items)}"
        item: dict[str, Any] = {"id": f"msg_{number}", "type": "message", "role": "assistant", "content": []}
        if kind == "reasoning":
            item = {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": []}
        elif kind == "arguments":
            call = {"call_id": delta.id, "name": delta.name, "arguments": ""}
            item = {"id": f"fc_{number}", "type": "function_call", **call}
        self.items.append({**item, "status": "in_progress"})
        added = self._item_event("added")
        if kind == "arguments":
            return [added]
        return [added, self._part_event("response.content_part.added", part=_part(kind, ""))]

    def close(self, kind: Kind, text: str, is_complete: bool) -> list[Event]:
        item = self.items[-1]
        if kind == "arguments":
            item["arguments"] = text
            events = [self._part_event(f"{_EVENT_OF[kind]}.done", name=item["name"], arguments=text)]
        else:
            item["content"] = [_part(kind, text)]
            events = [
                self._part_event(f"{_EVENT_OF[kind]}.done", text=text, **_EXTRA.get(kind, {})),
                self._part_event("response.content_part.done", part=_part(kind, text)),
            ]
        item["status"] = _STATUS[is_complete]
        return [*events, self._item_event("done")]


_STATUS = {True: "completed", False: "incomplete"}
_EVENT_OF = {
    "content": "response.output_text",
    "reasoning": "response.reasoning_text",
    "arguments": "response.function_call_arguments",
}
_EXTRA: dict[str, dict[str, Any]] = {"content": {"logprobs": []}}


def _part(kind: Kind, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
