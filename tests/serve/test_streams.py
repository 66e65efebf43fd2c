"""Streams and their clients, without sockets: who is still in flight, and what a mistake of ours leaves."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from nanovllm.engine.prompt import Prompt
from nanovllm.engine.step import Done, Finish, Step
from nanovllm.serve import limits
from nanovllm.serve.api.completions import CompletionAnswer
from nanovllm.serve.errors import ApiError, engine_dead
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.request import Completion, Request
from nanovllm.serve.streams import Streams
from nanovllm.serve.text_pool import TextPool
from nanovllm.text.stops import VisibleText


class Connection:
    """A client that reads, until it is told not to."""

    def __init__(self) -> None:
        self.written, self.is_closed = b"", False
        self.is_full, self.in_chunks = False, True
        self.transport = self
        self.drop = self.abort

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def set_write_buffer_limits(self, high: int) -> None:
        pass


class Text:
    def push(self, token: int) -> str:
        return f"<{token}>"

    def flush(self) -> str:
        return ""


class Stream(Request):
    is_streamed = True
    fails_at = -1

    def chunk(self, completion: Completion, text: str) -> bytes:
        if f"<{self.fails_at}>" in text:
            raise ZeroDivisionError("a mistake of ours")
        return text.encode()


class Echo(Stream):
    """The echo of prompts with log-probabilities; the first one takes long to write."""

    head, _on_head = CompletionAnswer.head, CompletionAnswer._on_head

    def __init__(self, request_id: str, prompts: list[Prompt], now: float) -> None:
        super().__init__(request_id, prompts, now)
        self.prompt_lines = [[bytes(4)] for _ in prompts]
        self.fields, self.call, self._heads = Mock(echo=True), Mock(key=None), {}
        self.goes_on = threading.Event()

    def _head(self, completion: Completion) -> bytes:
        assert completion.index > 0 or self.goes_on.wait(20)
        return b"[%d]" % completion.index


class Room:
    """Streams, one request in them, and what the engine is told."""

    def __init__(self, n: int = 1, prompts: int = 1, stream: type[Stream] = Stream) -> None:
        self.aborted: list[int] = []
        self.metrics = Metrics()
        self.streams = Streams(self.metrics, self.aborted.append)
        self.request = stream("id", [Prompt([1, 2])] * prompts, 0.0)
        texts = [VisibleText(Text()) for _ in range(n * prompts)]
        self.request.completions = [Completion(self.request, i, i // n, text) for i, text in enumerate(texts)]
        self.streams.add(self.request)
        self.connection = Connection()
        self.request.begin = lambda: self.connection  # type: ignore[method-assign,assignment,return-value]

    def step(self, *tokens: int, ends: bool = False, now: float = 1.0) -> None:
        rows = list(range(len(tokens)))
        step = Step([], [])
        if ends:
            step.finishes = [Finish(row, token, "length", None) for row, token in enumerate(tokens)]
            step.done = [Done(0, 0, 0.0, 0.0, 0.0)]
        else:
            step.rows, step.tokens = rows, list(tokens)
        self.streams.take(step, now)
        self.streams.flush(now)

    @property
    def is_empty(self) -> bool:
        streams = self.streams
        return not streams.requests and not streams.num_rows and not streams._rows


def running(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs in an event loop of its own."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@running
async def test_a_request_without_a_token_has_no_time_to_its_first() -> None:
    for tokens, samples in (((), 0), ((5,), 1)):
        room = Room()
        for token in tokens:
            room.step(token)
        room.streams.take(Step([], [], finishes=[Finish(0, None, "abort", None)]), 2.0)
        room.streams.flush(2.0)
        assert room.metrics.first_token.counts.count(1) == samples


@running
async def test_what_is_counted_of_a_prompt_is_of_its_own_completions() -> None:
    room = Room(prompts=2)
    room.streams.take(Step([0, 0, 0, 1], [5, 6, 7, 8]), 1.0)
    ends = [Finish(row, 9, "length", None) for row in (0, 1)]
    done = [Done(row, 0, 0.0, 0.0, 6.0) for row in (0, 1)]
    room.streams.take(Step([], [], finishes=ends, done=done), 2.0)
    longest = room.metrics._histograms["request_max_num_generation_tokens"]
    assert (sum(longest.counts), longest.sum) == (2, 4 + 2)
    assert room.metrics._histograms["request_time_per_output_token_seconds"].sum == 6 / 3 + 6 / 1


@pytest.mark.parametrize("is_comment", [False, True])
@running
async def test_response_begins_with_the_first_event_of_its_stream(is_comment: bool) -> None:
    """With a step's token, or a comment where the first token is late; not for a client that has left."""
    room = Room()
    asked = Mock(side_effect=[None, room.connection])
    room.request.begin = asked  # type: ignore[method-assign]
    room.streams.flush(0.5)
    room.streams.sweep(1.0, None)
    assert not asked.called
    for times in (1, 2):
        late = times * (limits.PING_SECONDS + 1.0)
        room.streams.sweep(late, None) if is_comment else room.step(5)
        assert asked.call_count == times and bool(room.connection.written) == (times == 2)
    room.step(6)
    assert asked.call_count == 2 and b"<6>" in room.connection.written


@running
async def test_client_that_reads_late_gets_all() -> None:
    room = Room()
    room.connection.is_full = True
    room.step(5)
    room.step(6, ends=True)
    assert room.streams.requests == {room.request} and room.streams.num_rows == 0
    room.connection.is_full = False
    room.streams.write(room.request, 2.0)
    assert b"<5><6>data: [DONE]" in room.connection.written
    assert room.is_empty


@pytest.mark.parametrize(
    ("part", "most"),
    [
        ("pieces", ["a" * limits.PENDING_BYTES]),
        ("ids", [5] * (limits.PENDING_BYTES // limits.ID_BYTES)),
        ("lines", [bytes(4)] * (limits.PENDING_BYTES // limits.LOGPROB_BYTES)),
    ],
)
@running
async def test_client_that_lets_its_answer_pile_up_is_let_go_after_the_last_token_too(part: str, most: Any) -> None:
    room = Room()
    room.connection.is_full = True
    room.step(5)
    room.request.completions[0].pieces.clear()
    setattr(room.request.completions[0], part, most)
    room.streams.sweep(1.0, None)
    assert not room.connection.is_closed
    room.step(6, ends=True)
    room.streams.sweep(2.0, None)
    assert room.connection.is_closed and room.is_empty


@running
async def test_error_after_the_connection_was_closed() -> None:
    """Its task does not wait for ever."""
    room = Room()
    room.step(5)
    room.connection.is_closed = True
    room.streams.fail(room.request, engine_dead())
    assert room.is_empty and room.request.done.exception() is not None


@running
async def test_mistake_of_ours_before_an_answer_has_begun_is_answered() -> None:
    room = Room()
    room.request.completions[0].push = lambda token: 1 // 0
    room.step(5)
    error = room.request.done.exception()
    assert isinstance(error, ApiError) and error.code == "internal_error" and room.is_empty and room.aborted == [0]


@running
async def test_a_first_chunk_that_takes_long_holds_up_no_other() -> None:
    room = Room(prompts=4, stream=Echo)
    room.request.front = Mock(streams=room.streams, pool=TextPool(room.metrics), now=lambda: 1.0)
    for completion in room.request.completions:
        completion.lines = []
    room.step(5, 6, 7, 8)

    async def wait_for(text: bytes) -> None:
        deadline = time.monotonic() + 10
        while text not in room.connection.written and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert text in room.connection.written

    for text in (b"[1]<6>", b"[2]<7>", b"[3]<8>"):
        await wait_for(text)
    assert b"<5>" not in room.connection.written
    room.request.goes_on.set()
    await wait_for(b"[0]<5>")


@running
async def test_a_first_chunk_that_there_is_no_room_for_is_an_error_of_the_stream() -> None:
    room = Room(stream=Echo)
    full = AsyncMock(side_effect=ApiError(503, "too many", "server_overloaded"))
    room.request.front = Mock(streams=room.streams, pool=Mock(in_thread=full), now=lambda: 1.0)
    room.request.completions[0].lines = []
    room.step(5)
    await asyncio.sleep(0.1)
    assert room.connection.written.endswith(b"data: [DONE]\n\n\r\n") and b"too many" in room.connection.written
    assert room.is_empty and not room.connection.is_closed


@pytest.mark.parametrize("moment", ["a step", "a late write", "an error"])
@running
async def test_mistake_of_ours_ends_one_request(moment: str) -> None:
    room = Room()
    room.request.fails_at = 5
    room.connection.is_full = moment != "a step"
    room.step(5)
    room.connection.is_full = False
    if moment == "a late write":
        room.streams.write(room.request, 2.0)
    elif moment == "an error":
        room.streams.fail(room.request, engine_dead())
    assert room.is_empty and room.connection.is_closed and room.aborted == [0]
