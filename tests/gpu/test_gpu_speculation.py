"""Drafts change nothing on a GPU either: to the bit with exact_bits, in graphs and eagerly."""

import random
from pathlib import Path
from typing import Any

import block_head
import eagle_head
import mtp_layer
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import drafting

pytestmark = pytest.mark.gpu
DUMMY = {
    "model": "Qwen3-0.6B", "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda",
    "hf_overrides": {"num_hidden_layers": 4},
}  # fmt: skip
DEMO = {"model": "demo", "device": "cuda"}
LOOKUP = {"prompt_lookup_min": 1}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are made and verified in every step, whether or not they pay."""
    monkeypatch.setattr(drafting, "cost", lambda *args: -1e6)


def outputs(speculative: dict[str, Any] | None, most_id: int, **options: Any) -> tuple[list[Any], tuple[int, int]]:
    """Ids and log-probabilities of requests whose texts repeat themselves; how many tokens were drafted, and right."""
    draw = random.Random(1)
    piece = [draw.randrange(5, most_id) for _ in range(40)]
    prompts = [(piece * 4)[: 30 + 13 * number] for number in range(10)]
    params = [
        SamplingParams(
            temperature=(0.0, 0.3, 0.8)[number % 3], seed=number, max_tokens=80, ignore_eos=True,
            logprobs=1 if number % 4 == 1 else None, top_p=0.9 if number % 5 == 4 else 1.0,
        )
        for number in range(10)
    ]  # fmt: skip
    with LLM(
        max_model_len=1024, max_num_seqs=32, num_kvcache_blocks=256, exact_bits="batch",
        speculative_config=speculative, **options,
    ) as llm:  # fmt: skip
        found = []
        for result in llm.generate(prompts, params, use_tqdm=False):
            one = result.outputs[0]
            scores = [sorted((key, value.logprob) for key, value in at.items()) for at in one.logprobs or ()]
            found.append((one.token_ids, scores))
        stats = llm.stats()
        return found, (stats.spec_decode_num_draft_tokens, stats.spec_decode_num_accepted_tokens)


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("eager", [False, True])
def test_outputs_are_those_without_drafts(k: int, eager: bool) -> None:
    expected, _ = outputs(None, 9000, enforce_eager=eager, **DUMMY)
    lookup = {"method": "ngram", "num_speculative_tokens": k, **LOOKUP}
    found, (_, num_accepted) = outputs(lookup, 9000, enforce_eager=eager, **DUMMY)
    assert found == expected and num_accepted > 0


@pytest.mark.parametrize("method", ["eagle3", "dflash", "dspark"])
def test_nor_do_heads(method: str, tmp_path: Path) -> None:
    """Whose drafts in graphs are those of eager steps."""
    folder = tmp_path / "head"
    if method == "eagle3":
        eagle_head.save(folder)
    else:
        block_head.save(folder, method)
    head = {"method": method, "model": str(folder), "num_speculative_tokens": 3}
    expected, _ = outputs(None, 1000, **DEMO)
    found = [outputs(head, 1000, enforce_eager=eager, **DEMO) for eager in (False, True)]
    assert [texts for texts, _ in found] == [expected] * 2
    assert found[0][1] == found[1][1] and found[0][1][0] > 0


@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_nor_do_drafts_of_recurrent_layers(method: str, tmp_path: Path) -> None:
    """Whose states are those after the tokens that hold: what a row draws has the log-probability that it has in its
    whole text, computed as a prompt, up to the noise of rows without drafts."""
    mtp_layer.saved("qwen3_5", tmp_path)
    options: dict[str, Any] = {
        "model": str(tmp_path), "skip_tokenizer_init": True, "device": "cuda", "max_num_seqs": 16,
        "max_model_len": 256, "kvcache_block_size": 32, "num_kvcache_blocks": 64,
    }  # fmt: skip
    speculative = {"method": method, "num_speculative_tokens": 3, **(LOOKUP if method == "ngram" else {})}
    prompts = [([(37 * i + 11 * number) % 211 for i in range(23)] * 4)[: 30 + 7 * number] for number in range(8)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True, logprobs=0)
    runs = []
    for drafts, eager in ((None, True), (speculative, True), (speculative, False)):
        with LLM(**options, speculative_config=drafts, enforce_eager=eager) as llm:
            found = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
            assert (llm.stats().spec_decode_num_draft_tokens > 0) == (drafts is not None)
        runs.append(([one.token_ids for one in found], [scores_of(one.token_ids, one.logprobs) for one in found]))
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    noise = []
    with LLM(**options) as llm:
        for texts, ours in runs:
            llm.reset_prefix_cache()
            whole = llm.generate([a + b for a, b in zip(prompts, texts, strict=True)], scored, use_tqdm=False)
            exact = [scores_of(ids, one.prompt_logprobs[-len(ids) :]) for ids, one in zip(texts, whole, strict=True)]
            noise.append(max(abs(torch.tensor(ours) - torch.tensor(exact)).flatten().tolist()))
    assert max(noise[1:]) < 2 * noise[0] + 0.01, noise


def scores_of(ids: list[int], logprobs: Any) -> list[float]:
    return [at[each].logprob for each, at in zip(ids, logprobs, strict=True)]
