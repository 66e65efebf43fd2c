"""Options as "auto" and the machine resolve them."""

from dataclasses import replace

import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.executor.resolve import resolve
from nanovllm.models.published import PUBLISHED_SHAPES
from nanovllm.models.registry import parse_config


@pytest.mark.parametrize(
    ("ranks", "qk_norm", "is_eager"), [(2, "width", True), (2, "head", False), (1, "width", False)]
)
def test_ranks_that_share_a_gpu_sum_norms_over_all_heads_outside_of_graphs(
    ranks: int, qk_norm: str, is_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    model = replace(parse_config(PUBLISHED_SHAPES["Qwen3-0.6B"]), qk_norm=qk_norm)
    config = EngineConfig("model", tensor_parallel_size=ranks, share_gpus=True, num_kvcache_blocks=8)
    assert resolve(config, model).enforce_eager is is_eager
