"""Requests of Anthropic's Messages API, as chat completion requests. formats/messages.py has the answers."""

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
from nanovllm.serve.errors import ApiError, bad_request
from nanovllm.serve.limits import MESSAGES
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
        "response_format": "use output_config.format",
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "use max_tokens"),
        **dict.fromkeys(("mcp_servers", "container"), "the server runs no tools"),
    }
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: DialectFormat | None = None
    """The older name of output_config.format."""
    stop_sequences: Annotated[list[Text], Meta(max_length=MAX_STOP)] | None = None


class MessagesFields(CountFields, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: Positive


_BILLING = "x-anthropic-billing-header:"
"""Begins a line of the system prompt that Claude Code writes for Anthropic alone. It differs from session to session:
with it, no prompt would begin like another one."""
_ROLE_OF = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}
"""Blocks that one role alone may have."""


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
    config = fields.output_config or OutputConfig()
    if config.effort is not None:
        request["reasoning_effort"] = config.effort
    if (form := config.format or fields.output_format) is not None:
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


def model_list(names: Sequence[str], created: int, most_tokens: int | None) -> dict[str, Any]:
    """The served names as Anthropic lists models. `created`: in seconds; `most_tokens`: of a prompt and its answer."""
    about = {
        "type": "model", "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": most_tokens, "max_tokens": most_tokens,
    }  # fmt: skip
    models = [{"id": name, "display_name": name, **about} for name in names]
    return {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}
