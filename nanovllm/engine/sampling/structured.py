"""Outputs that a grammar admits, through llguidance (optional extra "structured"): compiled once, matched token by
token.

The library is imported when the first constrained request comes. Its matchers live on rank 0 only; ranks see bit masks.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nanovllm.engine.sampling.grammar_limits import JSON_BLANKS, LargeStackThread, check_masks, check_text, failure
from nanovllm.errors import short, shown
from nanovllm.sampling_params import StructuredOutput
from nanovllm.text.checkpoint import CheckpointTokenizer
from nanovllm.wire.sampling import mask_words

_MAX_CACHED = 128
_JSON_DEFAULTS: Any = {"whitespace_pattern": JSON_BLANKS}
"""A schema's own "x-guidance" entry wins over this."""
_MISFIT = "doesn't satisfy the grammar"
"""The library's words for a token that its mask did not allow."""
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
"""A rule's head in llama.cpp's form of a grammar; Lark has none such."""


class Matcher:
    """One output on its way through its grammar."""

    def __init__(self, inner: Any, owner: "StructuredOutputs", eos_ids: frozenset[int]) -> None:
        self.inner, self.owner = inner, owner
        self.error: str | None = None
        self._eos_ids = eos_ids

    def accept(self, token_id: int) -> None:
        """Takes a sampled token in; `error` says where it does not fit."""
        if self.error is None and not (token_id in self._eos_ids and self.inner.is_accepting()):
            fits = self.inner.consume_token(token_id)
            if not fits and (not self.inner.is_error() or _MISFIT in failure(self.inner)):
                self.error = f"structured_outputs: token {token_id} does not fit; other options may leave none"
            self.note_error()

    def note_error(self) -> None:
        if self.error is None and self.inner.is_error():
            self.error = f"structured_outputs: {short(failure(self.inner))}"

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end of text can follow."""
        return self.error is None and self.inner.is_stopped()


class StructuredOutputs:
    """Compiles constraints for one tokenizer. From any thread."""

    def __init__(self, tokenizer: CheckpointTokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Raises ValueError where the library is missing or cannot read the tokenizer."""
        try:
            import llguidance
        except ImportError:
            raise ValueError("structured_outputs: needs llguidance: pip install 'nanovllm[structured]'") from None
        self._library = llguidance
        self._vocab_words = mask_words(vocab_size)
        self._eos_ids = frozenset(eos_ids)
        self._lock = threading.Lock()
        self._thread = LargeStackThread()
        self._compiled: OrderedDict[tuple[str, str | tuple[str, ...]], Any] = OrderedDict()
        self._executor = llguidance.LLExecutor()
        size = max(vocab_size, len(tokenizer))
        self._words = mask_words(size)
        try:
            ends = [token_id for token_id in eos_ids if token_id < size] or None
            form = tokenizer.backend_tokenizer.to_str()
            self._tokenizer = llguidance.LLTokenizer(form, n_vocab=size, eos_token=ends)
        except Exception as error:
            raise ValueError(f"structured_outputs: llguidance cannot use this tokenizer: {short(error)}") from error

    def matcher(self, wanted: StructuredOutput) -> Matcher:
        """A fresh matcher at the start of its grammar. Raises ValueError naming what does not compile, is larger than
        grammar_limits.py allows, or takes too long for each token."""
        [(kind, value)] = wanted.given.items()
        try:
            key = _key(kind, value)
            with self._lock:
                start = self._compiled.get(key)
                if start is not None:
                    self._compiled.move_to_end(key)
            if start is None:
                text = _text(kind, value)
                start = self._thread.run(lambda: self._compile(kind, text))
                with self._lock:
                    self._compiled[key] = start
                    if len(self._compiled) > _MAX_CACHED:
                        self._compiled.popitem(last=False)
        except Exception as error:
            name = f"StructuredOutput.{kind}={shown(value)}"
            raise ValueError(f"{name}: must compile, but: {short(error)}") from None
        return Matcher(start.deep_copy(), self, self._eos_ids)

    def is_compiled(self, wanted: Mapping[str, Any]) -> bool:
        """Whether `matcher` has a constraint of these fields of StructuredOutput at hand."""
        with self._lock:
            return any(_key(kind, value) in self._compiled for kind, value in wanted.items())

    def _compile(self, kind: str, text: str) -> Any:
        if kind == "grammar" and _GBNF_RULE.search(text):
            text = _lark_of_gbnf(text)
        check_text(kind, text)
        library = self._library.LLMatcher
        if kind in ("json", "json_object"):
            form = library.grammar_from_json_schema(text, defaults=_JSON_DEFAULTS)
        else:
            form = library.grammar_from_lark(text) if kind == "grammar" else library.grammar_from_regex(text)
        start = library(self._tokenizer, form, log_level=0)  # its errors become the matcher's `error`
        if start.is_error():
            raise ValueError(failure(start))
        check_masks(start.deep_copy(), self._eos_ids)
        return start

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


def _literal(text: str) -> str:
    """A regular expression for exactly `text`; Rust's dialect takes escapes of ASCII punctuation only."""
    escaped = re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", text)
    return escaped.replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")


def _lark_of_gbnf(grammar: str) -> str:
    """The Lark grammar of one in GBNF. Raises ValueError, or another error that says what is wrong."""
    check_text("gbnf", grammar)
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        return gbnf_to_lark(grammar)
    except RecursionError:
        raise ValueError("its groups nest too deep") from None
    except IndexError:
        raise ValueError("it ends within an escape") from None


def _key(kind: str, value: Any) -> tuple[str, str | tuple[str, ...]]:
    """Name of a constraint among those compiled. Thousands of choices become a text in tens of milliseconds, which each
    of a request's prompts would take anew."""
    return kind, tuple(value) if kind == "choice" else _text(kind, value)


def _text(kind: str, value: Any) -> str:
    """A constraint as the library takes it."""
    if kind == "json":
        return value if isinstance(value, str) else json.dumps(dict(value))
    if kind == "json_object":
        return '{"type": "object"}'
    return "|".join(f"({_literal(one)})" for one in value) if kind == "choice" else str(value)
