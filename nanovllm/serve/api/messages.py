"""A chat's messages. Only text is taken, and nothing that they name is ever fetched: a text says what was left out."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from nanovllm.errors import TEXT_ALONE, shown
from nanovllm.serve.errors import bad_request
from nanovllm.serve.limits import MESSAGES, TOOL_CALLS


class Part(msgspec.Struct):
    kinds: ClassVar = frozenset(("text", "input_text", "output_text", "refusal"))
    """Types that are read; parts of others are left out as a whole."""
    type: str
    text: str | None = None
    refusal: str | None = None
    image: Any = None  # templates read this and the next three beside a text
    image_url: Any = None
    video: Any = None
    audio: Any = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(msgspec.Struct, omit_defaults=True):
    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[str | Part] | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=TOOL_CALLS)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES)]


class LeftOut:
    """Names of all that a request holds and the model does not get, for a header."""

    def __init__(self, field: str) -> None:
        """`field`: that holds the chat."""
        self._field = field
        self.names: dict[str, None] = {}

    def note(self, kind: str, field: str | None = None) -> None:
        if len(self.names) < _MOST_NAMES:
            self.names[f"{field or self._field}.{kind[:60]}"] = None

    def text(self, kind: str, where: str | None = None) -> str:
        """The text that stands in the place of a part. `where`: the place of one that a user has just sent, which is
        refused: raises ApiError (400)."""
        if where is not None:
            how = "send the message again without it; in earlier messages and beside results of tools it is left out"
            raise bad_request(f"{where}.type={shown(kind)}: must be a text; {TEXT_ALONE}; {how}", code="invalid_value")
        self.note(kind)
        return f"[{kind[:60].removeprefix('input_')} left out: this model reads text only]"


_MOST_NAMES = 64


def newest(roles: Sequence[str]) -> int:
    """Index of the message in which a user says something new; -1 if there is none, also where it stands right behind
    the result of a tool, since clients put what a tool brings there."""
    said = [index for index, role in enumerate(roles) if role not in ("system", "developer")]
    if not said or roles[said[-1]] != "user" or (len(said) > 1 and roles[said[-2]] == "tool"):
        return -1
    return said[-1]


def template_values(messages: list[Message], left_out: LeftOut) -> list[dict[str, Any]]:
    """The messages as templates take them. Raises ApiError (400) naming what is missing, and what is no text in what
    the user has just sent."""
    new = newest([message.role for message in messages])
    return [
        _values(message, f"messages[{index}].content", left_out, index == new) for index, message in enumerate(messages)
    ]


def _values(message: Message, where: str, left_out: LeftOut, is_new: bool) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(message)
    if not message.tool_calls or message.role != "assistant":
        found.pop("tool_calls", None)
    content: Any = message.content
    if content is None and message.role != "assistant":
        raise bad_request(f"{where}: is required")
    if isinstance(content, list):
        texts = [_text(part, f"{where}[{i}]", left_out, is_new) for i, part in enumerate(content)]
        content = [{"type": "text", "text": text} for text in texts]
    return found | {"content": content or ""}


def _text(part: str | Part, where: str, left_out: LeftOut, is_new: bool) -> str:
    if isinstance(part, str):
        return part
    if part.type not in part.kinds:
        return left_out.text(part.type, where if is_new else None)
    for name in ("image", "image_url", "video", "audio"):
        if (value := getattr(part, name)) is None:
            continue
        if is_new:
            raise bad_request(f"{where}.{name}={shown(value)}: must be null; {TEXT_ALONE}", code="invalid_type")
        left_out.note(name)
    field = "refusal" if part.type == "refusal" else "text"
    if (said := getattr(part, field)) is None:
        raise bad_request(f"{where}.{field}: is required")
    return str(said)


def function(**fields: Any) -> dict[str, Any]:
    """A function, its call or its choice, as chat completions have them; fields that are None are left out."""
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


ITEM_KINDS = frozenset(
    "message function_call function_call_output custom_tool_call custom_tool_call_output reasoning "
    "additional_tools".split()
)
"""Types of the Responses API's input items that are taken."""
BLOCK_KINDS = frozenset(
    "text thinking redacted_thinking tool_use tool_result search_result tool_reference document".split()
)
"""Types of the Messages API's blocks that are taken; of documents, those that are text."""
TEXT_KINDS = frozenset("input_text output_text text refusal reasoning_text summary_text".split())
"""Types of the parts of the Responses API's items that are taken."""
_TAKEN = ITEM_KINDS | BLOCK_KINDS | TEXT_KINDS


def bytes_left_out(parts: Any) -> int:
    """About how many bytes of messages, input items or their parts are left out, in any dialect: images, say."""
    total = 0
    for part in parts if isinstance(parts, list) else ():
        if not isinstance(part, dict):
            continue
        kind, source = part.get("type", "message"), part.get("source")
        is_file = kind == "document" and isinstance(source, dict) and source.get("type") == "base64"
        if is_file or str(kind) not in _TAKEN:
            inner = [each for value in part.values() if isinstance(value, dict) for each in value.values()]
            total += sum(len(value) for value in (*part.values(), *inner) if isinstance(value, str))
        else:
            total += bytes_left_out(part.get("content")) + bytes_left_out(part.get("output"))
    return total
