"""A chat's messages. Only text is taken, and nothing that they name is ever fetched."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from nanovllm.serve.errors import bad_request
from nanovllm.serve.limits import MESSAGES, TOOL_CALLS


class Part(msgspec.Struct):
    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    image: None = None  # templates read this and the next three beside a text
    image_url: None = None
    video: None = None
    audio: None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(msgspec.Struct, omit_defaults=True):
    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Meta(min_length=1)] | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=TOOL_CALLS)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES)]


def template_values(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as templates take them. Raises ApiError (400) naming what is missing."""
    return [_values(message, f"messages[{index}].content") for index, message in enumerate(messages)]


def _values(message: Message, where: str) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(message)
    if not message.tool_calls or message.role != "assistant":
        found.pop("tool_calls", None)
    content = message.content
    if content is None:
        if "tool_calls" not in found:
            raise bad_request(f"{where}: is required")
        content = ""
    return found | {"content": content if isinstance(content, str) else _parts(content, where)}


def _parts(parts: list[Part], where: str) -> list[dict[str, str]]:
    found = []
    for index, part in enumerate(parts):
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise bad_request(f"{where}[{index}].{part.type}: is required")
        found.append({"type": "text", "text": text})
    return found


def function(**fields: Any) -> dict[str, Any]:
    """A function, its call or its choice, as chat completions have them; fields that are None are left out."""
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}
