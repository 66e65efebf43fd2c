"""FP8 weights: what a checkpoint's configuration says, every rank's share of it, and a request's tokens alone, in a
crowd, in chunks, from the cache, preempted and on two ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_model, read_json, save, write_json
from comparing import Expected, assert_mostly_sure
from safetensors.torch import load_file, save_file
from workload import BLOCK, LONGEST, ROOMY, assert_outputs, make_requests, run, run_alone

from nanovllm import LLM
from nanovllm.kernels.fp8.reference import quantize_blocks, quantize_channels

SHAPE: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
"""A hidden size and a width that 128 does not divide, and heads of half a block."""
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FILE = "model.safetensors"


def compressed(strategy: str, dynamic: bool = True) -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": "float"}
    inputs = {**numbers, "strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    group = {"targets": ["Linear"], "weights": {**numbers, "strategy": strategy}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*layers.1.self_attn.o_proj"],
    }  # fmt: skip


def is_quantized(name: str, config: dict[str, Any]) -> bool:
    if "ignore" in config and "layers.1.self_attn.o_proj" in name:
        return False
    return name.endswith("proj.weight") and "lm_head" not in name


def quantize(folder: Path, config: dict[str, Any]) -> Path:
    """Rewrites a checkpoint as one of `config`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / FILE).items():
        if not is_quantized(name, config):
            tensors[name] = value
            continue
        if "weight_block_size" in config:
            tensors[name], scale = quantize_blocks(value)
            tensors[f"{name}_scale_inv"] = scale
            continue
        tensors[name], scale = quantize_channels(value)
        weights = config["config_groups"]["group_0"]["weights"]
        if weights["strategy"] == "tensor":
            scale = value.abs().max() / 448
            tensors[name] = (value / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale.to(torch.bfloat16).float()
        if not config["config_groups"]["group_0"]["input_activations"]["dynamic"]:
            tensors[name.replace("weight", "input_scale")] = torch.tensor([0.02])
    save_file(tensors, folder / FILE)
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "quantization_config": config})
    return folder


CONFIGS: dict[str, dict[str, Any]] = {
    "blocks": BLOCKS,
    "channels": compressed("channel"),
    "tensor, static": compressed("tensor", dynamic=False),
}
REQUESTS = make_requests()
SETTINGS: dict[str, dict[str, Any]] = {
    "a crowd": {},
    "chunks, preempted": {
        "num_kvcache_blocks": LONGEST // BLOCK, "disable": ("lookahead",), "max_num_batched_tokens": BLOCK,
    },
    "two ranks": {"tensor_parallel_size": 2, "max_num_batched_tokens": 64},
}  # fmt: skip


@pytest.fixture(scope="module", params=["blocks", "channels", "tensor, static", "while loading"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = save(make_model(seed=3, **SHAPE), tmp_path_factory.mktemp("fp8"))
    if request.param == "while loading":
        yield {"model": str(folder), "quantization": "fp8"}
    else:
        yield {"model": str(quantize(folder, CONFIGS[request.param]))}


@pytest.fixture(scope="module")
def expected(model: dict[str, Any]) -> list[Expected]:
    plain = {"disable": ("async_scheduling",), "enable_prefix_caching": False, "max_num_seqs": 2}
    with LLM(**model, **{**ROOMY, **plain}) as llm:
        found = run_alone(llm, REQUESTS)
    assert_mostly_sure(found)
    return found


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_a_token_depends_on_its_request_alone(
    model: dict[str, Any], expected: list[Expected], setting: str
) -> None:
    with LLM(**model, **{**ROOMY, **SETTINGS[setting]}) as llm:
        assert_outputs(run(llm, REQUESTS), REQUESTS, expected, setting)
        assert_outputs(run(llm, REQUESTS[::-1]), REQUESTS[::-1], expected[::-1], (setting, "later, from the cache"))
