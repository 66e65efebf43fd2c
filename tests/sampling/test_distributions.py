"""Draws of whole engines have the distribution that their options define: chi-square with fixed seeds, 1 and 2
ranks."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from processed_logits import processed
from sampling_engines import Engines, reference_logits

from nanovllm import SamplingParams

NUM_DRAWS = 800
"""Requests on one rank; half as many on two."""
TEXT = "A"
HOT = 2.5  # spreads the demo model's certain choices

CASES: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "top_k, top_p": {"top_k": 12, "top_p": 0.6},
    "all three": {"min_p": 0.02, "top_k": 20, "top_p": 0.8},
    "penalties": {"repetition_penalty": 1.4, "top_k": 30},
    "bias": {"logit_bias": {300: 6.0, 301: 6.5}, "top_p": 0.9},
    "allowed": {"allowed_token_ids": list(range(250, 330))},
    "logprobs": {"logprobs": 3, "min_p": 0.05},
}


def chi_square_is_plausible(drawn: Counter[int], p: torch.Tensor) -> bool:
    """Pooling cells of fewer than 5 expected draws; by Wilson and Hilferty's normal approximation, at 4 deviations."""
    expected = p * sum(drawn.values())
    big = (expected >= 5).nonzero().flatten().tolist()
    cells = [(drawn[i], float(expected[i])) for i in big]
    rest = float(expected.sum()) - sum(e for _, e in cells)
    if rest > 1:
        cells.append((sum(drawn.values()) - sum(n for n, _ in cells), rest))
    freedom = len(cells) - 1
    if freedom == 0:
        return True
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return normal < 4


BOTH = ("temperature", "top_k, top_p", "penalties", "logprobs")


@pytest.mark.parametrize(
    ("options", "ranks"),
    [pytest.param(options, ranks, id=f"{name}-{ranks}", marks=[pytest.mark.slow] * (ranks == 2 and name not in BOTH))
     for name, options in CASES.items() for ranks in (1, 2)],
)  # fmt: skip
def test_chi_square(engines: Engines, options: dict[str, Any], ranks: int) -> None:
    llm = engines.get(max_num_seqs=256, tensor_parallel_size=ranks, max_num_batched_tokens=1024)
    prompt = llm.tokenizer.encode(TEXT)
    p = processed(reference_logits(prompt)[-1], prompt, [], temperature=HOT, **options)[0].exp()
    draws = range(NUM_DRAWS // ranks)
    params = [SamplingParams(temperature=HOT, max_tokens=1, seed=seed, **options) for seed in draws]
    outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
    drawn = Counter(output.token_ids[0] for output in outputs)
    impossible = [token_id for token_id in drawn if p[token_id] == 0]
    assert not impossible
    assert len(drawn) > 1 and chi_square_is_plausible(drawn, p)


def test_the_test_notices_a_wrong_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(12, generator=generator).double() + 0.5
    p /= p.sum()
    draws = Counter(torch.multinomial(p, NUM_DRAWS, replacement=True, generator=generator).tolist())
    assert chi_square_is_plausible(draws, p)
    assert not chi_square_is_plausible(draws, (p**2) / (p**2).sum())
