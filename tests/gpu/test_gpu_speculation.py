"""Drafts change nothing on a GPU either: to the bit with exact_bits, in graphs and eagerly."""

import random
from pathlib import Path
from typing import Any

import block_head
import eagle_head
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine import drafting

pytestmark = pytest.mark.gpu
DUMMY = {
    "model": "Qwen3-0.6B", "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda",
    "hf_overrides": {"num_hidden_layers": 4},
}  # fmt: skip
DEMO = {"model": "demo", "device": "cuda"}


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
    lookup = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1}
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
