"""An EAGLE-3 head with random weights for the demo model, as its authors' checkpoints have it, and what it drafts by
its definition, in plain PyTorch without a cache."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

SIZES = {
    "hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 1030, "draft_vocab_size": 200,
    "max_position_embeddings": 2048, "num_hidden_layers": 1, "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
}  # fmt: skip
NUM_TAPS = 3


def weights(raw: dict[str, Any], seed: int = 1, target_width: int = 192) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, dim = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    rows = {"q": raw["num_attention_heads"] * dim, "k": raw["num_key_value_heads"] * dim}

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    found = {
        "fc.weight": matrix(hidden, NUM_TAPS * target_width), "norm.weight": norm(hidden),
        "lm_head.weight": matrix(raw["draft_vocab_size"], hidden) * 4,
        "midlayer.hidden_norm.weight": norm(hidden), "midlayer.input_layernorm.weight": norm(hidden),
        "midlayer.post_attention_layernorm.weight": norm(hidden),
        "midlayer.self_attn.q_proj.weight": matrix(rows["q"], 2 * hidden),
        "midlayer.self_attn.k_proj.weight": matrix(rows["k"], 2 * hidden),
        "midlayer.self_attn.v_proj.weight": matrix(rows["k"], 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, rows["q"]),
        "midlayer.mlp.gate_proj.weight": matrix(inner, hidden), "midlayer.mlp.up_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, inner),
    }  # fmt: skip
    if raw["draft_vocab_size"] < raw["vocab_size"]:
        ids = torch.randperm(raw["vocab_size"], generator=generator)[: raw["draft_vocab_size"]].sort().values
        found["d2t"] = ids - torch.arange(raw["draft_vocab_size"])
        found["t2d"] = torch.zeros(raw["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    if raw.get("fc_norm"):
        found |= {f"fc_norm.{number}.weight": norm(target_width) for number in range(NUM_TAPS)}
    if raw.get("norm_before_fc"):
        found["input_norm.weight"] = norm(NUM_TAPS * target_width)
    return found


def save(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changed: Any) -> Path:
    """A checkpoint's folder."""
    raw = {"architectures": ["LlamaForCausalLMEagle3"], **SIZES, **changed}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(weights(raw) if tensors is None else tensors, folder / "model.safetensors")
    return folder


class Twin:
    """The definition: all entries of a text at once, then one more for each drafted token."""

    def __init__(self, embedding: torch.Tensor, tensors: dict[str, torch.Tensor], **changed: Any) -> None:
        self.raw, self.w, self.embedding = {**SIZES, **changed}, tensors, tensors.get("embed_tokens.weight", embedding)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.raw["rms_norm_eps"])

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x [entries, heads, dim]"""
        dim = x.shape[-1]
        frequencies = self.raw["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(x.shape[0]), frequencies).repeat(1, 2)[:, None]
        turned = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return x * angles.cos() + turned * angles.sin()

    def _layer(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Row [1, hidden] of the last entry."""
        w, layer, dim = self.w, "midlayer", self.raw["head_dim"]
        normed = self._norm(hidden, f"{layer}.hidden_norm")
        residual = normed if self.raw.get("norm_before_residual") else hidden
        x = torch.cat([self._norm(self.embedding[ids], f"{layer}.input_layernorm"), normed], -1)
        q, k, v = (
            (x @ w[f"{layer}.self_attn.{name}_proj.weight"].T).view(len(ids), -1, dim) for name in ("q", "k", "v")
        )
        group = q.shape[1] // k.shape[1]
        q, k, v = self._rotated(q), self._rotated(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        q, k, v = (part.transpose(0, 1) for part in (q[-1:], k, v))
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        residual = residual[-1:] + attended.transpose(0, 1).reshape(1, -1) @ w[f"{layer}.self_attn.o_proj.weight"].T
        x = self._norm(residual, f"{layer}.post_attention_layernorm")
        gate, up, down = (w[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return residual + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def drafts(self, ids: list[int], taps: torch.Tensor, count: int) -> tuple[list[int], torch.Tensor]:
        """The likeliest ids after a text, one after another, and the row [hidden] that the head takes for the first.
        ids: of the text from its second token on; taps [ids, taps * hidden]: the target's residual streams at all
        tokens but the last."""
        if self.raw.get("fc_norm"):
            parts = taps.chunk(NUM_TAPS, -1)
            taps = torch.cat([self._norm(part, f"fc_norm.{number}") for number, part in enumerate(parts)], -1)
        if self.raw.get("norm_before_fc"):
            taps = self._norm(taps, "input_norm")
        hidden, found = taps @ self.w["fc.weight"].T, []
        text, rows = torch.tensor(ids), []
        for _ in range(count):
            out = self._layer(text, hidden)
            normed = self._norm(out, "norm")
            rows.append(normed[0])
            best = int((normed @ self.w["lm_head.weight"].T).argmax())
            best += int(self.w["d2t"][best]) if "d2t" in self.w else 0
            found.append(best)
            text = torch.cat([text, torch.tensor([best])])
            hidden = torch.cat([hidden, normed if self.raw.get("norm_output") else out])
        return found, rows[0]
