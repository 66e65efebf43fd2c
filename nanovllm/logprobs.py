"""Log-probabilities as the engine hands them back: lines of the steps' tables, dicts when looked at. No torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token at one position of a text."""

    logprob: float
    """Natural logarithm of its probability, in float32; SamplingParams.logprobs_mode says of which logits. -inf, never
    NaN, where these leave no token, as those of weights that have diverged."""
    rank: int
    """1 for the likeliest token; equally likely tokens share the better rank where they were sampled or given."""
    decoded_token: str | None
    """The token's own text; None without a tokenizer. Half a character shows as U+FFFD."""


class LogprobRows:
    """The token at each position of a text and the likeliest ones there: lines of the steps' tables, as they came.

    A table, int32 [lines, 3 + 2 k], is shared by all requests of its step. Each line is laid out as
    kernels/sampling/logprobs.py says: the token, its rank, the k likeliest ids; the token's log-probability and theirs
    (float32 bits). Two plain lists, not an object for each token: Python's garbage collector would walk all of them.
    """

    __slots__ = ("_decode", "_k", "_lines", "_tables")

    def __init__(self, k: int, decode: Callable[[int], str | None], num_missing: int = 0) -> None:
        """`k`: likeliest tokens to show at each position. `decode`: token id -> its text. `num_missing`: positions
        about which there is nothing to say until `put` does."""
        self._k, self._decode = k, decode
        self._tables: list[np.ndarray | None] = [None] * num_missing
        self._lines: list[int] = [0] * num_missing

    def __len__(self) -> int:
        return len(self._tables)

    def append(self, table: np.ndarray | None, line: int = 0) -> None:
        """Appends a position; None: one without log-probabilities."""
        self._tables.append(table)
        self._lines.append(line)

    def put(self, position: int, table: np.ndarray, line: int) -> bool:
        """Fills a position in; returns whether nothing was there."""
        is_new = self._tables[position] is None
        self._tables[position], self._lines[position] = table, line
        return is_new

    def view(self, positions: range | None = None) -> "LogprobsList":
        """Log-probabilities of `positions` (default: all that are there now) in the form that users see."""
        return LogprobsList(self, range(len(self)) if positions is None else positions)

    def packed(self, positions: range) -> tuple[Any, ...]:
        """Arguments from which `unpacked` rebuilds rows of `positions` alone, for pickle and copy: in a table of their
        own, since other requests share the steps' tables, and with the tokens' texts, since the tokenizer holds a
        thread."""
        k = self._k
        found = [(at, words) for at, where in enumerate(positions) if (words := self.words(where)) is not None]
        table = np.empty((len(found), 3 + 2 * k), np.int32)
        for line, (_, words) in enumerate(found):
            begin = _own_logprob(words)
            table[line, : 2 + k], table[line, 2 + k :] = words[: 2 + k], words[begin : begin + 1 + k]
        ids = {*table[:, 0].tolist(), *table[:, 2 : 2 + k].ravel().tolist()}
        return k, {token_id: self._decode(token_id) for token_id in ids}, len(positions), [at for at, _ in found], table

    @classmethod
    def unpacked(
        cls, k: int, texts: dict[int, str | None], num_positions: int, known: list[int], table: np.ndarray
    ) -> "LogprobRows":
        """`known`: the position of each line of `table`."""
        rows = cls(k, texts.get, num_positions)
        for line, position in enumerate(known):
            rows.put(position, table, line)
        return rows

    def words(self, position: int) -> np.ndarray | None:
        """Words of a position's line; None where there is none."""
        table = self._tables[position]
        return None if table is None else table[self._lines[position]]

    def shown(self, position: int) -> dict[int, Logprob] | None:
        """Log-probabilities at a position by token id, the position's own token first."""
        words, k, decode = self.words(position), self._k, self._decode
        if words is None:
            return None
        begin = _own_logprob(words)
        own, rank, *ids = words[: min(begin, 2 + k)].tolist()
        logprob, *logprobs = words[begin : begin + 1 + k].view(np.float32).tolist()
        found = {own: Logprob(_without_nan(logprob), rank, decode(own))}
        for place, (token_id, value) in enumerate(zip(ids, logprobs, strict=True), 1):
            if token_id not in found and value > -math.inf:  # an id that filters have dropped is not likely at all
                found[token_id] = Logprob(value, place, decode(token_id))
        return found

    def logprob(self, position: int) -> float:
        """Log-probability of the position's own token; 0 where there is none."""
        words = self.words(position)
        return 0.0 if words is None else _without_nan(float(words[_own_logprob(words)].view(np.float32)))


class KeptIds(Sequence[np.ndarray | None]):
    """Token ids that each token of an output was sampled from: int64, ascending, unpacked when looked at. None for
    tokens that came with the request."""

    __slots__ = ("_lines", "_vocab_size")

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._lines: list[np.ndarray | None] = []

    def append(self, table: np.ndarray, line: int) -> None:
        """`table` int32 [lines, words]: bit i % 32 of word i // 32 is that of id i."""
        self._lines.append(table[line].copy())

    def append_ids(self, ids: np.ndarray | None) -> None:
        """`ids` int32 [any number]: those of a token; None: of one that came with the request."""
        self._lines.append(None if ids is None else id_bits(ids, self._vocab_size))

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> np.ndarray | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray | None]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray | None] | None:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        line = self._lines[index]
        if line is None:
            return None
        return np.unpackbits(line.view(np.uint8), bitorder="little")[: self._vocab_size].nonzero()[0]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeptIds):
            return NotImplemented
        own, others = ([line is None or line.tobytes() for line in each._lines] for each in (self, other))
        return own == others

    __hash__ = None  # type: ignore[assignment]


def id_bits(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """int32 words in which bit i % 32 of word i // 32 says whether id i is among these."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _own_logprob(words: np.ndarray) -> int:
    """Index of the first log-probability in a line of words."""
    return (words.size + 1) // 2


def _without_nan(logprob: float) -> float:
    """Replaces NaN, where the logits left no token with any probability, by -inf."""
    return max(-math.inf, logprob)  # in this order: NaN is not above it


class LogprobsList(Sequence[dict[int, Logprob] | None]):
    """One dict of token id -> Logprob for each position, the position's own token first; built when it is looked at.

    None where there is nothing to say (the first token of a prompt).
    """

    __slots__ = ("_positions", "_rows")

    def __init__(self, rows: LogprobRows, positions: range) -> None:
        """`positions`: of `rows`."""
        self._rows, self._positions = rows, positions

    @property
    def total(self) -> float:
        """Sum of the log-probabilities of the positions' own tokens."""
        return sum(map(self._rows.logprob, self._positions))

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, index: slice) -> "LogprobsList": ...
    def __getitem__(self, index: int | slice) -> "dict[int, Logprob] | LogprobsList | None":
        if isinstance(index, slice):
            return LogprobsList(self._rows, self._positions[index])
        return self._rows.shown(self._positions[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked_list, self._rows.packed(self._positions)

    def __repr__(self) -> str:
        return f"LogprobsList({list(self)!r})"


def _unpacked_list(*packed: Any) -> LogprobsList:
    return LogprobRows.unpacked(*packed).view()
