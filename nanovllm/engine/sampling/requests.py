"""Sampling data of a request's rows, made from its parameters; every mistake in these is found here."""

import threading
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.sampling.row import SamplingRow
from nanovllm.engine.sampling.structured import StructuredOutputs
from nanovllm.errors import shown
from nanovllm.model_config import ModelConfig
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.stops import StreamedText
from nanovllm.text.tokenizer import Tokenizer

_MOST_WORDS = 1024
"""Bad words whose tokens are kept: a request's prompts all have the same, and so have many requests."""


class RequestSampling:
    """Knows the vocabulary and the tokenizer. From any thread."""

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig, config: EngineConfig) -> None:
        self._tokenizer, self._model, self._logprobs_mode = tokenizer, model, config.logprobs_mode
        self._max_logprobs = config.max_logprobs
        self._words = lru_cache(_MOST_WORDS)(self._encode_word)
        self._lock = threading.Lock()
        self._structured: StructuredOutputs | None = None

    def check(self, params: SamplingParams) -> None:
        """Raises ValueError naming a field that this model or tokenizer cannot serve, its value and the bound."""
        if params.is_plain and not params.stop_token_ids:
            return
        ids: tuple[tuple[str, Iterable[int]], ...] = (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        )
        vocab = self._model.vocab_size
        for name, given in ids:
            if (largest := max(given, default=0)) >= vocab:
                raise ValueError(f"SamplingParams.{name}: token id {largest} must be below vocab_size={vocab}")
        for name in ("logprobs", "prompt_logprobs"):
            count, most = getattr(params, name), self._max_logprobs
            if count is not None and most >= 0 and not 0 <= count <= most:
                raise ValueError(f"SamplingParams.{name}={count}: must be in 0..{most} (max_logprobs)")
            if (count or 0) > vocab:
                raise ValueError(f"SamplingParams.{name}={count}: must be at most vocab_size={vocab}")
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name) and not self._tokenizer.is_there:
                value = shown(getattr(params, name))
                raise ValueError(f"SamplingParams.{name}={value}: needs a tokenizer (skip_tokenizer_init)")
        if params.structured_outputs is not None:
            self._constraints().matcher(params.structured_outputs)
        words = [self._words(text) for text in params.bad_words]
        for text, forms in zip(params.bad_words, words, strict=True):
            if not forms:
                raise ValueError(f"SamplingParams.bad_words={shown(text)}: must have tokens")
        self._check_something_is_left(params, chain.from_iterable(words))

    def _check_something_is_left(self, params: SamplingParams, bad_words: Iterable[tuple[int, ...]]) -> None:
        """Raises ValueError if no token can be sampled at the start of the output. (A bad word of several tokens may
        take the last one away later, which ends the text: SamplingRow.accept.)"""
        if params.allowed_token_ids is None:
            return
        forbidden = {word[0] for word in bad_words if len(word) == 1}
        if params.min_tokens:
            forbidden |= {*params.stop_token_ids, *(() if params.ignore_eos else self._model.eos_token_ids)}
        if forbidden.issuperset(params.allowed_token_ids):
            bound = "must hold a token that bad_words and min_tokens leave"
            allowed = shown(list(params.allowed_token_ids))
            raise ValueError(f"SamplingParams.allowed_token_ids={allowed}: {bound} (min_tokens={params.min_tokens})")

    def rows(
        self, params: SamplingParams, stop_ids: frozenset[int], prompt_token_ids: list[int],
        output_token_ids: list[int],
    ) -> list[SamplingRow | None]:  # fmt: skip
        """State of each completion of a checked request, whose output begins with `output_token_ids`; None where greedy
        or temperature is all there is to it. Raises ValueError where these cannot be such an output's."""
        if params.is_plain:
            return [None] * params.n
        bad_words, wanted = [word for text in params.bad_words for word in self._words(text)], params.structured_outputs
        rows = [
            SamplingRow(
                params, stop_ids=stop_ids, vocab_size=self._model.vocab_size,
                text=self._text(params, prompt_token_ids) if params.stop else None, bad_words=bad_words,
                matcher=None if wanted is None else self._constraints().matcher(wanted),
                num_prompt_tokens=len(prompt_token_ids),
                token_text=self._tokenizer.own.token_text,
                is_processed=(params.logprobs_mode or self._logprobs_mode) == "processed",
            )
            for _ in range(params.n)
        ]  # fmt: skip
        if params.prompt_logprobs is not None:
            rows[0].expect_prompt_logprobs(len(prompt_token_ids))
        for row in rows:
            row.begin_with(prompt_token_ids, output_token_ids)
        return [row if row.uses_step or row.text is not None else None for row in rows]

    def _text(self, params: SamplingParams, prompt_token_ids: list[int]) -> StreamedText:
        detokenizer = self._tokenizer.own.detokenizer(params.skip_special_tokens, prompt_token_ids)
        return StreamedText(detokenizer, tuple(params.stop), params.include_stop_str_in_output)

    def _encode_word(self, text: str) -> tuple[tuple[int, ...], ...]:
        """A bad word's tokens at the start of a text and after a blank."""
        bare = text.lstrip() or text
        both = (tuple(self._tokenizer.own.encode(form, add_special_tokens=False)) for form in (bare, " " + bare))
        return tuple(word for word in dict.fromkeys(both) if word)

    def is_compiled(self, wanted: Mapping[str, Any]) -> bool:
        """See StructuredOutputs.is_compiled."""
        return self._structured is not None and self._structured.is_compiled(wanted)

    def close(self) -> None:
        """Ends the process that checks constraints, if there is one."""
        with self._lock:
            if self._structured is not None:
                self._structured.close()

    def _constraints(self) -> StructuredOutputs:
        with self._lock:
            if self._structured is None:
                eos = self._model.eos_token_ids
                self._structured = StructuredOutputs(self._tokenizer.own, self._model.vocab_size, eos)
            return self._structured
