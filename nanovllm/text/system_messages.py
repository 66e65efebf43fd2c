"""System messages for templates that take one alone, and as the first: folded into the message beside them."""

from collections.abc import Callable
from functools import cache
from typing import Any

Chat = list[dict[str, Any]]
_SYSTEM = ("system", "developer")
_HEARERS = ("user", "tool")


class SystemMessages:
    """The places in which a template shows system messages, each found out when it is first asked for."""

    def __init__(self, render: Callable[[Chat], str]) -> None:
        """`render`: writes a chat as it is; "" where the template refuses it."""
        self._render = render
        self._shows = cache(self._find)
        """Whether the template writes all messages of a chat of these roles, in their order."""

    def placed(self, chat: Chat) -> Chat:
        """The chat as the template shows all of it: of several system messages at its beginning one, and later ones as
        part of what a user or a tool says beside them. None moves to another place: the beginning of a chat stays as
        it was, for the prefix cache, when more is said."""
        roles = [str(message.get("role")) for message in chat]
        num_first = next((i for i, role in enumerate(roles) if role not in _SYSTEM), len(roles))
        if num_first < 2 and not any(role in _SYSTEM for role in roles[num_first:]):
            return chat
        out = chat[:num_first]
        if num_first > 1 and not self._shows(*roles[:2], "user"):
            while len(out) > 1:
                out[:2] = [_joined(out[0], out[0], out[1])]
        is_folded = False
        """Whether the last message is a system message that is to be part of the next one."""
        for message in chat[num_first:]:
            role = str(message.get("role"))
            if role in _SYSTEM and not self._shows_late(role):
                if out and out[-1].get("role") in _HEARERS:
                    out[-1] = _joined(out[-1], out[-1], message)
                else:
                    out.append({**message, "role": "user"})
                    is_folded = True
            elif is_folded and role in _HEARERS:
                out[-1], is_folded = _joined(message, out[-1], message), False
            else:
                out.append(message)
                is_folded = False
        return out

    def _shows_late(self, role: str) -> bool:
        return self._shows("user", role, "assistant", "user") and self._shows("user", "assistant", "user", role)

    def _find(self, *roles: str) -> bool:
        marks = [f"probe{i}x" for i in range(len(roles))]
        text = self._render([{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)])
        places = [text.find(mark) for mark in marks]
        return min(places) >= 0 and places == sorted(places)


def _joined(kept: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The message `kept` with the contents of two messages."""
    contents = [each.get("content") or "" for each in (first, second)]
    if all(isinstance(content, str) for content in contents):
        return {**kept, "content": "\n\n".join(filter(None, contents))}
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents]
    return {**kept, "content": [*parts[0], *parts[1]]}
