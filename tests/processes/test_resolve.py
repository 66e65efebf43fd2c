"""Options as "auto" and the machine resolve them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.executor.resolve import resolve
from nanovllm.models.registry import read_model_config

CONFIG = EngineConfig("Qwen3-0.6B", load_format="dummy")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("ranks", "qk_norm", "is_eager"), [(2, "width", True), (2, "head", False), (1, "width", False)]
)
def test_ranks_that_share_a_gpu_sum_norms_over_all_heads_outside_of_graphs(
    ranks: int, qk_norm: str, is_eager: bool
) -> None:
    model = replace(read_model_config(CONFIG), qk_norm=qk_norm)
    config = replace(CONFIG, tensor_parallel_size=ranks, share_gpus=True, num_kvcache_blocks=8)
    assert resolve(config, model).enforce_eager is is_eager


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_types_of_checkpoints_that_are_not_served_as_they_are(device: str, dtype: str) -> None:
    for stored in ("float32", "float64"):
        config = replace(CONFIG, device=device, hf_overrides={"dtype": stored})
        assert resolve(config, read_model_config(config)).dtype == dtype


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_a_gpu_that_torch_does_not_see_is_no_silent_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for driver, visible, warns in ((tmp_path, "0", True), (tmp_path, "", False), (tmp_path / "none", "0", False)):
        monkeypatch.setattr("nanovllm.executor.resolve._NVIDIA_DRIVER", driver)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        caplog.clear()
        assert resolve(CONFIG, read_model_config(CONFIG)).device == "cpu"
        assert ("device='auto': the CPU, which is slow" in caplog.text) == warns
