"""DFlash and DSpark heads with random weights for the demo model, as published checkpoints have them, and what they
draft by their definition, in plain PyTorch without a cache."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

SIZES = {
    "hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 1030, "max_position_embeddings": 2048,
    "num_hidden_layers": 2, "num_target_layers": 4, "tie_word_embeddings": False, "attention_bias": False,
    "layer_types": ["full_attention", "full_attention"], "block_size": 16,
}  # fmt: skip
SKIPPED = {"dflash": 1, "dspark": 0}
TAPS, MASK = [0, 1, 2], 1029
OF_METHOD: dict[str, dict[str, Any]] = {
    "dflash": {
        "architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS},
    },
    "dspark": {
        "architectures": ["Qwen3DSparkModel"], "mask_token_id": MASK, "target_layer_ids": TAPS, "markov_rank": 16,
        "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
    },
}  # fmt: skip


def config_of(method: str, **changed: Any) -> dict[str, Any]:
    return {**SIZES, **OF_METHOD[method], **changed}


def weights(raw: dict[str, Any], has_own_head: bool, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, dim, rank = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"], raw.get("markov_rank", 0)
    queries, keys, vocab = raw["num_attention_heads"] * dim, raw["num_key_value_heads"] * dim, raw["vocab_size"]

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    taps = raw.get("target_layer_ids") or raw["dflash_config"]["target_layer_ids"]
    found = {"fc.weight": matrix(hidden, len(taps) * 192), "hidden_norm.weight": norm(hidden),
             "norm.weight": norm(hidden)}  # fmt: skip
    for layer in (f"layers.{number}" for number in range(raw["num_hidden_layers"])):
        found |= {f"{layer}.self_attn.{name}_proj.weight": matrix(*shape) for name, shape in shapes.items()}
        if raw["attention_bias"]:
            found |= {f"{layer}.self_attn.{name}_proj.bias": matrix(shape[0]) for name, shape in shapes.items()}
        found |= {f"{layer}.self_attn.{name}_norm.weight": norm(dim) for name in ("q", "k")}
        found |= {f"{layer}.{name}_layernorm.weight": norm(hidden) for name in ("input", "post_attention")}
        found |= {f"{layer}.mlp.{name}_proj.weight": matrix(inner, hidden) for name in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = matrix(hidden, inner)
    if has_own_head:
        found |= {"embed_tokens.weight": matrix(vocab, hidden), "lm_head.weight": matrix(vocab, hidden) * 4}
    if rank:
        found |= {f"markov_head.markov_w{number}.weight": matrix(vocab, rank) * 4 for number in (1, 2)}
        found |= {"confidence_head.proj.weight": matrix(1, hidden + rank), "confidence_head.proj.bias": matrix(1)}
    return found


def save(folder: Path, method: str, tensors: dict[str, torch.Tensor] | None = None, **changed: Any) -> Path:
    """A checkpoint's folder. A DSpark head has an embedding and an output head of its own."""
    raw = config_of(method, **changed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(weights(raw, method == "dspark") if tensors is None else tensors, folder / "model.safetensors")
    return folder


class Twin:
    """The definition: the last token and masks see the whole text and each other."""

    def __init__(self, target: Any, tensors: dict[str, torch.Tensor], method: str, **changed: Any) -> None:
        self.raw, self.w, self.skipped = config_of(method, **changed), tensors, SKIPPED[method]
        self.embedding = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight)
        self.head = tensors.get("lm_head.weight", target.get_output_embeddings().weight)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.raw["rms_norm_eps"])

    def _heads(self, x: torch.Tensor, name: str, first: int, norm: str | None = None) -> torch.Tensor:
        """[T, hidden] -> [heads, T, dim], of positions from `first` on."""
        dim = self.raw["head_dim"]
        x = F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias")).view(len(x), -1, dim)
        if norm is not None:
            x = self._norm(x, norm)
            frequencies = self.raw["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
            angles = torch.outer(torch.arange(first, first + len(x)), frequencies).repeat(1, 2)[:, None]
            x = x * angles.cos() + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * angles.sin()
        return x.transpose(0, 1)

    def _layer(self, x: torch.Tensor, context: torch.Tensor, layer: str) -> torch.Tensor:
        w, mixer, start = self.w, f"{layer}.self_attn", len(context)
        normed = self._norm(x, f"{layer}.input_layernorm")
        seen = torch.cat([context, normed])
        q = self._heads(normed, f"{mixer}.q_proj", start, f"{mixer}.q_norm")
        k = self._heads(seen, f"{mixer}.k_proj", 0, f"{mixer}.k_norm")
        v = self._heads(seen, f"{mixer}.v_proj", 0)
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True)[0]
        attended = attended.transpose(0, 1).flatten(1)
        x = x + F.linear(attended, w[f"{mixer}.o_proj.weight"], w.get(f"{mixer}.o_proj.bias"))
        normed = self._norm(x, f"{layer}.post_attention_layernorm")
        gate, up, down = (w[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return x + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    def drafts(self, ids: list[int], taps: torch.Tensor, count: int) -> list[int]:
        """The likeliest ids after a text, `count` in a pass. ids: the text; taps [ids - 1, taps * hidden]: the target's
        residual streams at all tokens but the last."""
        context = self._norm(taps @ self.w["fc.weight"].T, "hidden_norm")
        x = self.embedding[torch.tensor([ids[-1], *[MASK] * (count + self.skipped - 1)])]
        for number in range(self.raw["num_hidden_layers"]):
            x = self._layer(x, context, f"layers.{number}")
        found, previous = [], ids[-1]
        for logits in (self._norm(x, "norm") @ self.head.T)[self.skipped :]:
            if self.raw.get("markov_rank"):
                follows, before = (self.w[f"markov_head.markov_w{number}.weight"] for number in (2, 1))
                logits = logits + follows @ before[previous]
            found.append(previous := int(logits.argmax()))
        return found
