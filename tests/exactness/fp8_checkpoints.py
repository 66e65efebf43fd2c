"""Checkpoints rewritten as FP8 ones, in the spellings of the hub; and their models by the definition of FP8 products
alone."""

import re
from pathlib import Path
from typing import Any

import torch
from checkpoints import FILE, read_json, write_json
from safetensors.torch import load_file, save_file
from torch import nn

from nanovllm.kernels.fp8.reference import quantize_blocks, quantize_channels

SHAPE: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
"""A hidden size and a width that 128 does not divide, and heads of half a block."""
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INPUT_SCALE = 0.02


def compressed(strategy: str, dynamic: bool = True) -> dict[str, Any]:
    """Configuration as llm-compressor writes it; some projections stay wide, of an MLP its first or its second."""
    numbers = {"num_bits": 8, "type": "float"}
    inputs = {**numbers, "strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    group = {"targets": ["Linear"], "weights": {**numbers, "strategy": strategy}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*layers.0.mlp.down_proj", "re:.*layers.1.(self_attn.o|mlp.gate|mlp.up)_proj"],
    }  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "blocks": BLOCKS,
    "channels": compressed("channel"),
    "tensor, static": compressed("tensor", dynamic=False),
    "tensor, static, as Ministral 3 and Devstral have it": {
        "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    },
}  # fmt: skip


def in_blocks(config: dict[str, Any] | None) -> bool:
    return config is None or config.get("weight_block_size") is not None


def is_static(config: dict[str, Any] | None) -> bool:
    return config is not None and not in_blocks(config) and config != CONFIGS["channels"]


def is_quantized(name: str, config: dict[str, Any] | None) -> bool:
    """Whether the tensor of this name is quantised."""
    config = config or {}
    wide = [*config.get("ignore", ()), *config.get("modules_to_not_convert", ())]
    is_matrix = re.search(r"(proj|in_proj_qkv|in_proj_z|with_mqa)\.weight$", name) or ".experts." in name
    return bool(is_matrix) and not any(re.match(one.removeprefix("re:"), name) for one in wide)


def quantized(weight: torch.Tensor, config: dict[str, Any] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and scales as a checkpoint of `config` holds them; None: made while loading."""
    if in_blocks(config):
        return quantize_blocks(weight)
    if is_static(config):
        scale = weight.abs().max() / 448
        return (weight / scale).to(torch.float8_e4m3fn), scale
    return quantize_channels(weight)


def quantize(folder: Path, config: dict[str, Any]) -> Path:
    """Rewrites a checkpoint as one of `config`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / FILE).items():
        if not is_quantized(name, config):
            tensors[name] = value
            continue
        suffix, inputs = ("_scale_inv", "activation") if "weight_block_size" in config else ("_scale", "input")
        tensors[name], tensors[name + suffix] = quantized(value, config)
        if is_static(config):
            tensors[name.replace("weight", f"{inputs}_scale")] = torch.tensor([INPUT_SCALE])
    save_file(tensors, folder / FILE)
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "quantization_config": config})
    return folder


class Definition(nn.Module):
    """A linear layer in FP8, in float64 within: widened by their scales, what is rounded to e4m3 is multiplied."""

    def __init__(self, linear: nn.Linear, config: dict[str, Any] | None, rounds: bool = True) -> None:
        """rounds: False for a weight that is widened when it is loaded."""
        super().__init__()
        values, scale = quantized(linear.weight.data.float(), config)
        rows, columns = values.shape
        if in_blocks(config):
            scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        self.wide, self.static, self.rounds = values.double() * scale.double(), is_static(config), rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns, dtype = x.shape[-1], x.dtype
        if not self.rounds:
            return (x.double() @ self.wide.T).to(dtype)
        groups = nn.functional.pad(x.double(), (0, -columns % 128)).unflatten(-1, (-1, 128))
        scale = groups.abs().amax(-1, keepdim=True) / 448
        if self.static:
            scale = torch.full_like(scale, INPUT_SCALE)
        rounded = (groups / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double()
        return ((rounded * scale).flatten(-2)[..., :columns] @ self.wide.T).to(dtype)


def by_definition(model: nn.Module, config: dict[str, Any] | None) -> nn.Module:
    """A model of transformers, changed to have FP8 products."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and is_quantized(f"{name}.weight", config):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Definition(module, config, child != "kv_b_proj"))
    return model
