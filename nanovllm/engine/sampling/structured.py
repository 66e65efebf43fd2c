"""Outputs that a grammar admits, through llguidance (optional extra "structured"): checked in another process, compiled
once, matched token by token.

The library is imported when the first constrained request comes. Its matchers live on rank 0 only; ranks see bit masks.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from typing import Any

import numpy as np

from nanovllm.engine.sampling.grammar_checks import GrammarChecks
from nanovllm.engine.sampling.grammar_compiler import GrammarCompiler, literal
from nanovllm.engine.sampling.grammar_limits import LargeStackThread, failure
from nanovllm.errors import short, shown
from nanovllm.sampling_params import StructuredOutput
from nanovllm.text.checkpoint import CheckpointTokenizer
from nanovllm.wire.sampling import mask_words

_MAX_CACHED = 128
_MAX_CACHED_BYTES = 1 << 30
_TOKEN_BYTES = 32 << 10
"""Most memory that a token adds to the states of its grammar, as measured for the worst expressions."""
_MISFIT = "doesn't satisfy the grammar"
"""The library's words for a token that its mask did not allow."""
_Key = tuple[str, str | tuple[str, ...]]


class _Start:
    """A compiled constraint. All its matchers share the states of one lexer, which grow as tokens lead to new ones."""

    def __init__(self, inner: Any, num_bytes: int) -> None:
        self.inner, self._num_bytes = inner, num_bytes
        self.num_tokens = 0
        """Tokens that its matchers have taken."""

    @property
    def num_bytes(self) -> int:
        """Memory that it may have."""
        return self._num_bytes + _TOKEN_BYTES * self.num_tokens


class Matcher:
    """One output on its way through its grammar."""

    def __init__(self, start: _Start, owner: "StructuredOutputs", eos_ids: frozenset[int]) -> None:
        self.inner, self.start, self.owner = start.inner.deep_copy(), start, owner
        self.error: str | None = None
        self._eos_ids = eos_ids

    def accept(self, token_id: int) -> None:
        """Takes a sampled token in; `error` says where it does not fit."""
        self.start.num_tokens += 1
        if self.error is None:
            if not self._fits(token_id) and (not self.inner.is_error() or _MISFIT in failure(self.inner)):
                self.error = f"structured_outputs: token {token_id} does not fit; other options may leave none"
            self.note_error()

    def _fits(self, token_id: int) -> bool:
        """Takes a token in, unless it is an end of text that the grammar admits, and need not be told; returns whether
        it fits."""
        is_end = token_id in self._eos_ids and bool(self.inner.is_accepting())
        return is_end or bool(self.inner.consume_token(token_id))

    def after(self, token_id: int) -> "Matcher | None":
        """A matcher that has taken one more token in; None where it does not fit, or where the output ends with it."""
        may_fit = token_id in self._eos_ids or self.inner.validate_tokens([token_id])  # ends of text do not validate
        if self.error is not None or not may_fit:
            return None
        found = copy(self)
        found.inner = self.inner.deep_copy()
        return found if found._fits(token_id) and not found.is_complete else None

    def note_error(self) -> None:
        if self.error is None and self.inner.is_error():
            self.error = f"structured_outputs: {short(failure(self.inner))}"
            self.owner.drop(self.start)

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end of text can follow."""
        return self.error is None and self.inner.is_stopped()


class StructuredOutputs:
    """Compiles constraints for one tokenizer. From any thread."""

    def __init__(self, tokenizer: CheckpointTokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Raises ValueError where the library is missing or cannot read the tokenizer."""
        self._vocab_words = mask_words(vocab_size)
        self._eos_ids = frozenset(eos_ids)
        self._lock = threading.Lock()
        self._threads = LargeStackThread(), LargeStackThread()
        """Threads for what was checked among the quick ones, and among the slow ones."""
        self._made: OrderedDict[_Key, Future[_Start | str]] = OrderedDict()
        """Constraints: compiled, refused with this reason, or being compiled."""
        size = max(vocab_size, len(tokenizer))
        self._words = mask_words(size)
        ends = [token_id for token_id in eos_ids if token_id < size] or None
        setup = tokenizer.backend_tokenizer.to_str(), size, ends
        self._checks = GrammarChecks(*setup)
        try:
            import llguidance

            self._checks.begin()  # it reads the tokenizer at the same time
            self._compiler = GrammarCompiler(*setup)
        except ImportError:
            raise ValueError("structured_outputs: needs llguidance: pip install 'nanovllm[structured]'") from None
        except Exception as error:
            self._checks.close()
            raise ValueError(f"structured_outputs: llguidance cannot use this tokenizer: {short(error)}") from error
        self._executor = llguidance.LLExecutor()

    def matcher(self, wanted: StructuredOutput) -> Matcher:
        """A fresh matcher at the start of its grammar. Raises ValueError naming what does not compile, is larger than
        grammar_limits.py allows, or takes too much time or memory."""
        [(kind, value)] = wanted.given.items()
        try:
            return Matcher(self._start(kind, value), self, self._eos_ids)
        except Exception as error:
            name = f"StructuredOutput.{kind}={shown(value)}"
            raise ValueError(f"{name}: must compile, but: {short(error)}") from None

    def is_compiled(self, wanted: Mapping[str, Any]) -> bool:
        """Whether `matcher` has a constraint of these fields of StructuredOutput at hand, or why there is none."""
        with self._lock:
            made = (self._made.get(_key(kind, value)) for kind, value in wanted.items())
            return any(each is not None and each.done() for each in made)

    def _start(self, kind: str, value: Any) -> _Start:
        """The compiled constraint. Whoever asks for it first has it made; the others wait."""
        key = _key(kind, value)
        with self._lock:
            made = self._made.get(key)
            is_first = made is None
            made = self._made[key] = made or Future()
            self._made.move_to_end(key)
        if is_first:
            found: _Start | str = "who asked for it first was interrupted"
            is_lasting = False
            try:
                found, is_lasting = self._compiled(kind, value)
            finally:  # also at Ctrl-C: others wait
                made.set_result(found)
                with self._lock:
                    if not is_lasting:
                        self._made.pop(key, None)
                    self._make_room()
        if isinstance(found := made.result(), str):
            raise ValueError(found)
        return found

    def _compiled(self, kind: str, value: Any) -> tuple[_Start | str, bool]:
        """The compiled constraint, or why there is none; and whether that will be so next time. (Not an exception: one
        that is raised again and again keeps the frames of all who raised it.)"""
        try:
            text = _text(kind, value)
            verdict = self._checks.check(kind, text)
            if verdict.error is not None:
                return verdict.error, verdict.is_lasting
            inner = self._threads[verdict.lane].run(lambda: self._compiler.compile(kind, text))
            return _Start(inner, verdict.num_bytes), True
        except Exception as error:
            return short(error), False

    def _make_room(self) -> None:
        """Drops what was not asked for lately, and then the largest, until the rest is within its bounds."""
        while len(self._made) > _MAX_CACHED:
            self._made.popitem(last=False)
        sizes = {key: start.num_bytes for key, start in self._starts()}
        while sum(sizes.values()) > _MAX_CACHED_BYTES:
            largest = max(sizes, key=sizes.__getitem__)
            del sizes[largest], self._made[largest]

    def drop(self, start: _Start) -> None:
        """Forgets a compiled constraint whose states have reached their bound: others' matchers begin with new ones."""
        with self._lock:
            for key in [key for key, each in self._starts() if each is start]:
                del self._made[key]

    def _starts(self) -> list[tuple[_Key, _Start]]:
        done = [(key, made.result()) for key, made in self._made.items() if made.done()]
        return [(key, found) for key, found in done if isinstance(found, _Start)]

    def close(self) -> None:
        """Ends the process that checks constraints."""
        self._checks.close()

    def fill_masks(self, matchers: Sequence[Matcher]) -> np.ndarray:
        """int32 [matchers, words]: bits of the ids that may come next, all computed side by side by the library's own
        threads. A grammar that fails notes it in its `error`; its mask then allows everything, and the token it samples
        ends it."""
        masks = np.empty((len(matchers), self._words), np.int32)
        sound = [(matcher.inner, line) for line, matcher in enumerate(matchers) if matcher.error is None]
        if sound:
            self._executor.unsafe_compute_mask_ptr(sound, masks.ctypes.data, 4 * self._words, len(matchers))
        for line, matcher in enumerate(matchers):
            matcher.note_error()
            if matcher.error is not None:
                masks[line] = -1
        return masks[:, : self._vocab_words]


def _key(kind: str, value: Any) -> _Key:
    """Name of a constraint among those compiled. Thousands of choices become a text in tens of milliseconds, which each
    of a request's prompts would take anew."""
    return kind, tuple(value) if kind == "choice" else _text(kind, value)


def _text(kind: str, value: Any) -> str:
    """A constraint as the library takes it."""
    if kind == "json":
        return value if isinstance(value, str) else json.dumps(dict(value))
    if kind == "json_object":
        return '{"type": "object"}'
    return "|".join(f"({literal(one)})" for one in value) if kind == "choice" else str(value)
