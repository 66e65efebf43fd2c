"""Sampling state of one completion on the host, beyond greedy and temperature. No torch."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nanovllm.logprobs import KeptIds, LogprobRows, id_bits
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.stops import StreamedText
from nanovllm.wire.sampling import (
    CHANGED,
    COPIED,
    EDIT_WORDS,
    FILTERED,
    MASK,
    PENALTIES,
    RECORD,
    TEMPERED,
    UNCHANGED,
)

if TYPE_CHECKING:
    from nanovllm.engine.sampling.structured import Matcher

_BAN = float("-inf")


class Ended(NamedTuple):
    """Reason why an output ends."""

    reason: str
    """See StepOutput.finish_reason."""
    why: str | None = None
    """See StepOutput.stop_reason."""


class SamplingRow:
    """Sampling state of one Sequence, its `sampling`. Plain requests have none."""

    def __init__(
        self, params: SamplingParams, *, stop_ids: frozenset[int], vocab_size: int, text: StreamedText | None,
        bad_words: Sequence[tuple[int, ...]], matcher: "Matcher | None", num_prompt_tokens: int = 0,
        token_text: Callable[[int], str | None] = lambda token_id: None, is_processed: bool = False,
    ) -> None:  # fmt: skip
        """`stop_ids`: ids that min_tokens bans at first. `text`: text of the output, where stop strings are looked for.
        `bad_words`: as token ids. `matcher`: matcher of structured_outputs. `token_text`: token id -> its text, for
        log-probabilities. `is_processed`: these are of the logits that are sampled from, not of raw ones."""
        self.params = params
        self.text = text
        self.matcher = matcher
        self.penalizes = params.penalizes
        self.num_logprobs, self.num_prompt_logprobs = (
            vocab_size if k == -1 else -1 if k is None else k for k in (params.logprobs, params.prompt_logprobs)
        )
        """Number of likeliest ids that are wanted at each token; -1: no log-probabilities."""
        self.is_processed = is_processed
        self.logprob_rows = None if params.logprobs is None else LogprobRows(self.num_logprobs, token_text)
        self.kept_ids = KeptIds(vocab_size) if params.sampling_mask else None
        self.prompt_logprob_start = max(1, params.prompt_logprob_start)
        """First position of the prompt whose log-probability is wanted; the first token has none."""
        self.prompt_logprob_rows: LogprobRows | None = None
        self.num_prompt_logprobs_missing = 0
        self._vocab_size, self._token_text = vocab_size, token_text
        # A checkpoint may name an end of text that its logits do not have: there nothing is kept from being sampled.
        self._stop_ids = sorted(i for i in stop_ids if i < vocab_size) if params.min_tokens else []
        bad_words = [word for word in bad_words if max(word) < vocab_size]
        self._bad_words: dict[int, list[tuple[int, ...]]] = {}
        """Bad words of several tokens, by the last token but one."""
        for word in bad_words:
            if len(word) > 1:
                self._bad_words.setdefault(word[-2], []).append(word)
        self._longest_word = max(map(len, bad_words), default=0)
        singles = {word[0] for word in bad_words if len(word) == 1}
        self._edits = dict(params.logit_bias) | dict.fromkeys(singles, _BAN)
        self._early_end = num_prompt_tokens + params.min_tokens
        """First position at which min_tokens bans nothing."""
        self._edit_words = self._words(self._edits, False)
        self._early_edit_words = self._words(self._edits, True) if self._stop_ids else self._edit_words
        self.has_edits = bool(self._edits or self._stop_ids or self._bad_words)
        self.filters = params.filters
        self.watches = text is not None or matcher is not None or bool(self._bad_words)
        """Whether `accept` must see each token that is no stop token."""
        self.needs_last_token = matcher is not None or bool(self._bad_words)
        """True: the tokens that may be sampled depend on those before, so the row waits until the host knows them, and
        what was drafted to follow."""
        self.drafts: list[int] = []
        """Tokens that were drafted to follow the last one, where the row has to know; -1 where none was."""
        self.has_mask = params.allowed_token_ids is not None or matcher is not None
        self.kind = _kind_of(params, self.penalizes or self.has_mask, is_processed)
        """Way of sampling for tokens without edits, of KINDS."""
        self.flags = PENALTIES * self.penalizes | MASK * self.has_mask | TEMPERED * is_processed
        self.record = _record_of(params, self.flags)
        self._allowed: np.ndarray | None = None

    @property
    def uses_step(self) -> bool:
        """Whether the row ever needs an entry in a step's sampling section."""
        wants_logprobs = self.num_logprobs >= 0 or self.num_prompt_logprobs >= 0
        return self.kind != UNCHANGED or self.has_edits or wants_logprobs

    def draft(self, place: int) -> int:
        """The token drafted for a place behind the last token; -1: there is none."""
        return self.drafts[place - 1] if place <= len(self.drafts) else -1

    def expect_prompt_logprobs(self, num_prompt_tokens: int) -> None:
        """Makes this row, the first of n completions, collect the log-probabilities of the prompt."""
        self.prompt_logprob_rows = LogprobRows(self.num_prompt_logprobs, self._token_text, num_prompt_tokens)
        self.num_prompt_logprobs_missing = max(0, num_prompt_tokens - self.prompt_logprob_start)

    def take_prompt_logprobs(self, first_position: int, table: np.ndarray, lines: Sequence[int]) -> None:
        """Takes in the lines of prompt tokens from `first_position` on. Tokens that are computed again change
        nothing."""
        assert self.prompt_logprob_rows is not None
        for position, line in enumerate(lines, first_position):
            self.num_prompt_logprobs_missing -= self.prompt_logprob_rows.put(position, table, line)

    def begin_with(self, prompt_token_ids: list[int], output_token_ids: list[int]) -> None:
        """Takes in the tokens that the output begins with. Raises ValueError where they would have ended it."""
        token_ids = list(prompt_token_ids)
        for number, token_id in enumerate(output_token_ids, 1):
            token_ids.append(token_id)
            if self.watches and (ended := self.accept(token_ids, number)):
                why = f" ({ended.why})" if ended.why else ""
                raise ValueError(f"output_token_ids: end with token {number - 1}{why}: there is nothing to go on with")
            if self.logprob_rows is not None:
                self.logprob_rows.append(None)
            if self.kept_ids is not None:
                self.kept_ids.append_ids(None)

    def edits(self, token_ids: list[int], num_output_tokens: int, place: int = 0) -> np.ndarray | None:
        """Additions to the logits of the token at a place behind the last: int32 [n, EDIT_WORDS], of which the caller
        fills in the first column. `token_ids`: prompt and output, which matter to bad words only. num_output_tokens:
        at least; more may be on the device."""
        is_early = bool(self._stop_ids) and num_output_tokens + place < self.params.min_tokens
        if self._bad_words:
            begin = len(token_ids) - min(num_output_tokens, self._longest_word)
            output = token_ids[begin:] + self.drafts[:place]
            begun = self._bad_words.get(output[-1], ()) if output else ()
            if bans := [word[-1] for word in begun if tuple(output[1 - len(word) :]) == word[:-1]]:
                return self._words(self._edits | dict.fromkeys(bans, _BAN), is_early)
        words = self._early_edit_words if is_early else self._edit_words
        return words if len(words) else None

    def _words(self, edits: dict[int, float], is_early: bool) -> np.ndarray:
        """Edits as `edits` returns them, with the bans of min_tokens where a token may still be one of the first."""
        banned, end = (self._stop_ids, self._early_end) if is_early else ([], 0)
        words = np.zeros((len(edits) + len(banned), EDIT_WORDS), np.int32)
        words[:, 1] = [*edits, *banned]
        words[:, 2] = np.array([*edits.values(), *[_BAN] * len(banned)], np.float32).view(np.int32)
        words[:, 3] = [*(-end * (i in banned) for i in edits), *[end] * len(banned)]
        return words

    def allowed_mask(self) -> np.ndarray | None:
        """Bits of allowed_token_ids, int32 [mask_words]; None without that option."""
        if self.params.allowed_token_ids is None:
            return None
        if self._allowed is None:
            self._allowed = id_bits(list(self.params.allowed_token_ids), self._vocab_size)
        return self._allowed

    def counts(self, slot: int, token_ids: Sequence[int], num_prompt_tokens: int) -> np.ndarray:
        """Token counts of prompt and output, int32 [n, 3]: slot, id, 2 * (times in the output) + (1 if in the prompt).
        An id of the prompt may come several times."""
        prompt = np.array(token_ids[:num_prompt_tokens], np.int32)
        if len(token_ids) == num_prompt_tokens:
            ids, found = prompt, np.ones(prompt.size, np.int32)
        else:  # it was preempted
            output, times = np.unique(np.array(token_ids[num_prompt_tokens:], np.int32), return_counts=True)
            ids = np.union1d(prompt, output)
            found = np.isin(ids, prompt).astype(np.int32)
            found[np.searchsorted(ids, output)] += 2 * times.astype(np.int32)
        return np.stack([np.full(ids.size, slot, np.int32), ids, found], axis=1)

    def accept(self, token_ids: list[int], num_output_tokens: int) -> Ended | None:
        """Takes in the last of `token_ids` (prompt and output), which is no stop token. Returns why the output ends, by
        its text, its grammar, or options that together left no token to sample; None: it goes on."""
        token_id = token_ids[-1]
        misfit = self._misfit(token_ids, num_output_tokens)
        watch = misfit is None and num_output_tokens >= self.params.min_tokens
        if self.text is not None and self.text.push(token_id, watch):
            return Ended("stop", self.text.stopped_by)
        if misfit is not None:
            return Ended("abort", misfit)
        if self.matcher is not None and self.matcher.is_complete:
            return Ended("stop")
        return None

    def _misfit(self, token_ids: list[int], num_output_tokens: int) -> str | None:
        """Reason why nothing can follow the last token, which options or the grammar do not admit; else None."""
        if self.needs_last_token and self._was_forbidden(token_ids, num_output_tokens):
            names = ("allowed_token_ids", "bad_words", "structured_outputs")
            given = ", ".join(name for name in names if getattr(self.params, name))
            return f"{given}: they left no token to sample"
        if self.matcher is None:
            return None
        self.matcher.accept(token_ids[-1])
        return self.matcher.error

    def _was_forbidden(self, token_ids: list[int], num_output_tokens: int) -> bool:
        """Whether the last token is a forbidden one: it is sampled only where all are."""
        token_id, allowed = token_ids[-1], self.allowed_mask()
        if allowed is not None and not allowed[token_id // 32] >> (token_id % 32) & 1:
            return True
        if self._edits.get(token_id) == _BAN:
            return True
        words = self._bad_words.get(token_ids[-2], ())
        return any(num_output_tokens >= len(word) and tuple(token_ids[-len(word) :]) == word for word in words)


def _kind_of(params: SamplingParams, changes: bool, is_processed: bool) -> int:
    """Way of sampling, of KINDS. changes: counts or a mask change the logits."""
    kind = (COPIED if changes else FILTERED) if params.filters else (CHANGED if changes else UNCHANGED)
    wants_logits = params.logprobs is not None and is_processed and kind != UNCHANGED  # those that are sampled from
    return COPIED if wants_logits or params.sampling_mask else kind


def _record_of(params: SamplingParams, flags: int) -> bytes:
    """A RECORD (wire/sampling.py)."""
    log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
    top_k = params.top_k if 0 < params.top_k < 2**31 else 0
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    return RECORD.pack(flags, top_k, params.top_p, log_min_p, *penalties)

