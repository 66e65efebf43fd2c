"""System messages where a template has no place for them: nothing of a chat is lost, refused or moved."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nanovllm.text.template import ChatTemplate

FOLDER = Path(__file__).with_name("templates")
DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo-qwen3" / "chat_template.jinja"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('must be first') }}"
    "{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
)
FIRST = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
MOVING = FIRST + "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endfor %}"
PARTS = (
    "{% for m in messages %}{% if m['role'] != 'system' or loop.first %}{{ m['role'] }}:{% for part in m['content'] %}"
    "{{ part['text'] }}{% endfor %};{% endif %}{% endfor %}"
)
SOURCES = {"strict": STRICT, "moving": MOVING, "parts": PARTS} | {
    path.stem: path.read_text(encoding="utf-8") for path in (*FOLDER.glob("*.jinja"), DEMO)
}
CHATS = [
    "system system user", "system developer user", "user system", "user developer", "system user system",
    "user system assistant user", "user assistant user system assistant user developer", "user assistant system user",
    "user system system assistant user system",
]  # fmt: skip


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(SOURCES[name], {"bos_token": "<s>", "eos_token": "</s>"})


def chat_of(roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"text{i}."} for i, role in enumerate(roles.split())]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("roles", CHATS)
def test_every_message_is_shown_once_and_in_its_place(name: str, roles: str) -> None:
    chat = chat_of(roles)
    text = template_of(name).render(chat)
    places = [text.find(message["content"]) for message in chat]
    if name == "mistral" and roles.startswith("system"):  # this one writes the first message before the last user's
        places = [place for place, message in zip(places, chat, strict=True) if message["role"] != "system"]
    assert min(places) >= 0 and places == sorted(places)
    assert all(text.count(message["content"]) == 1 for message in chat)


def test_what_is_folded_becomes_part_of_its_neighbour() -> None:
    template = ChatTemplate(STRICT)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    system, tool = {"role": "system", "content": "z"}, {"role": "tool", "content": "r"}
    user = {"role": "user", "content": "x"}
    for chat, expected in (
        ([user, system], "user:x\n\nz;"), ([user, called, tool, system], "user:x;assistant:;tool:r\n\nz;"),
        ([user, called, system, tool], "user:x;assistant:;tool:z\n\nr;"),
        ([user, called, system], "user:x;assistant:;user:z;"), ([system, system, user], "system:z\n\nz;user:x;"),
        ([system, user, system, called], "system:z;user:x\n\nz;assistant:;"), ([system, user], "system:z;user:x;"),
    ):  # fmt: skip
        assert template.render(chat) == expected
