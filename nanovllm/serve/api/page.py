"""GET /: the page with the chat and the live state, one answer that asks no other host for anything."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from nanovllm.serve.errors import ApiError
from nanovllm.serve.front import Front
from nanovllm.serve.http.call import Call

_FOLDER = Path(__file__).resolve().parents[1] / "ui"


@cache
def _page() -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The page and its headers. Only the script and the style that are in the page may run."""
    text = (_FOLDER / "index.html").read_text(encoding="utf-8")
    text = re.sub(r"<(style|script)>(.*?)</", lambda found: f"<{found[1]}>{_joined(found[2])}</", text)
    policy = (
        f"default-src 'none'; script-src {_hash(text, 'script')}; style-src {_hash(text, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = [
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-cache"),
    ]
    return text.encode(), headers


def _joined(names: str) -> str:
    """The files that stand for themselves in the page, one after the other."""
    return "".join((_FOLDER / name).read_text(encoding="utf-8") for name in names.split())


def _hash(text: str, tag: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    assert found is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"


async def page(front: Front, call: Call) -> None:
    if not front.options.ui:
        raise ApiError(404, "unknown path: /", "unknown_url")
    body, headers = _page()
    await call.respond(body, content_type=b"text/html; charset=utf-8", headers=headers)
