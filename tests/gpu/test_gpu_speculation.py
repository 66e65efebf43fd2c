"""Drafts change nothing on a GPU either: to the bit with exact_bits, in graphs and eagerly."""

import random
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine import drafting

pytestmark = pytest.mark.gpu


def outputs(k: int, **options: Any) -> tuple[list[Any], int]:
    """Ids and log-probabilities of requests whose texts repeat themselves, and drafts that were right."""
    draw = random.Random(1)
    piece = [draw.randrange(1000, 9000) for _ in range(40)]
    prompts = [(piece * 4)[: 30 + 13 * number] for number in range(10)]
    params = [
        SamplingParams(
            temperature=(0.0, 0.3, 0.8)[number % 3], seed=number, max_tokens=80, ignore_eos=True,
            logprobs=1 if number % 4 == 1 else None, top_p=0.9 if number % 5 == 4 else 1.0,
        )
        for number in range(10)
    ]  # fmt: skip
    speculative = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1} if k else None
    with LLM(
        "Qwen3-0.6B", load_format="dummy", skip_tokenizer_init=True, device="cuda", max_model_len=1024,
        max_num_seqs=32, num_kvcache_blocks=256, exact_bits="batch", speculative_config=speculative,
        hf_overrides={"num_hidden_layers": 4}, **options,
    ) as llm:  # fmt: skip
        found = []
        for result in llm.generate(prompts, params, use_tqdm=False):
            one = result.outputs[0]
            scores = [sorted((key, value.logprob) for key, value in at.items()) for at in one.logprobs or ()]
            found.append((one.token_ids, scores))
        return found, llm.stats().spec_decode_num_accepted_tokens


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("eager", [False, True])
def test_outputs_are_those_without_drafts(k: int, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = outputs(0, enforce_eager=eager)
    monkeypatch.setattr(drafting, "cost", lambda *args: -1e6)
    found, num_accepted = outputs(k, enforce_eager=eager)
    assert found == expected and num_accepted > 0
