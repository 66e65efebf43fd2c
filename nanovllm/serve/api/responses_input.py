"""Input items of the Responses API as messages of a chat."""

import binascii
import json
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import msgspec

from nanovllm.serve.api.messages import ITEM_KINDS, TEXT_KINDS, LeftOut, function, newest
from nanovllm.serve.api.responses_tools import Tool, flat_name
from nanovllm.serve.errors import bad_request


class Part(msgspec.Struct):
    kinds: ClassVar = TEXT_KINDS
    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct):
    """Item of a request's input. Of one whose type is not in ITEM_KINDS, only the type is known."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None
    encrypted_content: str | None = None
    """The text of reasoning, for clients that may not resend it as text (`sealed`)."""
    tools: list[Tool] | None = None
    """Tools of additional_tools, which are as the request's own."""


def readable(body: dict[str, Any], find: Callable[[str], dict[str, Any] | None]) -> dict[str, Any]:
    """The request with what its references name in their places, and only the types of items that nothing is done with.
    `find`: an output item by its id, if it is known."""
    given = body.get("input")
    return {**body, "input": [_readable(item, find) for item in given]} if isinstance(given, list) else body


def _readable(item: Any, find: Callable[[str], dict[str, Any] | None]) -> Any:
    if not isinstance(item, dict):
        return item
    if item.get("type") == "item_reference" or item.keys() == {"id"}:
        item = find(str(item.get("id"))) or {"type": "item_reference"}
    kind = item.get("type", "message")
    return item if not isinstance(kind, str) or kind in ITEM_KINDS else {"type": kind}


def messages_of(instructions: str | None, given: str | list[Item], left_out: LeftOut) -> list[dict[str, Any]]:
    """Messages for input items; calls and reasoning become part of the assistant's message that they belong to."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    items = [Item(content=given)] if isinstance(given, str) else given
    new = newest([_role(item) for item in items])
    for i, item in enumerate(items):
        last = messages[-1] if messages else {}
        if item.type == "message":
            text = _text(item.content, f"input[{i}].content", left_out, i == new)
            if item.role == last.get("role") == "assistant" and last["content"] is None and "tool_calls" not in last:
                last["content"] = text  # after its reasoning
            else:
                messages.append({"role": item.role, "content": text})
        elif item.type in ("function_call", "custom_tool_call"):
            is_custom = item.type == "custom_tool_call"
            arguments = json.dumps({"input": item.input or ""}) if is_custom else item.arguments or "{}"
            call = function(name=flat_name(item.name or "", item.namespace), arguments=arguments) | {"id": item.call_id}
            if last.get("role") != "assistant":
                last = {"role": "assistant", "content": None}
                messages.append(last)
            last.setdefault("tool_calls", []).append(call)
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            output = _text(item.output, f"input[{i}].output", left_out)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif item.type == "reasoning":
            if thoughts := _thoughts(item, left_out):
                messages.append({"role": "assistant", "content": None, "reasoning_content": thoughts})
        elif item.type != "additional_tools":
            left_out.note(item.type)
    if not messages:
        raise bad_request("input: must hold at least one message")
    return [one if one["content"] is not None or "tool_calls" in one else {**one, "content": ""} for one in messages]


def _role(item: Item) -> str:
    """The role of the one who speaks in an item."""
    if item.type == "message":
        return item.role
    return "tool" if item.type.endswith("_output") else "system" if item.type == "additional_tools" else "assistant"


def _text(content: str | list[Part] | None, where: str, left_out: LeftOut, is_new: bool = False) -> str:
    """The text of a content. `is_new`: all of it has to be text."""
    if content is None:
        raise bad_request(f"{where}: is required")
    if isinstance(content, str):
        return content
    return "\n".join(
        (part.text or part.refusal or "")
        if part.type in part.kinds
        else left_out.text(part.type, f"{where}[{i}]" if is_new else None)
        for i, part in enumerate(content)
    )


def _thoughts(item: Item, left_out: LeftOut) -> str:
    """The text of reasoning; "" where only another server can read it."""
    if not item.content and item.encrypted_content:
        try:
            return _unsealed(item.encrypted_content)
        except ValueError:
            left_out.note("encrypted_content", "input.reasoning")
    return _text(item.content or item.summary or "", "", left_out)


_SEAL = "nanovllm."
"""Begins the encrypted_content of this server, which is no secret: clients resend it where they may not resend text."""


def sealed(text: str) -> str:
    return _SEAL + binascii.b2a_base64(text.encode("utf-8", "replace"), newline=False).decode()


def _unsealed(content: str) -> str:
    """Raises ValueError for content of another server."""
    if not content.startswith(_SEAL):
        raise ValueError(content[:20])
    return binascii.a2b_base64(content.removeprefix(_SEAL), strict_mode=True).decode()
