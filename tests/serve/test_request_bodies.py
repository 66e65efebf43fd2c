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


def test_depth_is_counted_whatever_texts_hold() -> None:
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


@pytest.mark.parametrize("items", [b"[],", b'{"a":1},', b'"a",', b'"[",[],', b'"]":1,'], ids=str)
def test_structure_is_bounded_before_it_is_read(items: bytes) -> None:
    """A body of 32 MiB would take seconds, in which nothing else is answered."""
    opening, closing = (b"{", b"}") if b"]" in items[:3] else (b"[", b"]")
    body = b'{"a":' + opening + items * ((31 << 20) // len(items)) + items[:-1] + closing + b"}"
    begin = time.thread_time()
    with pytest.raises(ApiError, match="more than 250,000 lists"):
        limits.parse_json(body)
    assert time.thread_time() - begin < 1.0  # 0.2 s where nothing else runs on the cores


@pytest.mark.parametrize("value", [b"1", b"1234567", b"0.5", b"1e5", b"null", b" 7"], ids=str)
def test_values_are_bounded_before_they_are_read(value: bytes) -> None:
    """32 MiB of numbers took hundreds of MB, and 0.3 s of the event loop."""
    items = (31 << 20) // (len(value) + 1)
    body = b'{"a":["1,2",' + (value + b",") * items + value + b"]}"
    before = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="more than 1,500,000 values"):
            limits.parse_json(body)
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()
    assert time.thread_time() - before < 1.0  # 0.2 s where nothing else runs on the cores


def test_commas_of_texts_are_no_values() -> None:
    body = {"a": "1," * 2_000_000, "b": ["\",", [5] * 1000]}
    assert limits.parse_json(json.dumps(body).encode()) == body


def test_a_large_body_is_not_read_in_the_event_loop() -> None:
    """Others are answered meanwhile."""
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
