"""OpenAI's Responses API in terms of chat completions: requests one way, answers and stream events the other.

Nothing here knows of connections.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta

from nanovllm.serve.api.fields import INSTEAD, DialectFields, DialectFormat, Likeliest, Positive
from nanovllm.serve.api.messages import LeftOut, function
from nanovllm.serve.api.responses_input import Item, messages_of, sealed
from nanovllm.serve.api.responses_tools import ResponsesTools, Tool, custom_input, flat_name
from nanovllm.serve.api.shapes import ContentToken, Usage
from nanovllm.serve.api.writer import Event, Kind, Writer
from nanovllm.serve.errors import ApiError, bad_request
from nanovllm.serve.limits import MESSAGES
from nanovllm.serve.parsers import Delta
from nanovllm.serve.parsers.tools import MAX_TOOLS


class ToolChoice(msgspec.Struct):
    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: list[dict[str, Any]] = []


class TextOptions(msgspec.Struct):
    format: DialectFormat | None = None
    verbosity: str | None = None


_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_INCLUDABLE = {_ENCRYPTED, _LOGPROBS}.union(
    "file_search_call.results web_search_call.results web_search_call.action.sources message.input_image.image_url "
    "computer_call_output.output.image_url code_interpreter_call.outputs".split()
)
_NOT_STORED = "nothing is stored between requests"


class ResponsesFields(DialectFields, kw_only=True):
    """Body of /v1/responses."""

    meaningless = frozenset(
        "metadata store user service_tier safety_identifier prompt_cache_key prompt_cache_retention "
        "prompt_cache_options stream_options request_id moderation".split()
    )
    refused: ClassVar[Mapping[str, str]] = {
        **INSTEAD,
        **dict.fromkeys(("previous_response_id", "conversation", "prompt", "background"), _NOT_STORED),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "use max_output_tokens"),
        **dict.fromkeys(("response_format", "output_config", "output_format"), "use text.format"),
        "logprobs": f"use top_logprobs and include=[{_LOGPROBS!r}]",
    }
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    top_logprobs: Likeliest | None = None


def tools_of(fields: ResponsesFields) -> list[Tool]:
    """The request's tools, and those that are among its input; of each name the first."""
    items = fields.input if isinstance(fields.input, list) else ()
    found: dict[Any, Tool] = {}
    for number, tool in enumerate([*(fields.tools or ()), *(tool for item in items for tool in item.tools or ())]):
        found.setdefault((tool.type, tool.name) if tool.name else number, tool)
    return [*found.values()]


def chat_request(fields: ResponsesFields, tools: ResponsesTools, left_out: LeftOut) -> dict[str, Any]:
    """The chat completion request for a Responses request. Raises ApiError (400) naming the field that is wrong."""
    for name in fields.include or ():
        if name not in _INCLUDABLE:
            left_out.note(name, "include")
    request = fields.as_chat()
    if fields.max_output_tokens is not None:
        request["max_completion_tokens"] = fields.max_output_tokens
    request["messages"] = messages_of(fields.instructions, fields.input, left_out)
    choice = _tool_choice(fields.tool_choice)
    if tools.functions:
        request["tools"], request["tool_choice"] = tools.functions, choice
        if fields.parallel_tool_calls is not None:
            request["parallel_tool_calls"] = fields.parallel_tool_calls
    elif choice not in (None, "auto", "none"):
        raise bad_request("tool_choice: must be absent, 'auto' or 'none' where no tools are given")
    if effort := (fields.reasoning or {}).get("effort"):
        request["reasoning_effort"] = effort
    if fields.text is not None and (form := fields.text.format) is not None:
        request["response_format"] = {"type": form.type, "json_schema": {"schema": form.schema}}
    if fields.truncation == "auto":
        request["truncate_prompt_tokens"] = -1
    if _LOGPROBS in (fields.include or ()):
        request["logprobs"], request["top_logprobs"] = True, fields.top_logprobs or 0
    elif fields.top_logprobs:
        raise bad_request(f"top_logprobs: needs include=[{_LOGPROBS!r}]")
    return request


def _tool_choice(choice: str | ToolChoice | None) -> Any:
    if not isinstance(choice, ToolChoice):
        return choice
    if choice.type != "allowed_tools":
        return function(name=flat_name(choice.name or "", choice.namespace))
    listed = [function(name=flat_name(str(one.get("name")), one.get("namespace"))) for one in choice.tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": listed}}


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

    def __init__(
        self, response_id: str, model: str, created: int, body: Mapping[str, Any], params: Mapping[str, Any],
        tools: ResponsesTools,
    ) -> None:  # fmt: skip
        """`response_id`: resp_...; `body`: the request, whose settings the response repeats; `params`: how the answer
        is sampled, fields of SamplingParams."""
        super().__init__()
        self._tools = tools
        self._logprobs: list[ContentToken] = []
        """Log-probabilities of the text that grows."""
        self._num_told = 0
        """Log-probabilities of that text that events have sent."""
        self._suffix = response_id.removeprefix("resp_")
        self._seals = _ENCRYPTED in (body.get("include") or ())
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

    def start(self, chat_usage: Usage) -> list[Event]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response={**self.whole}) for kind in kinds]

    def go_on(self) -> list[Event]:
        """A sign of life, of a kind that all clients know."""
        return [self._event("response.in_progress", response={**self.whole})]

    def add_logprobs(self, entries: list[ContentToken]) -> None:
        """Adds log-probabilities of the tokens that the next `write` brings."""
        self._logprobs += entries

    def gain(self, kind: Kind, text: str) -> list[Event]:
        if self.items[-1]["type"] == "custom_tool_call":
            return []  # JSON until it is whole
        return [self._part_event(f"{_EVENT_OF[kind]}.delta", delta=text, **self._details(kind, self._num_told))]

    def _details(self, kind: Kind, begin: int) -> dict[str, Any]:
        """Log-probabilities of the text's tokens from `begin` on."""
        if kind != "content":
            return {}
        self._num_told = len(self._logprobs)
        return {"logprobs": self._logprobs[begin:]}

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
                self._logprobs, self._num_told = [], 0
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
