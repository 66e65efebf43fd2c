"""Random Qwen3 checkpoints in folders, written by transformers, whose greedy choices are clear ones; and changes of
their tensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

FILE = "model.safetensors"
SMALL: dict[str, Any] = {
    "vocab_size": 301, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
"""Two key/value heads, so that four ranks have more; a vocabulary that neither two nor four divide."""


def make_model(seed: int = 0, weight_std: float = 0.15, **config: Any) -> Qwen3ForCausalLM:
    """A model with random weights: SMALL, changed by `config`.

    The standard deviation is far above a trained model's at birth, so that logits spread over several units and two
    tokens are seldom within 1e-3; norm scales differ from one another, so that none can stand in for another.
    """
    torch.manual_seed(seed)
    options = {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **config}
    no_special_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(**{**no_special_tokens, **options}, initializer_range=weight_std)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.3)
    return model


def save(
    model: Qwen3ForCausalLM, folder: Path, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB"
) -> Path:
    """Writes `model` to `folder`; its own weights are rounded to `dtype`."""
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], to: Path | None = None) -> None:
    """Changes the tensors of a checkpoint of one file, in its place or in another folder."""
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, (to or folder) / FILE)


def spoil(
    folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None], to: Path | None = None
) -> None:
    """Changes one tensor; None: it goes."""

    def change_one(tensors: dict[str, torch.Tensor]) -> None:
        if (spoilt := change(tensors.pop(name))) is not None:
            tensors[name] = spoilt.contiguous()

    change_tensors(folder, change_one, to)


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
