"""FP8 keys and values: what the cache holds of them, and how many fit. (Their tokens: test_invariance.py.)"""

import pytest
import torch
from checkpoints import make_model, save
from workload import BLOCK, ROOMY, make_requests

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.pointwise.kv_store import quantised_reference
from nanovllm.runner.model_runner import ModelRunner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(make_model(seed=1), tmp_path_factory.mktemp("fp8")))


def test_the_cache_holds_the_keys_and_values_of_a_wider_one(folder: str) -> None:
    """Rounded: of the first layer, which no rounding of an earlier one reaches."""
    caches = []
    for kv_cache_dtype in ("fp8", "auto"):
        with LLM(folder, **ROOMY, kv_cache_dtype=kv_cache_dtype) as llm:
            llm.generate([make_requests()[9].prompt], SamplingParams(max_tokens=1), use_tqdm=False)
            runner: ModelRunner = llm.engine.executor.runner  # type: ignore[attr-defined]
            layer = runner.model.attention_layers()[0]
            caches.append((layer.cache.k, layer.cache.v, layer.cache.scales))
    (k8, v8, scales), (k, v, none) = caches
    assert none is None and scales is not None
    for number, (narrow, wide) in enumerate(((k8, k), (v8, v))):
        rounded, scale = quantised_reference(wide)
        assert wide.count_nonzero() > 1000
        assert torch.equal(scale, scales[..., number])
        assert (rounded.float() == narrow.float()).float().mean() > 0.9999


def test_twice_as_many_tokens_fit(folder: str) -> None:
    own = {"device": "cpu", "cpu_kvcache_gib": 0.01, "max_model_len": 256, "skip_tokenizer_init": True}
    with LLM(folder, dtype="bfloat16", **own) as wide:
        layout = wide.engine.executor.runner.state_memory.layout  # type: ignore[attr-defined]
        wide_blocks = wide.engine_info()["num_kvcache_blocks"]
    per_block = BLOCK * layout.token_bytes(torch.float8_e4m3fn)
    head_dim = layout.lanes[0][0].widths[0]
    assert per_block == BLOCK * layout.token_bytes(torch.bfloat16) * (head_dim + 2) // (2 * head_dim)
    with LLM(folder, kv_cache_dtype="fp8", **own) as llm:
        blocks = llm.engine_info()["num_kvcache_blocks"]
    assert isinstance(blocks, int) and isinstance(wide_blocks, int)
    assert blocks == int(0.01 * 2**30) // per_block and blocks > 1.8 * wide_blocks
