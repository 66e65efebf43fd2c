"""docs/http.md: a server of the demo model gives the answers that the page shows."""

import json
import math
import re
from typing import Any

import httpx
import pytest
from serving import ROOT

CHANGES = {"created", "created_at", "cached_tokens", "cache_read_input_tokens", "server_load", "root"}
"""Fields whose values depend on the clock, on requests before and on the model's folder."""
PAGE = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
EXAMPLES = [
    pytest.param(*found.groups(default=""), id=f"{number}-{found[2]}")
    for number, found in enumerate(
        re.finditer(r"^    (POST|GET) (\S+)\n((?:    .+\n)*)\n((?:    .+(?:\n|\Z))+)", PAGE, flags=re.MULTILINE)
    )
]


def is_like(answer: Any, shown: Any) -> bool:
    """Whether an answer is the one that is shown: "..." at a text's end stands for any, numbers are rounded."""
    if isinstance(shown, dict):
        changes = CHANGES | ({"input_tokens"} if "cache_read_input_tokens" in shown else set())  # but for hits
        return (
            isinstance(answer, dict)
            and answer.keys() == shown.keys()
            and all(name in changes or is_like(answer[name], shown[name]) for name in shown)
        )
    if isinstance(shown, list):
        return len(answer) == len(shown) and all(map(is_like, answer, shown))
    if isinstance(shown, float):
        return math.isclose(answer, shown, abs_tol=1e-4)
    if isinstance(shown, str) and shown.endswith("..."):
        return isinstance(answer, str) and answer.startswith(shown[:-3])
    return bool(answer == shown)


def test_examples_are_found() -> None:
    assert len(EXAMPLES) == len(re.findall(r"^    (?:POST|GET) ", PAGE, flags=re.MULTILINE)) >= 17
    assert not is_like({"a": 1}, {"a": 1, "b": None}) and not is_like({"a": [2]}, {"a": [1]})


@pytest.mark.parametrize("method, path, body, shown", EXAMPLES)
def test_the_server_gives_what_is_shown(served: httpx.Client, method: str, path: str, body: str, shown: str) -> None:
    answer = served.request(method, path, json=json.loads(body) if body else None)
    if "data: " not in shown:
        assert is_like(answer.json(), json.loads(shown)), answer.text
        return
    events = iter(re.findall(r"^data: (.+)$", answer.text, flags=re.MULTILINE))
    *chunks, end = re.split(r"^ *data: ", shown, flags=re.MULTILINE)[1:]
    for chunk in map(json.loads, chunks):  # in this order, others between them
        assert any(is_like(json.loads(event), chunk) for event in events), answer.text
    assert next(events) == end.strip() == "[DONE]"
