"""The book of requests and their clients, without sockets: who is in flight, and what a mistake of ours leaves."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from nanovllm.engine.prompt import Prompt
from nanovllm.engine.step import Done, Finish, Step
from nanovllm.serve import limits
from nanovllm.serve.api.fields import CommonFields
from nanovllm.serve.book import Book
from nanovllm.serve.errors import ApiError, engine_dead
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.request import Format, Prepared, Request, Row
from nanovllm.serve.text_pool import TextPool
from nanovllm.text.stops import VisibleText


class Call:
    """A client that reads, until it is told not to."""

    def __init__(self) -> None:
        self.written, self.is_gone, self.is_full, self.key = b"", False, False, None
        self.begin = Mock()
        self.connection = Mock(drop=self.abort)
        self.connection.transport.abort = self.abort

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.is_gone = True


class Text:
    def push(self, token: int) -> str:
        return f"<{token}>"

    def flush(self) -> str:
        return ""


class Plain(Format):
    id = "id"
    fails_at = -1

    def row(self, index: int, prompt_index: int) -> Row:
        return Row(index, prompt_index, VisibleText(Text()))

    def chunk(self, row: Row, text: str) -> bytes:
        if f"<{self.fails_at}>" in text:
            raise ZeroDivisionError("a mistake of ours")
        return text.encode()

    def whole(self, request: Request) -> bytes:
        return b""


class Echo(Plain):
    """The echo of prompts with log-probabilities; the first one takes long to write."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def head_size(self, row: Row) -> int:
        return 4

    def head(self, row: Row) -> bytes:
        assert row.index > 0 or self.goes_on.wait(20)
        return b"[%d]" % row.index


class Room:
    """A book, one request in it, and what the engine is told."""

    def __init__(self, n: int = 1, prompts: int = 1, form: Plain | None = None, pool: Any = None) -> None:
        self.aborted: list[int] = []
        self.metrics, self.call, self.form = Metrics(), Call(), form or Plain()
        self.book = Book(self.metrics, pool or TextPool(self.metrics), self.aborted.append)
        prepared = Prepared(CommonFields(stream=True), [Prompt([1, 2])] * prompts, {"n": n}, [9] * prompts)
        self.request = Request(cast(Any, self.call), prepared, self.form, 0.0)
        self.book.open(self.request)

    def step(self, *tokens: int, ends: bool = False, now: float = 1.0) -> None:
        rows = list(range(len(tokens)))
        step = Step([], [])
        if ends:
            step.finishes = [Finish(row, token, "length", None) for row, token in enumerate(tokens)]
            step.done = [Done(0, 0, 0.0, 0.0, 0.0)]
        else:
            step.rows, step.tokens = rows, list(tokens)
        self.book.take(step, now)
        self.book.flush(now)

    @property
    def is_empty(self) -> bool:
        return not self.book.requests and not self.book.num_rows and not self.book._rows


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
        room.book.take(Step([], [], finishes=[Finish(0, None, "abort", None)]), 2.0)
        room.book.flush(2.0)
        assert room.metrics.first_token.counts.count(1) == samples


@running
async def test_what_is_counted_of_a_prompt_is_of_its_own_completions() -> None:
    room = Room(prompts=2)
    room.book.take(Step([0, 0, 0, 1], [5, 6, 7, 8]), 1.0)
    ends = [Finish(row, 9, "length", None) for row in (0, 1)]
    done = [Done(row, 0, 0.0, 0.0, 6.0) for row in (0, 1)]
    room.book.take(Step([], [], finishes=ends, done=done), 2.0)
    longest = room.metrics._histograms["request_max_num_generation_tokens"]
    assert (sum(longest.counts), longest.sum) == (2, 4 + 2)
    assert room.metrics._histograms["request_time_per_output_token_seconds"].sum == 6 / 3 + 6 / 1


@pytest.mark.parametrize("is_comment", [False, True])
@running
async def test_response_begins_with_the_first_event_of_its_stream(is_comment: bool) -> None:
    """With a step's token, or a comment where the first token is late; not for a client that has left."""
    room = Room()
    room.book.flush(0.5)
    room.book.sweep(1.0, None)
    assert not room.call.begin.called
    for is_gone in (True, False):
        room.call.is_gone = is_gone
        room.book.sweep(2 * limits.PING_SECONDS, None) if is_comment else room.step(5)
        assert room.call.begin.called == bool(room.call.written) == (not is_gone)
    room.step(6)
    assert room.call.begin.call_count == 1 and b"<6>" in room.call.written


@running
async def test_client_that_reads_late_gets_all() -> None:
    room = Room()
    room.call.is_full = True
    room.step(5)
    room.step(6, ends=True)
    assert [*room.book.requests.values()] == [room.request] and room.book.num_rows == 0
    room.call.is_full = False
    room.book.write(room.request, 2.0)
    assert b"<5><6>data: [DONE]" in room.call.written
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
    room.call.is_full = True
    room.step(5)
    room.request.rows[0].pieces.clear()
    setattr(room.request.rows[0], part, most)
    room.book.sweep(1.0, None)
    assert not room.call.is_gone
    room.step(6, ends=True)
    room.book.sweep(2.0, None)
    assert room.call.is_gone and room.is_empty


@running
async def test_error_after_the_connection_was_closed() -> None:
    """Its task does not wait for ever."""
    room = Room()
    room.step(5)
    room.call.is_gone = True
    room.book.fail(room.request, engine_dead())
    assert room.is_empty and room.request.done.exception() is not None


@running
async def test_mistake_of_ours_before_an_answer_has_begun_is_answered() -> None:
    room = Room()
    room.request.rows[0].push = lambda token: 1 // 0
    room.step(5)
    error = room.request.done.exception()
    assert isinstance(error, ApiError) and error.code == "internal_error" and room.is_empty and room.aborted == [0]


@running
async def test_a_first_chunk_that_takes_long_holds_up_no_other() -> None:
    room = Room(prompts=4, form=(form := Echo()))
    room.step(5, 6, 7, 8)

    async def wait_for(text: bytes) -> None:
        deadline = time.monotonic() + 10
        while text not in room.call.written and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert text in room.call.written

    for text in (b"[1]<6>", b"[2]<7>", b"[3]<8>"):
        await wait_for(text)
    assert b"<5>" not in room.call.written
    form.goes_on.set()
    await wait_for(b"[0]<5>")


@running
async def test_a_first_chunk_that_there_is_no_room_for_is_an_error_of_the_stream() -> None:
    full = AsyncMock(side_effect=ApiError(503, "too many", "server_overloaded"))
    room = Room(form=Echo(), pool=Mock(in_thread=full))
    room.step(5)
    await asyncio.sleep(0.1)
    assert room.call.written.endswith(b"data: [DONE]\n\n") and b"too many" in room.call.written
    assert room.is_empty and not room.call.is_gone


@pytest.mark.parametrize("moment", ["a step", "a late write", "an error"])
@running
async def test_mistake_of_ours_ends_one_request(moment: str) -> None:
    room = Room()
    room.form.fails_at = 5
    room.call.is_full = moment != "a step"
    room.step(5)
    room.call.is_full = False
    if moment == "a late write":
        room.book.write(room.request, 2.0)
    elif moment == "an error":
        room.book.fail(room.request, engine_dead())
    assert room.is_empty and room.call.is_gone and room.aborted == [0]
