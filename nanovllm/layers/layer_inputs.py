"""Inputs of single layers beside the residual stream: a part of the token's own embedding for each layer, and a part of
a projection of the common one (Gemma 4 E2B and E4B)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.layers.context import ModelContext, Stream
from nanovllm.layers.linear import MergedColumnParallelLinear, ParallelLinear, RowParallelLinear, part_of
from nanovllm.layers.norm import ReduceAddNorm, RowNorm
from nanovllm.layers.quantized import column_multiple
from nanovllm.layers.step import OUTSIDE, Call, wanted_rows
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, Shard, WeightedModule, parameter

_MULTIPLE = column_multiple(None)
_PROJECTION = "per_layer_model_projection"


class LayerInputs(WeightedModule):
    """(token ids [T], stream of their embeddings) -> (embeddings [T, hidden], complete; inputs [T, layers, width], of
    whose width a rank has a range): (norm(projection of the embedding) + the token's own) / sqrt(2)."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        config, self.kernels = context.config, context.kernels
        assert config.layer_inputs is not None
        self.layers, self.width, vocab = self.config = config.layer_inputs
        self.size, self.begin, self.valid = part_of(self.width, context.group, _MULTIPLE)
        hidden, columns = config.hidden_size, self.layers * self.width
        self.table = parameter(vocab, self.layers, self.size, dtype=context.dtype, device=context.device)
        if self.valid < self.size:
            self.table.zero_()
        piece = Piece(_PROJECTION, (columns, hidden), (Cut(0, 0, 0, columns),))
        of_layers = replace(context, adapters=None)  # they are for products inside of layers
        self.projection = ParallelLinear(of_layers, "layer_inputs", columns, hidden, pieces=[piece])
        # The projection times hidden ** -0.5 is what the norm takes; it changes no more than what epsilon weighs.
        self.norm = RowNorm(context, self.width, config.norm_eps * hidden, kind=config.norm_kind)
        self.whole = ReduceAddNorm(context, None)
        self._scale = torch.tensor(self.width**0.5, dtype=context.dtype).item()

    def forward(self, token_ids: torch.Tensor, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        _, embedded = self.whole(stream)
        projected = self.projection(embedded, OUTSIDE).view(-1, self.width)
        of_rank = self.norm(projected).view(-1, self.layers, self.width)[..., self.begin : self.begin + self.valid]
        found = F.embedding(token_ids, self.table.flatten(1)).view(-1, self.layers, self.size).mul_(self._scale)
        return embedded, found.add_(F.pad(of_rank, (0, self.size - self.valid))).mul_(2**-0.5)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        count, width = self.layers, self.width
        shards = tuple(Shard(self.table[:, i, : self.valid], 1, i * width + self.begin) for i in range(count))
        if self.size == width:
            shards = (Shard(self.table.view(-1, count * width), 1, 0),)
        yield CheckpointWeight(f"{prefix}.embed_tokens_per_layer.weight", (len(self.table), count * width), shards)
        yield from self.projection.checkpoint_weights(prefix)
        yield from self.norm.checkpoint_weights(f"{prefix}.per_layer_projection_norm")


class LayerInputGate(WeightedModule):
    """One layer's part: the residual stream [T, hidden] -> projection(activation(gate(x)) * the layer's input), a
    partial sum."""

    def __init__(self, context: ModelContext, layer: int) -> None:
        super().__init__()
        config, self.kernels, self.layer = context.config, context.kernels, layer
        assert config.layer_inputs is not None
        self.activation, width = config.activation, config.layer_inputs[1]
        self.gate = MergedColumnParallelLinear(
            context, config.hidden_size, {"per_layer_input_gate": width}, multiple=_MULTIPLE, name="input_gate"
        )
        self.projection = RowParallelLinear(
            context, width, config.hidden_size, multiple=_MULTIPLE, name="input_projection"
        )
        self.operations = (self.gate.product, self.projection.product)

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        assert call.step is not None and call.step.layer_inputs is not None
        gates: Any = self.kernels.activation(self.gate(x, call), self.activation, False)
        given = wanted_rows(call.step.layer_inputs[:, self.layer], call.rows)
        return self.projection(gates.mul_(given), call)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.gate.checkpoint_weights(prefix)
        yield from self.projection.checkpoint_weights(f"{prefix}.per_layer_projection")
