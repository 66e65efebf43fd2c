"""Filters, penalties and bias give what transformers' logits processors give on random logits, in vLLM's order."""

import math
from collections.abc import Sequence

import pytest
import torch
from option_rows import record
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanovllm import SamplingParams
from nanovllm.engine.sampling.row import SamplingRow
from nanovllm.kernels.sampling.filters import find_thresholds_reference
from nanovllm.kernels.sampling.penalties import edit_logits_reference
from nanovllm.kernels.sampling.rows import Rows

VOCAB = 200


def random_logits(seed: int) -> torch.Tensor:
    return torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(
    "options",
    [{"top_k": 1}, {"top_k": 17}, {"top_p": 0.2}, {"top_p": 0.95}, {"min_p": 0.02}, {"min_p": 0.9},
     {"top_k": 10, "top_p": 0.7}, {"min_p": 0.05, "top_k": 12, "top_p": 0.8}, {"min_p": 0.3, "top_k": 100}],
    ids=str,
)  # fmt: skip
def test_survivors(options: dict[str, float], temperature: float) -> None:
    logits = random_logits(1)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if "min_p" in options:
        warpers.append(MinPLogitsWarper(options["min_p"]))
    if "top_k" in options:
        warpers.append(TopKLogitsWarper(int(options["top_k"])))
    if "top_p" in options:
        warpers.append(TopPLogitsWarper(options["top_p"]))
    expected = warpers(torch.zeros(8, 1, dtype=torch.long), logits.clone()).isfinite()
    index = torch.arange(8, dtype=torch.int32)
    records = torch.stack([record(**options)] * 8)
    thresholds = find_thresholds_reference(logits, index, index, records, torch.full((8,), temperature), VOCAB)
    assert torch.equal(logits >= thresholds.unsqueeze(1), expected)


def made_row(params: SamplingParams, bad_words: Sequence[tuple[int, ...]] = ()) -> SamplingRow:
    return SamplingRow(params, stop_ids=frozenset(), vocab_size=VOCAB, text=None, bad_words=bad_words, matcher=None)


def edited(params: SamplingParams, logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
    """One row's logits as the option sampler changes them, by way of what rank 0 would send."""
    row = made_row(params)
    counts = torch.zeros(1, VOCAB, dtype=torch.int32)
    for _, token_id, count in row.counts(0, prompt + output, len(prompt)).tolist():
        counts[0, token_id] = count
    masks = row.allowed_mask()
    edits = row.edits(output, len(output))
    zero = torch.zeros(1, dtype=torch.int32)
    record = torch.frombuffer(bytearray(row.record), dtype=torch.int32).view(1, -1)
    none = torch.empty(0)
    return edit_logits_reference(
        Rows(logits, zero, zero, record, zero, none, none, none, none, none, VOCAB), counts,
        None if masks is None else torch.from_numpy(masks).view(1, -1),
        torch.empty(0, 3, dtype=torch.int32) if edits is None else torch.from_numpy(edits),
    )  # fmt: skip


PROMPT, OUTPUT = [5, 9, 9, 30], [9, 7, 7, 7, 31]


@pytest.mark.parametrize("penalty", [0.6, 1.3, 2.0])
def test_repetition_penalty(penalty: float) -> None:
    logits = random_logits(2)[:1]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([PROMPT + OUTPUT]), logits.clone())
    torch.testing.assert_close(edited(SamplingParams(repetition_penalty=penalty), logits, PROMPT, OUTPUT), expected)


def test_presence_and_frequency_penalty() -> None:
    """Of output tokens only, in the order that vLLM documents: repetition first."""
    logits = random_logits(3)[:1]
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=-0.4, repetition_penalty=1.2)
    expected = RepetitionPenaltyLogitsProcessor(1.2)(torch.tensor([PROMPT + OUTPUT]), logits.clone())
    for token_id in OUTPUT:
        expected[0, token_id] += 0.4
    for token_id in set(OUTPUT):
        expected[0, token_id] -= 0.7
    torch.testing.assert_close(edited(params, logits, PROMPT, OUTPUT), expected)


def test_bias_comes_before_penalties() -> None:
    logits = random_logits(4)[:1]
    bias = {7: 2.5, 100: -100.0, 5: 1.0}
    both = LogitsProcessorList([
        SequenceBiasLogitsProcessor({(token_id,): value for token_id, value in bias.items()}),
        RepetitionPenaltyLogitsProcessor(1.5),
    ])  # fmt: skip
    expected = both(torch.tensor([PROMPT + OUTPUT]), logits.clone())
    params = SamplingParams(logit_bias=bias, repetition_penalty=1.5)
    torch.testing.assert_close(edited(params, logits, PROMPT, OUTPUT), expected)


def test_a_bad_words_last_token_is_banned_after_the_others_in_the_output() -> None:
    row = made_row(SamplingParams(), [(3, 4, 5), (7,)])
    for output, expected in (([3, 4], {5, 7}), ([1, 3, 4], {5, 7}), ([4], {7}), ([8, 4], {7}), ([3, 4, 8], {7})):
        edits = row.edits([9, 3, *output], len(output))
        assert edits is not None and set(edits[:, 1].tolist()) == expected


def test_a_prompts_first_token_has_no_log_probability() -> None:
    for start, count in ((0, 4), (1, 4), (3, 2)):
        row = made_row(SamplingParams(prompt_logprobs=0, prompt_logprob_start=start))
        row.expect_prompt_logprobs(5)
        assert row.num_prompt_logprobs_missing == count


def test_allowed_ids_cannot_be_biased_back() -> None:
    logits = random_logits(5)[:1]
    out = edited(SamplingParams(allowed_token_ids=[3, 199], logit_bias={3: 1.0, 4: 100.0}), logits, PROMPT, OUTPUT)
    assert out.isfinite().nonzero()[:, 1].tolist() == [3, 199]
    assert math.isclose(float(out[0, 3]), float(logits[0, 3]) + 1, rel_tol=1e-6)
