"""Bodies of requests: what is no request is refused, and size, depth and numbers are bounded before they are read."""

import asyncio
import json
import random
import threading
import time
import tracemalloc
from typing import Any, cast
from unittest.mock import MagicMock, patch

import httpx
import pytest
from serving import CHAT, COMPLETIONS, JSON

from nanovllm.host.fleet_handles import FleetHandles
from nanovllm.serve import limits
from nanovllm.serve.errors import ApiError
from nanovllm.serve.front import Front
from nanovllm.serve.options import ServeOptions


@pytest.mark.parametrize(
    "body",
    [
        *(b"[" * 100_000, b'{"a":' * 40_000, b'{"messages":' + b"[" * 65 + b"]" * 65 + b"}", b"", b"null"),
        *(b'{"a":NaN}', b'{"temperature": Infinity}', b"\xff\xfe", b'{"a":1}x'),
    ],
)
def test_body_that_is_no_request(client: httpx.Client, body: bytes) -> None:
    answer = client.post(CHAT, content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def nested(depth: int, rng: random.Random) -> Any:
    """A value that nests one level deeper than that, among others and brackets in texts."""
    texts = ["".join(rng.choices('a],}{["\\é:, 1', k=rng.randint(0, 9))) for _ in range(3)]
    if depth == 0:
        return rng.choice([*texts, 5, None])
    inner = [nested(depth - 1, rng), *texts, [], {}]
    rng.shuffle(inner)
    return inner if rng.random() < 0.5 else {f"{texts[0]}{i}": value for i, value in enumerate(inner)}


def test_depth_and_values_are_counted_whatever_texts_hold() -> None:
    commas = {"a": "1," * 2_000_000, "b": ["\",", [5] * 1000]}
    assert limits.parse_json(json.dumps(commas).encode()) == commas
    rng = random.Random(1)
    for _ in range(200):
        depth = rng.choice([1, 5, limits.JSON_DEPTH - 2, limits.JSON_DEPTH - 1])
        value = {"a": nested(depth, rng)}
        body = json.dumps(value, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5).encode()
        if depth < limits.JSON_DEPTH - 1:
            assert limits.parse_json(body) == value
        else:
            with pytest.raises(ApiError, match="nests deeper than 64"):
                limits.parse_json(body)


@pytest.mark.parametrize(
    "item", [b"[]", b'{"a":1}', b'"a"', b'"[",[]', b'"]":1', *b"1 1234567 0.5 1e5 null".split()], ids=str
)
def test_bodies_are_bounded_before_they_are_read(item: bytes) -> None:
    """32 MiB took seconds, in which nothing else is answered, and of numbers hundreds of MB."""
    opening, closing = (b"{", b"}") if item.startswith(b'"]"') else (b"[", b"]")
    body = b'{"b":"1,2","a":' + opening + (item + b", ") * ((31 << 20) // (len(item) + 2)) + item + closing + b"}"
    most = "1,500,000 values" if item[:1].isalnum() else "250,000 lists"
    before = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match=f"more than {most}"):
            limits.parse_json(body)
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()
    assert time.thread_time() - before < 1.0  # 0.2 s where nothing else runs on the cores


def test_others_are_answered_while_a_large_body_is_read() -> None:
    events = threading.Event()

    async def read() -> dict[str, Any]:
        front = Front("m", ServeOptions(), cast(FleetHandles, None))
        call = MagicMock(key=None, size=limits.SMALL_BODY + 1)
        reading = asyncio.create_task(front.pool.read(call, dict))
        while not reading.done():
            await asyncio.sleep(0.01)
            events.set()
        return await reading

    def parse(body: bytes) -> dict[str, Any]:
        assert events.wait(20), "the event loop waits for the body"
        return {}

    with patch.object(limits, "parse_json", parse):
        assert asyncio.run(read()) == {}


def test_large_body(client: httpx.Client) -> None:
    """Many prompts as token ids: some 2 MB."""
    body = {"prompt": [[5] * 1000] * 1024, "max_tokens": 0, "echo": True}
    assert client.post(COMPLETIONS, json=body | {"n": 2}).status_code == 400
    assert client.post(COMPLETIONS, json=body | {"prompt": "a", "user": "a" * 2_000_000}).status_code == 200
