"""A model from outside the package: the MLP of examples/custom_model.py, a mixer, and its own names in the checkpoint.

Its mixer is a difference: of what one attention finds, a share of what another finds is taken away.
"""

import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanovllm import register_model
from nanovllm.attention.base import KVCache
from nanovllm.layers.attention import Attention
from nanovllm.layers.context import Around, Call, ModelContext
from nanovllm.layers.rotary import PositionTables
from nanovllm.layers.weights import CheckpointWeight, WeightedModule, parameter, whole
from nanovllm.model_config import LayerSpec
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.family import Family, Fields
from nanovllm.models.names import CheckpointNames

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "custom_model.py"))


class DifferentialAttention(WeightedModule):
    """first(x) - share * second(x): [T, hidden] -> [wanted, hidden], a partial sum of this rank's heads."""

    can_capture = True

    def __init__(self, context: ModelContext, spec: LayerSpec, tables: PositionTables, around: Around) -> None:
        super().__init__()
        self.first, self.second = (Attention(context, spec, tables, Around()) for _ in range(2))
        self.share = parameter(1, dtype=context.dtype, device=context.device)
        self.operations = (*self.first.operations, *self.second.operations)
        self.memory = (*self.first.memory, *self.second.memory)

    def bind(self, *memory: KVCache) -> None:
        self.first.bind(memory[0])
        self.second.bind(memory[1])

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        return self.first(x, call) - self.share * self.second(x, call)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.first.checkpoint_weights(f"{prefix}.first")
        yield from self.second.checkpoint_weights(f"{prefix}.second")
        yield whole(f"{prefix}.share", self.share)


def read(config: ConfigReader, generation: Fields) -> Fields:
    """config.json as the example's."""
    fields = EXAMPLE["read"](config, generation)
    return {**fields, "layers": tuple(replace(layer, mixer="difference") for layer in fields["layers"])}


NAMES = CheckpointNames({"self_attn": "mixer", "mlp": "ffn"})
"""The checkpoint says mixer and ffn where nanovllm's layers say self_attn and mlp."""

register_model(
    "ExampleForCausalLM",
    Family(read, NAMES, mixers={"difference": DifferentialAttention}, mlps={"power_gate": EXAMPLE["PowerGate"]}),
)

TINY: dict[str, Any] = {
    "architectures": ["ExampleForCausalLM"], "vocab_size": 150, "hidden_size": 32, "intermediate_size": 44,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "gate_power": 3,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "float32",
    "eos_token_id": 149,
}  # fmt: skip

