"""A request in flight, as data: its rows, what they have gained, and the format in which its client gets that. Its life
is book.py's."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanovllm.engine.prompt import Prompt
from nanovllm.engine.step import Finish
from nanovllm.serve import limits
from nanovllm.serve.api import fields as api
from nanovllm.serve.errors import ApiError
from nanovllm.serve.http.call import Call
from nanovllm.serve.parsers import Syntax
from nanovllm.text.stops import VisibleText

_DONE = b"data: [DONE]\n\n"


class Prepared(NamedTuple):
    """A request, checked and tokenized."""

    fields: api.CommonFields
    prompts: list[Prompt]
    params: dict[str, Any]
    """Fields of SamplingParams, for all prompts."""
    max_tokens: list[int]
    """Maximum output tokens for each prompt."""
    syntax: Syntax | None = None
    """Syntax that the answer to a chat is held to, and read by."""
    given: Any = None
    """Value that its format needs beside these."""


@dataclass(slots=True, eq=False)
class Row:
    """One continuation of one prompt."""

    index: int
    prompt_index: int
    text: VisibleText
    push: Callable[[int], str] = field(init=False)
    """Method of `text`."""
    request: "Request" = field(init=False)
    number: int = -1
    """The engine's number of it."""
    pieces: list[str] = field(default_factory=list)
    """Text that has not been sent (of an unstreamed answer: all)."""
    num_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens of its prompt that were cached, in the first of the prompt's rows."""
    ids: list[int] | None = None
    """Token ids that have not been sent, where they were asked for."""
    lines: list[bytes] | None = None
    """Log-probabilities that have not been sent, as lines of LogprobRows, if they were asked for."""
    kept: list[bytes] = field(default_factory=list)
    """Ids that each token was sampled from, if they were asked for (Step)."""
    end: Finish | None = None
    last_time: float = 0.0
    has_begun: bool = False
    prefix: bytes = b""
    """Beginning of a chunk that holds text alone: all before the text."""
    reader: Any = None
    """Finds reasoning and tool calls in the text, where there may be some."""
    state: Any = None
    """State that a format keeps between two chunks."""

    def __post_init__(self) -> None:
        self.push = self.text.push

    def finish(self, end: Finish) -> None:
        """Takes in the row's end and its last token."""
        if end.token is not None:
            self.num_tokens += 1
            if self.ids is not None:
                self.ids.append(end.token)
        self.pieces.append(self.text.end(end.token, end.reason, end.stop_reason))
        self.end = end


class Format(ABC):
    """Shape of one answer: its parts as bytes. No life, no socket."""

    id_prefix = ""
    """Prefix of the ids that the server gives."""
    counts_events = False
    """Whether its clients count events, and none else, as signs of life."""
    id: str
    model: str
    """The name that the client calls the model by."""

    @abstractmethod
    def row(self, index: int, prompt_index: int) -> Row:
        """A row of the request."""

    def head(self, row: Row) -> bytes:
        """The first chunk of a row."""
        return b""

    def head_size(self, row: Row) -> int:
        """Bytes of numbers that a first chunk is written from which takes long; else 0."""
        return 0

    @abstractmethod
    def chunk(self, row: Row, text: str) -> bytes:
        """A chunk with what a row has gained; its last one says why it ended."""

    def end(self, request: "Request") -> bytes:
        """Bytes that follow all rows."""
        return _DONE

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that cannot go on."""
        return b"data: " + error.body() + b"\n\n" + _DONE

    def sign_of_life(self, request: "Request") -> bytes:
        """Bytes for a silent stream, so that no proxy or client takes it for a dead one."""
        return b": still here\n\n"

    @abstractmethod
    def whole(self, request: "Request") -> bytes:
        """The whole answer."""

    def finish_reason(self, row: Row) -> str | None:
        """The reason as the API words it."""
        return None if row.end is None else row.end.reason

    def explain(self, error: ApiError) -> None:  # noqa: B027 (optional)
        """Puts the request's own words into an error of the engine."""


class Request:
    """One HTTP request in flight; Book alone writes it."""

    def __init__(self, call: Call, prepared: Prepared, form: Format, now: float) -> None:
        self.call, self.format, self.id, self.key = call, form, form.id, call.key
        self.prompts, self.params, self.max_tokens = prepared.prompts, prepared.params, prepared.max_tokens
        self.is_streamed = bool(prepared.fields.stream)
        self.n: int = self.params.get("n", 1)
        """Rows of each prompt."""
        self.rows = [form.row(index, index // self.n) for index in range(len(self.prompts) * self.n)]
        for row in self.rows:
            row.request = self
        self.num_prompt_tokens = sum(map(len, self.prompts))
        self.prompt_lines: list[list[bytes | None] | None] = [None] * len(self.prompts)
        self.unfinished: set[int] = set()
        """The engine's ids of prompts that have not ended."""
        self.ready: dict[Row, None] = {}
        """Rows with something to send."""
        self.heads: dict[Row, asyncio.Task[bytes]] = {}
        """First chunks that are being written, or have been."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when the answer is complete, or an error where no response has begun."""
        self.has_begun = self.has_left = False
        """Whether its response has begun, as that of a stream; whether its client has left."""
        self.arrival = self.last_write = now
        self.first_token: float | None = None
        self.queued = self.prefill = self.decode = 0.0
        """Seconds that a prompt waited, then until its first token, then to its end; the longest of all prompts."""
        self.error: ApiError | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Cached tokens of all prompts, known with their first tokens."""
        return sum(row.num_cached_tokens for row in self.rows)

    @property
    def num_output_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_bytes_waiting(self) -> int:
        """About how many bytes it has that were not sent, where its client does not take what it is sent."""
        if not self.has_begun or not self.call.is_full:
            return 0
        pieces = sum(len(piece) for row in self.ready for piece in row.pieces)
        ids = sum(len(row.ids or ()) for row in self.ready)
        numbers = sum(len(line) // 4 for row in self.ready for line in row.lines or ())
        return pieces + limits.ID_BYTES * ids + limits.LOGPROB_BYTES * numbers
