"""A model that nanovllm does not know, served from your own file.

    python examples/custom_model.py                                    # a tiny one with random weights
    nanovllm serve FOLDER --plugins examples/custom_model.py           # a checkpoint of this architecture

Two things are new in it. Attention is gated: what each head found is multiplied by the sigmoid of a projection of the
token, before the output projection. And the MLP's gate is a power of one: down(sigmoid(gate(x)) ** power * up(x)).
The rest (grouped heads, rotary embeddings, paged keys and values, ranks, prefix cache, chunks) comes with the layers.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nanovllm import LLM, SamplingParams, register_model
from nanovllm.layers.attention import Attention, ForwardStep, wanted_rows
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.weights import CheckpointWeight, WeightedModule
from nanovllm.model_config import LayerSpec
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.decoder import ModelContext, Place, PositionTables
from nanovllm.models.family import Family, Fields, read_decoder
from nanovllm.models.names import PRE_NORMS, CheckpointNames


class GatedAttention(Attention):
    """o_proj(sigmoid(gate_proj(x)) * attention(x)): [T, hidden] -> [T, hidden], a partial sum of this rank's heads."""

    def __init__(self, context: ModelContext, spec: LayerSpec, tables: PositionTables, place: Place) -> None:
        cos_sin = None if spec.rope is None else tables.cos_sin[spec.rope, spec.head_dim]
        super().__init__(
            context, context.config, spec, cos_sin, tables.query_scale, adds_parts=place.adds_parts
        )
        width = self.heads.num_heads * spec.head_dim  # of all ranks; each gets the range of its own heads
        self.gate_proj = MergedColumnParallelLinear(context, context.config.hidden_size, {"gate_proj": width})

    def forward(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:  # type: ignore[override]
        gated = self.attend(self.qkv_proj(x), step) * self.gate_proj(x).sigmoid()
        return self.o_proj(wanted_rows(gated, step.wanted))

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from super().checkpoint_weights(prefix)
        yield from self.gate_proj.checkpoint_weights(prefix)


class PowerGate(WeightedModule):
    """down(sigmoid(gate(x)) ** power * up(x)): [T, hidden] -> [T, hidden], a partial sum of this rank's columns."""

    def __init__(self, context: ModelContext, spec: LayerSpec, place: Place) -> None:
        super().__init__()
        hidden, width = context.config.hidden_size, context.config.intermediate_size
        self.power = spec.options
        self.gate_up_proj = MergedColumnParallelLinear(context, hidden, {"gate_proj": width, "up_proj": width})
        self.down_proj = RowParallelLinear(context, width, hidden, adds_parts=place.adds_parts)
        self.operations = (self.gate_up_proj.product, self.down_proj.product)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(gate.sigmoid() ** self.power * up)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.gate_up_proj.checkpoint_weights(prefix)
        yield from self.down_proj.checkpoint_weights(f"{prefix}.down_proj")


def read(config: ConfigReader, generation: Fields) -> Fields:
    """config.json as Llama's, and `gate_power`."""
    fields, power = read_decoder(config, generation), config.integer("gate_power", 2)
    own = {"mixer": "gated_attention", "mlp": "power_gate", "options": power}
    return {**fields, "layers": tuple(replace(layer, **own) for layer in fields["layers"])}


NAMES = CheckpointNames({**PRE_NORMS, "self_attn": "mixer", "mlp": "ffn"})
"""The checkpoint says mixer and ffn where nanovllm's layers say self_attn and mlp."""

register_model(
    "GatedExampleForCausalLM",
    Family(read, NAMES, mixers={"gated_attention": GatedAttention}, mlps={"power_gate": PowerGate}),
)

TINY: dict[str, Any] = {
    "architectures": ["GatedExampleForCausalLM"], "vocab_size": 150, "hidden_size": 32, "intermediate_size": 44,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "gate_power": 3,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "float32",
    "eos_token_id": 149,
}  # fmt: skip


def save_random(folder: Path, config: dict[str, Any] = TINY, seed: int = 0) -> dict[str, torch.Tensor]:
    """Writes a checkpoint with random weights, and returns these."""
    make = torch.Generator().manual_seed(seed)
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {f"{name}.weight": (vocab, hidden) for name in ("model.embed_tokens", "lm_head")}
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}.mixer.{name}.weight": (heads, hidden) for name in ("q_proj", "gate_proj")}
        shapes |= {f"{at}.mixer.{name}.weight": (kv_heads, hidden) for name in ("k_proj", "v_proj")}
        shapes |= {f"{at}.mixer.o_proj.weight": (hidden, heads), f"{at}.ffn.down_proj.weight": (hidden, width)}
        shapes |= {f"{at}.ffn.{name}.weight": (width, hidden) for name in ("gate_proj", "up_proj")}
    tensors = {name: torch.randn(shape, generator=make) * 0.5 ** len(shape) * 2 for name, shape in shapes.items()}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return tensors


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_random(Path(folder))
        with LLM(folder, plugins=[__file__], skip_tokenizer_init=True) as llm:
            [output] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=16))
            print(output.token_ids)


if __name__ == "__main__":
    main()
