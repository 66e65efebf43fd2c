"""A request in flight: its completions, and the bytes that its client gets of them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from nanovllm.engine.prompt import Prompt
from nanovllm.engine.step import Finish
from nanovllm.serve.errors import ApiError
from nanovllm.serve.http.call import Client
from nanovllm.text.stops import VisibleText

_DONE = b"data: [DONE]\n\n"


class Completion:
    """One continuation of one prompt."""

    __slots__ = (
        *("request", "row", "index", "prompt_index", "text", "push", "pieces", "num_tokens", "ids", "lines", "prefix"),
        *("finish_reason", "stop_reason", "last_time", "has_begun", "num_sent", "num_cached_tokens"),
        *("reader", "state", "weight_versions", "kept", "pooled"),
    )

    def __init__(self, request: "Request", index: int, prompt_index: int, text: VisibleText) -> None:
        self.request, self.index, self.prompt_index = request, index, prompt_index
        self.row = -1
        """The engine's number of it."""
        self.text, self.push = text, text.push
        self.pieces: list[str] = []
        """Text that has not been sent (of an unstreamed answer: all)."""
        self.num_tokens = 0
        self.num_cached_tokens = 0
        """Tokens of its prompt that were cached, in the first of the prompt's completions."""
        self.ids: list[int] | None = None
        """Token ids that have not been sent, where they were asked for."""
        self.lines: list[bytes] | None = None
        """Log-probabilities that have not been sent, as lines of LogprobRows, if they were asked for."""
        self.prefix = b""
        """Beginning of a chunk that holds text alone: all before the text."""
        self.weight_versions: list[tuple[int, int, int]] = []
        """Versions of the weights, once it has ended: see Finish."""
        self.kept: list[bytes] = []
        """Ids that each token was sampled from, if they were asked for (Step)."""
        self.pooled: bytes | None = None
        """Embedding of its prompt, float32, of a model of embeddings."""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.last_time = 0.0
        self.has_begun = False
        self.num_sent = 0
        """Tokens, of num_tokens, that chunks have had."""
        self.reader: Any = None
        """Finds reasoning and tool calls in the text, where there may be some."""
        self.state: Any = None
        """State that an API keeps between two chunks."""

    def finish(self, end: Finish) -> None:
        """Takes in the completion's end and its last token."""
        token = end.token
        if token is not None:
            self.num_tokens += 1
            if self.ids is not None:
                self.ids.append(token)
        self.pieces.append(self.text.end(token, end.reason, end.stop_reason))
        self.finish_reason, self.stop_reason = end.reason, end.stop_reason
        self.weight_versions, self.pooled = end.weight_versions, end.pooled


class Request:
    """One HTTP request in flight: its completions, and how their text is put into a response (by the subclasses)."""

    id_prefix = ""
    """Prefix of the ids that the server gives."""
    is_streamed = False
    counts_events = False
    """Whether its clients count events, and none else, as signs of life."""
    interval = 1
    """Tokens that a chunk waits for, but for the first and the last one."""

    def __init__(self, request_id: str, prompts: Sequence[Prompt], now: float) -> None:
        self.id = self.call_id = request_id
        self.key: int | None = None
        """Index of the API key that it came with, if the server asks for keys."""
        self.prompts = prompts
        self.params: dict[str, Any] = {}
        """Fields of SamplingParams, for all prompts."""
        self.max_tokens: list[int] = []
        """Maximum output tokens for each prompt."""
        self.model = ""
        """The name that the client calls the model by."""
        self.trace_headers: dict[str, str] = {}
        self.completions: list[Completion] = []
        self.num_prompt_tokens = sum(map(len, prompts))
        self.num_sent = 0
        """Output tokens that chunks have had."""
        self.prompt_lines: list[list[bytes | None] | None] = [None] * len(prompts)
        self.parts: set[int] = set()
        """The engine's ids of prompts that have not ended."""
        self.ready: dict[Completion, None] = {}
        """Completions with something to send."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when the answer is complete, or an error where no response has begun."""
        self.connection: Client | None = None
        """Connection of a stream whose response has begun."""
        self.arrival = self.last_write = now
        self.first_token: float | None = None
        self.queued = self.prefill = self.decode = 0.0
        """Seconds that a prompt waited, then until its first token, then to its end; the longest of all prompts."""
        self.error: ApiError | None = None
        self.is_over = False
        """Ended, failed or left by its client."""
        self.has_left = False
        """Whether its client did."""

    # -- what an API adds ---------------------------------------------------------------------------------------

    def begin(self) -> Client | None:
        """Begins the response of a stream; returns the connection to write to, None where the client is gone."""
        raise NotImplementedError

    def head(self, completion: Completion) -> bytes | None:
        """The first chunk of a completion; None: it is not known yet, and Streams.write is called when it is."""
        return b""

    def chunk(self, completion: Completion, text: str) -> bytes:
        """A chunk with what a completion has gained; its last one says why it ended."""
        raise NotImplementedError

    def ending(self) -> bytes:
        """Bytes that follow all completions."""
        return _DONE

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that cannot go on."""
        return b"data: " + error.body() + b"\n\n" + _DONE

    def sign_of_life(self) -> bytes:
        """Bytes for a silent stream, so that no proxy or client takes it for a dead one."""
        return b": still here\n\n"

    def finish_reason(self, completion: Completion) -> str | None:
        """The reason as the API words it."""
        return completion.finish_reason

    def explain(self, error: ApiError) -> None:
        """Puts the request's own words into an error of the engine."""

    # -- streaming ----------------------------------------------------------------------------------------------

    @property
    def n(self) -> int:
        """Completions of each prompt."""
        return len(self.completions) // len(self.prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Cached tokens of all prompts, known with their first tokens."""
        return sum(each.num_cached_tokens for each in self.completions)

    @property
    def num_output_tokens(self) -> int:
        return sum(each.num_tokens for each in self.completions)

    @property
    def is_unread(self) -> bool:
        """Whether its client does not take what it is sent."""
        return self.connection is not None and self.connection.is_full

    def flush(self, now: float) -> None:
        """Sends what there is, the first of it as the response begins. A client that does not read gets it merged
        later."""
        if not self._open(now):
            return
        out = []
        ready, self.ready = self.ready, {}
        for completion in ready:
            if self.interval > 1 and self._waits(completion):
                continue
            if not completion.has_begun:
                head = self.head(completion)
                if head is None and self.error is None:
                    self.ready[completion] = None
                    continue
                completion.has_begun = True
                out.append(head or b"")
            text = "".join(completion.pieces)
            completion.pieces.clear()
            self.num_sent += completion.num_tokens - completion.num_sent
            completion.num_sent = completion.num_tokens
            if text or completion.finish_reason is not None or completion.ids or completion.lines:
                out.append(self.chunk(completion, text))
        if not self.parts and not self.ready:
            out.append(self._end())
        if data := b"".join(out):
            self._write(data, now)

    def _open(self, now: float) -> bool:
        """Begins the response where none has begun; returns whether the client takes more now."""
        if self.connection is None:
            self.connection, self.last_write = self.begin(), now
        return self._can_write()

    def _can_write(self) -> bool:
        connection = self.connection
        return connection is not None and not (connection.is_full or connection.transport.is_closing())

    def _write(self, data: bytes, now: float) -> None:
        assert self.connection is not None
        self.connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self.connection.in_chunks else data)
        self.last_write = now

    def _waits(self, completion: Completion) -> bool:
        """Whether a chunk would have fewer tokens than `interval`, and more are to come."""
        more = completion.has_begun and completion.finish_reason is None and self.error is None
        return more and completion.num_tokens - completion.num_sent < self.interval

    def _end(self) -> bytes:
        if self.is_over:
            return b""
        self.complete()
        return self.ending() if self.error is None else self.failure(self.error)

    def complete(self) -> None:
        """Marks the answer as complete: all its tokens have been taken in."""
        self.is_over = True
        if not self.done.done():
            self.done.set_result(None)

    def ping(self, now: float) -> None:
        """Shows that a silent stream is not dead."""
        if self._open(now):
            self._write(self.sign_of_life(), now)

    def fail(self, error: ApiError) -> None:
        """Ends the request with an error: the response's status where none has begun, else its last event."""
        if self.is_over:
            return
        self.error = error
        self.parts.clear()
        if self.connection is not None:
            if self._can_write():
                self.flush(self.last_write)
                return
            self.connection.transport.abort()  # the client would never see the error
        self.is_over = True
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # seen: it may never be awaited

    def leave(self) -> None:
        """The client is gone."""
        self.is_over = self.has_left = True
        self.parts.clear()
        if not self.done.done():
            self.done.set_result(None)
