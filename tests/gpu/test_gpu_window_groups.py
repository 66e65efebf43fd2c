"""Layers with windows as groups of their own, on a GPU: the same bits as with all tokens kept, in graphs or without."""

from pathlib import Path
from typing import Any

import pytest
from small_models import OPTIONS, PROMPTS, make_checkpoint

from nanovllm import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {}, "eager": {"enforce_eager": True},
    "triton": {"attention_backend": "triton"}, "fp8 cache": {"kv_cache_dtype": "fp8"},
    "small blocks": {"kvcache_block_size": 16}, "exact bits": {"exact_bits": "batch"},
    "two ranks": {"tensor_parallel_size": 2}, "sleep": {"enable_sleep": True},
}  # fmt: skip
PARAMS = [SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=40, ignore_eos=True, logprobs=1)
          for i in range(len(PROMPTS))]  # fmt: skip


def answers(folder: str, **options: Any) -> tuple[list[Any], int]:
    """Tokens and log-probabilities of two rounds, the second from the cache; and the tables of a row."""
    with LLM(folder, **{**OPTIONS, "num_kvcache_blocks": 600, **options}) as llm:
        found: list[Any] = []
        for _ in range(2):
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            found += [(one.token_ids, [{token: each.logprob for token, each in by_token.items()}
                                       for by_token in one.outputs[0].logprobs]) for one in outputs]  # fmt: skip
        assert outputs[-1].num_cached_tokens > 0
        if options.get("enable_sleep"):
            llm.sleep()
            llm.wake_up()
            again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert [one.token_ids for one in again] == [tokens for tokens, _ in found[: len(PROMPTS)]]
        return found, sum(group["tables"] for group in llm.engine_info()["kv_cache_groups"])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_bits_are_those_of_layers_that_keep_everything(kind: str, setting: str, tmp_path: Path) -> None:
    """Windows of 50 tokens, prompts of up to 520."""
    folder, options = make_checkpoint(kind, tmp_path), SETTINGS[setting]
    disable = options.get("disable", ())
    found, num_tables = answers(folder, **options)
    whole, of_whole = answers(folder, **{**options, "disable": (*disable, "window_groups")})
    assert num_tables > of_whole == 1
    assert found == whole
