"""Anthropic's Messages API in terms of chat completions: requests one way, answers and stream events the other.

Nothing here knows of connections.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from nanovllm.sampling_params import MAX_STOP
from nanovllm.serve.api.anthropic_tools import Tool, functions_of, require_some
from nanovllm.serve.api.fields import INSTEAD, DialectFields, DialectFormat, Positive, Text, convert
from nanovllm.serve.api.messages import BLOCK_KINDS, LeftOut, function, newest
from nanovllm.serve.api.shapes import Usage
from nanovllm.serve.api.writer import Event, Kind, Writer
from nanovllm.serve.errors import ApiError, bad_request
from nanovllm.serve.limits import MESSAGES
from nanovllm.serve.parsers import Delta
from nanovllm.serve.parsers.tools import MAX_TOOLS


class TextBlock(msgspec.Struct):
    type: Literal["text"]
    text: str


class Block(msgspec.Struct):
    kinds: ClassVar = BLOCK_KINDS
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Any = None
    """Text or blocks (Content) of a tool's result or a search's; anything in blocks that are left out."""
    source: Any = None
    title: str | None = None
    tool_name: str | None = None


class Content(msgspec.Struct):
    content: str | list[Block] | None = None


class Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct):
    type: str | None = None


class OutputConfig(msgspec.Struct):
    format: DialectFormat | None = None
    effort: str | None = None


class CountFields(DialectFields, kw_only=True):
    """Body of /v1/messages/count_tokens."""

    meaningless = frozenset("max_tokens metadata service_tier cache_control inference_geo speed diagnostics".split())
    refused: ClassVar[Mapping[str, str]] = {
        **INSTEAD,
        **dict.fromkeys(("response_format", "output_format"), "use output_config.format"),
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "use max_tokens"),
        **dict.fromkeys(("mcp_servers", "container"), "the server runs no tools"),
    }
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: Annotated[list[Text], Meta(max_length=MAX_STOP)] | None = None


class MessagesFields(CountFields, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: Positive


_BILLING = "x-anthropic-billing-header:"
"""Begins a line of the system prompt that Claude Code writes for Anthropic alone. It differs from session to session:
with it, no prompt would begin like another one."""
_ROLE_OF = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}
"""Blocks that one role alone may have."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}
_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def chat_request(fields: CountFields, left_out: LeftOut) -> dict[str, Any]:
    """The chat completion request for a Messages request. Raises ApiError (400) naming the field that is wrong."""
    request = fields.as_chat()
    if fields.stop_sequences:
        request["stop"] = fields.stop_sequences
    blocks = [TextBlock("text", fields.system)] if isinstance(fields.system, str) else fields.system or []
    system = "\n".join(filter(None, (_without_billing(block.text) for block in blocks)))
    request["messages"] = [{"role": "system", "content": system}] if system else []
    new = newest(["tool" if _has_results(message) else message.role for message in fields.messages])
    for index, message in enumerate(fields.messages):
        request["messages"] += _messages(message, f"messages[{index}]", left_out, index == new)
    last = request["messages"][-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        request["continue_final_message"] = True
    choice = fields.tool_choice or ToolChoice()
    functions = functions_of(fields.tools or (), left_out)
    if isinstance(fields, MessagesFields):
        request["max_completion_tokens"] = fields.max_tokens
        require_some(functions, fields.tools or ())
    if functions:
        request["tools"] = functions
        choices = {"auto": "auto", "any": "required", "none": "none", "tool": function(name=choice.name)}
        request["tool_choice"] = choices[choice.type]
        request["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    elif choice.type in ("any", "tool"):
        raise bad_request(f"tool_choice.type={choice.type!r}: needs tools")
    if fields.thinking is not None:
        thinks = fields.thinking.type in ("enabled", "adaptive")
        request["chat_template_kwargs"] = {"enable_thinking": thinks, **request.get("chat_template_kwargs", {})}
    if (config := fields.output_config) is not None:
        if config.effort is not None:
            request["reasoning_effort"] = config.effort
        if (form := config.format) is not None:
            request["response_format"] = {"type": form.type, "json_schema": {"schema": form.schema}}
    return request


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _has_results(message: Message) -> bool:
    return any(block.type == "tool_result" for block in message.content if isinstance(block, Block))


def _messages(message: Message, where: str, left_out: LeftOut, is_new: bool) -> list[dict[str, Any]]:
    """One message's equals: results of tools are messages of their own, before what the user says beside them."""
    if isinstance(message.content, str):
        content = _without_billing(message.content) if message.role == "system" else message.content
        return [{"role": message.role, "content": content}]
    texts, thoughts, calls, results = [], [], [], []
    for i, block in enumerate(message.content):
        place = f"{where}.content[{i}]"
        if message.role != _ROLE_OF.get(block.type, message.role):
            raise bad_request(f"{place}.type={block.type!r}: must be in a message of role {_ROLE_OF[block.type]!r}")
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            calls.append({"id": block.id, **function(name=block.name, arguments=arguments)})
        elif block.type == "tool_result":
            content = _text(block.content, place, left_out)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif block.type != "redacted_thinking":
            text = _text_of(block, place, left_out)
            texts.append(left_out.text(block.type, place if is_new else None) if text is None else text)
    if message.role == "system":
        texts = [*map(_without_billing, texts)]
    out: dict[str, Any] = {"role": message.role, "content": "\n".join(texts) if texts or not calls else None}
    if thoughts:
        out["reasoning_content"] = "\n".join(thoughts)
    if calls:
        out["tool_calls"] = calls
    return [*results, out] if texts or calls or thoughts or not results else results


def _text(content: Any, where: str, left_out: LeftOut) -> str:
    """The text of a content; what of it is no text is left out."""
    try:
        found = convert(Content, {"content": content}).content
    except ApiError as error:
        raise bad_request(f"{where}.{error.message}", code=error.code) from None
    if isinstance(found, str):
        return found
    texts = [(block.type, _text_of(block, where, left_out)) for block in found or ()]
    return "\n".join(left_out.text(kind) if text is None else text for kind, text in texts)


def _text_of(block: Block, where: str, left_out: LeftOut) -> str | None:
    """A block as text, None if it is none."""
    if block.type == "text":
        return block.text or ""
    if block.type == "tool_reference":
        return block.tool_name or ""
    source = block.source if isinstance(block.source, dict) else {}
    if block.type == "search_result":
        parts = [block.title, block.source, _text(block.content, where, left_out)]
    elif block.type == "document" and source.get("type") == "text":
        parts = [block.title, source.get("data")]
    elif block.type == "document" and source.get("type") == "content":
        parts = [block.title, _text(source.get("content"), where, left_out)]
    else:
        return None
    return "\n".join(part for part in parts if part and isinstance(part, str))


def usage(of_chat: Usage) -> dict[str, Any]:
    cached = of_chat.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": of_chat.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": of_chat.completion_tokens,
    }


class MessageWriter(Writer):
    """A message, and its events."""

    def __init__(self, message_id: str, model: str) -> None:
        super().__init__()
        self.whole = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def start(self, chat_usage: Usage) -> list[Event]:
        return [{"type": "message_start", "message": {**self.whole, "usage": usage(chat_usage)}}]

    def finish(self, reason: str, stop: int | str | None, chat_usage: Usage) -> list[Event]:
        events = self.end_item(reason != "length")
        end: dict[str, Any] = {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}
        if reason == "stop" and isinstance(stop, str):
            end = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        elif reason == "stop" and any(block["type"] == "tool_use" for block in self.items):  # a call that was asked for
            end["stop_reason"] = "tool_use"
        self.whole |= {"content": self.items, **end, "usage": usage(chat_usage)}
        return [*events, {"type": "message_delta", "delta": end, "usage": usage(chat_usage)}, {"type": "message_stop"}]

    def fail(self, error: ApiError) -> list[Event]:
        return [error_body(error)]

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
            self.items[-1]["signature"] = self.whole["id"]
            signature = {"type": "signature_delta", "signature": self.whole["id"]}
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


def model_list(names: Sequence[str], created: int, most_tokens: int | None) -> dict[str, Any]:
    """The served names as Anthropic lists models. `created`: in seconds; `most_tokens`: of a prompt and its answer."""
    about = {
        "type": "model", "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": most_tokens, "max_tokens": most_tokens,
    }  # fmt: skip
    models = [{"id": name, "display_name": name, **about} for name in names]
    return {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's own envelope; also the data of a stream's "error" event."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.excess is not None:  # the words by which clients know that they have to shorten the chat
        message = "prompt is too long: {} tokens > {} maximum".format(*error.excess)
    return {"type": "error", "error": {"type": kind, "message": message}}
