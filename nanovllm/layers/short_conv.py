"""Short convolution between two gates, the recurrent layer of LFM2 (arXiv 2511.23404)."""

from collections.abc import Iterator

import torch

from nanovllm.kernels.plan.product import Around
from nanovllm.layers.context import Call, ModelContext
from nanovllm.layers.linear import ParallelLinear, RowParallelLinear, part_of
from nanovllm.layers.memory import Slot
from nanovllm.layers.quantized import column_multiple
from nanovllm.layers.rotary import PositionTables
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, WeightedModule, parameter
from nanovllm.model_config import LayerSpec


class ShortConv(WeightedModule):
    """out(c * conv(b * x)) of projections b, c and x: [T, hidden] -> [wanted, hidden], a partial sum of this rank's
    channels. It remembers the convolution's last inputs. LayerSpec.options is the number of tokens that it sees, its
    own among them."""

    can_capture = True
    checkpoint_name = "conv"

    def __init__(self, context: ModelContext, spec: LayerSpec, tables: PositionTables, around: Around) -> None:
        super().__init__()
        hidden, width = context.config.hidden_size, spec.options
        assert isinstance(width, int)
        self.kernels = context.kernels
        precisions = spec.precision("qkv"), spec.precision("o")
        multiple = max(8, *map(column_multiple, precisions))
        size, begin, valid = part_of(hidden, context.group, multiple)
        cuts = tuple(Cut(0, third * size, third * hidden + begin, valid) for third in range(3))
        self.in_proj = ParallelLinear(
            context, "in", 3 * size, hidden, pieces=(Piece("in_proj", (3 * hidden, hidden), cuts),),
            precision=precisions[0], around=Around(around.before),
        )  # fmt: skip
        self.out_proj = RowParallelLinear(
            context, hidden, hidden, name="out", precision=precisions[1], multiple=multiple, around=around.last()
        )
        self.operations = (self.in_proj.product, self.out_proj.product)
        self.conv = parameter(size, 1, width, dtype=context.dtype, device=context.device)
        self.conv.zero_()
        self._of_conv = ((hidden, 1, width), (Cut(0, 0, begin, valid).shard(self.conv),))
        self.memory = (Slot((width - 1, size), context.dtype),)

    def bind(self, *memory: torch.Tensor) -> None:
        (self.last_inputs,) = memory

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        """The result of the wanted tokens, [N, hidden]."""
        assert call.step is not None
        y = self.kernels.causal_conv(
            self.in_proj(x, call), self.conv[:, 0], self.last_inputs, call.step.rows, gated=True
        )
        return self.out_proj.of_wanted(y, call)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.in_proj.checkpoint_weights(prefix)
        yield from self.out_proj.checkpoint_weights(f"{prefix}.out_proj")
        yield CheckpointWeight(f"{prefix}.conv.weight", *self._of_conv)
