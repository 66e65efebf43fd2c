"""Outputs that a grammar admits, through llguidance (optional extra "structured"): compiled once, matched token by
token.

The library is imported when the first constrained request comes. Its matchers live on rank 0 only; ranks see bit masks.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanovllm.sampling.section import mask_words
from nanovllm.sampling_params import StructuredOutput

_MAX_CACHED = 128
_JSON_DEFAULTS: Any = {"whitespace_pattern": r"(\n {0,16}|[ ])"}
"""Between JSON's tokens: nothing, a blank, or a line break and an indentation. Without a bound a model can go on with
blanks for ever; a schema's own "x-guidance" entry wins over this."""


class Matcher:
    """One output on its way through its grammar."""

    def __init__(self, inner: Any, words: int, vocab_words: int, eos_ids: frozenset[int]) -> None:
        """`words`: int32 words of a mask over the tokenizer's ids; `vocab_words`: over the model's."""
        self.inner = inner
        self._vocab_words = vocab_words
        self.error: str | None = None
        self._eos_ids = eos_ids
        self._mask = np.zeros(words, np.int32)

    def mask(self) -> np.ndarray:
        """int32 bits of the ids that may come next, as fill_masks has left them."""
        return self._mask[: self._vocab_words]

    def fill(self) -> None:
        """Computes the mask."""
        self.inner.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._note_error()

    def accept(self, token_id: int) -> None:
        """Takes a drawn token in; `error` says where it does not fit."""
        if self.error is None and not (token_id in self._eos_ids and self.inner.is_accepting()):
            if not self.inner.consume_token(token_id) and not self.inner.is_error():
                self.error = f"structured_outputs: token {token_id} does not fit"
            self._note_error()

    def _note_error(self) -> None:
        if self.error is None and self.inner.is_error():
            self.error = f"structured_outputs: {self.inner.get_error().strip().splitlines()[0]}"

    @property
    def is_complete(self) -> bool:
        """Nothing but an end of text can follow."""
        return self.error is None and self.inner.is_stopped()


def fill_masks(matchers: Sequence[Matcher]) -> None:
    """Computes the masks of all. A grammar that fails notes it in its own `error`; its mask then allows everything, and
    the token it draws ends it."""
    for matcher in matchers:
        if matcher.error is None:
            matcher.fill()
        if matcher.error is not None:
            matcher.mask()[:] = -1


class StructuredOutputs:
    """Compiles constraints for one tokenizer. From any thread."""

    def __init__(self, hf_tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Raises ValueError where the library is missing or cannot read the tokenizer."""
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            raise ValueError("structured_outputs: needs llguidance: pip install 'nanovllm[structured]'") from None
        self._library = llguidance
        self._vocab_words = mask_words(vocab_size)
        self._eos_ids = frozenset(eos_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        eos = list(eos_ids) or None
        try:
            size = max(vocab_size, len(hf_tokenizer))
            self._tokenizer = llguidance.hf.from_tokenizer(hf_tokenizer, n_vocab=size, eos_token=eos)
        except Exception as error:
            raise ValueError(f"structured_outputs: llguidance cannot use this tokenizer: {error}") from error
        self._words = mask_words(size)

    def grammar(self, wanted: StructuredOutput) -> str:
        """llguidance's own form of a constraint. Raises ValueError naming what does not compile."""
        matcher = self._library.LLMatcher
        name, value = next((n, getattr(wanted, n)) for n in _KINDS if getattr(wanted, n) not in (None, False))
        try:
            if name == "json":
                text = value if isinstance(value, str) else json.dumps(dict(value))
                json.loads(text)
                return matcher.grammar_from_json_schema(text, defaults=_JSON_DEFAULTS)
            if name == "json_object":
                return matcher.grammar_from_json_schema('{"type": "object"}', defaults=_JSON_DEFAULTS)
            if name == "choice":
                return matcher.grammar_from_regex("|".join(f"({_literal(one)})" for one in value))
            return matcher.grammar_from_regex(value) if name == "regex" else matcher.grammar_from_lark(value)
        except Exception as error:
            raise _does_not_compile(name, value, error) from None

    def matcher(self, wanted: StructuredOutput) -> Matcher:
        """A fresh matcher at the start of its grammar. Raises ValueError as `grammar` does."""
        grammar = self.grammar(wanted)
        with self._lock:
            start = self._compiled.get(grammar)
            if start is None:
                start = self._library.LLMatcher(self._tokenizer, grammar)
                if start.is_error():
                    name = next(n for n in _KINDS if getattr(wanted, n) not in (None, False))
                    raise _does_not_compile(name, getattr(wanted, name), start.get_error())
                self._compiled[grammar] = start
                if len(self._compiled) > _MAX_CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return Matcher(start.deep_copy(), self._words, self._vocab_words, self._eos_ids)


_KINDS = ("json", "regex", "choice", "grammar", "json_object")


def _literal(text: str) -> str:
    """A regular expression for exactly `text`; Rust's dialect takes escapes of ASCII punctuation only."""
    escaped = re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", text)
    return escaped.replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")


def _does_not_compile(name: str, value: Any, error: object) -> ValueError:
    reason = str(error).strip().splitlines() or ["no reason given"]
    return ValueError(f"StructuredOutput.{name}={value!r}: must compile, but: {reason[0]}")
