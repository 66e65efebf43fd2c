"""docs/http.md: a server of the demo model gives the answers that the page shows; and the endpoint that
docs/architecture.md adds is served."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from front import ready_front
from serving import ROOT

from nanovllm.serve.api.routes import ROUTES

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


def has_events(answer: str, shown: str) -> bool:
    """Whether a stream has these events, in this order, others between them."""
    events = iter(re.findall(r"^data: (.+)$", answer, flags=re.MULTILINE))
    *chunks, end = re.split(r"^ *data: ", shown, flags=re.MULTILINE)[1:]
    for chunk in map(json.loads, chunks):
        if not any(event != "[DONE]" and is_like(json.loads(event), chunk) for event in events):
            return False
    return next(events) == end.strip() == "[DONE]"


@pytest.mark.parametrize("method, path, body, shown", EXAMPLES)
def test_the_server_gives_what_is_shown(served: httpx.Client, method: str, path: str, body: str, shown: str) -> None:
    """A stream is asked for up to three times: on a machine that others use too, two tokens may come in one event."""
    answers = (served.request(method, path, json=json.loads(body) if body else None) for _ in range(3))
    if "data: " not in shown:
        assert is_like((answer := next(answers)).json(), json.loads(shown)), answer.text
    else:
        assert any(has_events(answer.text, shown) for answer in answers)


@pytest.fixture(scope="module")
def extended() -> Iterator[httpx.Client]:
    """A client of a server with the endpoint that docs/architecture.md adds."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("### An endpoint\n")[2]
    source = page.partition("```python\n")[2].partition("```")[0]
    with patch.dict(ROUTES):
        exec(compile(source, "docs/architecture.md", "exec"), {})
        with ready_front() as started, started.client() as client:
            yield client
        assert "Traceback" not in started.log


def test_the_endpoint_that_the_page_adds_answers_as_a_whole_and_in_a_stream(extended: httpx.Client) -> None:
    asked = {"prompt": "The capital of France is", "n_predict": 3}
    whole = extended.post("/completion", json=asked).json()
    given = extended.post("/v1/completions", json={"prompt": asked["prompt"], "max_tokens": 3}).json()
    assert whole["content"] == given["choices"][0]["text"] != "" and whole["stop"]
    assert whole["tokens_predicted"] == 3 and whole["tokens_evaluated"] == given["usage"]["prompt_tokens"]
    streamed = extended.post("/completion", json={**asked, "stream": True}).text
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in streamed.strip().split("\n\n")]
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert last == {**whole, "content": ""} and not any(chunk["stop"] for chunk in chunks)


@pytest.mark.parametrize(
    "body, param", [({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": "a", "n_predict": 0}, "n_predict")]
)
def test_the_endpoint_that_the_page_adds_names_what_is_wrong(
    extended: httpx.Client, body: dict[str, Any], param: str
) -> None:
    answer = extended.post("/completion", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
