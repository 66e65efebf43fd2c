"""Adapters as PEFT writes them, random ones, and what a model computes with them by their published definition."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "lora_dropout": 0.1, "bias": "none",
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "modules_to_save": None, "use_dora": False, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {},
    "layers_to_transform": None, "layers_pattern": None, "inference_mode": True, "init_lora_weights": True,
    "fan_in_fan_out": False, "peft_version": "0.21.2", "base_model_name_or_path": "somewhere",
}  # fmt: skip


def rank_of(config: Mapping[str, Any], module: str) -> int:
    return next((r for end, r in config["rank_pattern"].items() if re.search(rf"(^|\.)({end})$", module)), config["r"])


def scale_of(config: Mapping[str, Any], module: str) -> float:
    own = config["alpha_pattern"].items()
    alpha = next((alpha for end, alpha in own if re.search(rf"(^|\.)({end})$", module)), config["lora_alpha"])
    rank = rank_of(config, module)
    return alpha / math.sqrt(rank) if config["use_rslora"] else alpha / rank


def random_tensors(model: nn.Module, modules: list[str], config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """A and B of these linear layers of a transformers model, large enough to change what it says."""
    rows, named = torch.Generator().manual_seed(seed), dict(model.named_modules())
    found = {}
    for module in modules:
        out, columns = named[module].weight.shape
        rank, name = rank_of(config, module), f"base_model.model.{module}"
        found[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=rows) / math.sqrt(columns)
        found[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=rows) * 0.3
    return found


def save(folder: Path, tensors: dict[str, torch.Tensor], **changed: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changed}), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@contextmanager
def adapted(model: nn.Module, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Iterator[None]:
    """Context in which the layers of a transformers model compute W x + s B A x, in float32."""
    named, hooks = dict(model.named_modules()), []
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b, scale = tensors[name], tensors[name.replace("lora_A", "lora_B")], scale_of(config, module)

        def add(_: Any, given: Any, y: torch.Tensor, a: Any = a, b: Any = b, scale: float = scale) -> torch.Tensor:
            return y + scale * (given[0] @ a.T @ b.T)

        hooks.append(named[module].register_forward_hook(add))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
