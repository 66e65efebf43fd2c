"""A custom architecture: a model that nanovllm does not know, defined in a file of your own.

    python examples/custom_model.py                             # a tiny model with random weights
    nanovllm serve FOLDER --plugins examples/custom_model.py    # a checkpoint of this architecture

Only the MLP is new: its gate is a power of a sigmoid. Attention, ranks and caching come with the package's layers.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from nanovllm import LLM, SamplingParams, register_model
from nanovllm.layers.context import Around, Call, ModelContext
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.weights import CheckpointWeight, WeightedModule
from nanovllm.model_config import LayerSpec
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.family import Family, Fields, read_decoder


class PowerGate(WeightedModule):
    """down(sigmoid(gate(x)) ** power * up(x)): [T, hidden] -> [T, hidden], this rank's partial sum."""

    def __init__(self, context: ModelContext, spec: LayerSpec, around: Around) -> None:
        super().__init__()
        hidden, width, self.power = context.config.hidden_size, context.config.intermediate_size, spec.options
        self.gate_up_proj = MergedColumnParallelLinear(context, hidden, {"gate_proj": width, "up_proj": width})
        self.down_proj = RowParallelLinear(context, width, hidden, around=around.last())
        self.operations = (self.gate_up_proj.product, self.down_proj.product)

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        gate, up = self.gate_up_proj(x, call).chunk(2, dim=-1)
        return self.down_proj(gate.sigmoid() ** self.power * up, call)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.gate_up_proj.checkpoint_weights(prefix)
        yield from self.down_proj.checkpoint_weights(f"{prefix}.down_proj")


def read(config: ConfigReader, generation: Fields) -> Fields:
    """Reads a config.json like Llama's, with one more entry, `gate_power`."""
    fields, power = read_decoder(config, generation), config.integer("gate_power", 2)
    return {**fields, "layers": tuple(replace(layer, mlp="power_gate", options=power) for layer in fields["layers"])}


register_model("PowerGateForCausalLM", Family(read, mlps={"power_gate": PowerGate}))

if __name__ == "__main__":
    config = {"architectures": ["PowerGateForCausalLM"], "vocab_size": 150, "hidden_size": 32, "intermediate_size": 44}
    config |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256, "gate_power": 3}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        with LLM(folder, plugins=[__file__], load_format="dummy", skip_tokenizer_init=True) as llm:
            print("tokens:", llm.generate([[1, 2, 3]], SamplingParams(max_tokens=16))[0].token_ids)
