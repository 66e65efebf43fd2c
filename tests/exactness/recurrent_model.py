"""A model with state of fixed size, registered from outside the package: gated linear recurrences, beside attention in
some layers or alone. A recurrence keeps two things of a row: its state, and the value of the last token."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from nanovllm import register_model
from nanovllm.kernels.recurrent.rows import row_places
from nanovllm.layers.context import Around, Call, ModelContext
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.memory import Slot
from nanovllm.layers.rotary import PositionTables
from nanovllm.layers.step import wanted_rows
from nanovllm.layers.weights import CheckpointWeight, WeightedModule
from nanovllm.model_config import LayerSpec
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.family import Family, Fields, read_decoder
from nanovllm.models.names import CheckpointNames


class Options(NamedTuple):
    """A class of the plugin's own, which every rank gets with the configuration."""

    share: float = 0.5


class Recurrence(WeightedModule):
    """o(state * sigmoid(z)), state <- a * state + (1 - a) * (v + share * the v before), a = sigmoid(a_proj(x)):
    [T, hidden] -> [wanted, hidden], a partial sum of this rank's columns."""

    can_capture = False

    def __init__(self, context: ModelContext, spec: LayerSpec, tables: PositionTables, around: Around) -> None:
        super().__init__()
        assert isinstance(spec.options, Options)
        width, self.share = context.config.hidden_size, spec.options.share
        outputs = dict.fromkeys(("a_proj", "v_proj", "z_proj"), width)
        self.in_proj = MergedColumnParallelLinear(context, width, outputs, name="in")
        self.o_proj = RowParallelLinear(context, width, width, name="out", around=around.last())
        self.operations = (self.in_proj.product, self.o_proj.product)
        share = self.in_proj.product.n // 3
        self.memory = (Slot((share,)), Slot((1, share), context.dtype))

    def bind(self, *memory: torch.Tensor) -> None:
        self.states, self.last_values = memory

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        step = call.step
        assert step is not None
        a, v, z = self.in_proj(x, call).chunk(3, dim=-1)
        kept, out = a.float().sigmoid(), torch.empty_like(v)
        for row in row_places(step.rows):
            state, last = row.load(self.states), row.load(self.last_values)[0]
            for number, token in enumerate(range(row.tokens.start, row.tokens.stop), 1):
                state = kept[token] * state + (1 - kept[token]) * (v[token] + self.share * last)
                out[token], last = state, v[token]
                if number == row.keep_at:
                    self.states[row.keep], self.last_values[row.keep, 0] = state, last
            self.states[row.write], self.last_values[row.write, 0] = state, last
        return self.o_proj(wanted_rows(out * z.sigmoid(), step.wanted), call)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.in_proj.checkpoint_weights(prefix)
        yield from self.o_proj.checkpoint_weights(f"{prefix}.o_proj")


def read(config: ConfigReader, generation: Fields) -> Fields:
    """config.json as Llama's, and `mixers`, one of each layer."""
    fields, mixers = read_decoder(config, generation), config.get("mixers")
    layers = zip(fields["layers"], mixers, strict=True)
    return {**fields, "layers": tuple(replace(one, mixer=mixer, options=Options()) for one, mixer in layers)}


register_model("RecurrentForCausalLM", Family(read, CheckpointNames(), mixers={"recurrence": Recurrence}))

TINY: dict[str, Any] = {
    "architectures": ["RecurrentForCausalLM"], "vocab_size": 150, "hidden_size": 32, "intermediate_size": 44,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "float32",
    "eos_token_id": 149, "mixers": ["recurrence", "attention", "recurrence"],
}  # fmt: skip
