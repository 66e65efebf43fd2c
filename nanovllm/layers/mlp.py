"""The dense MLP of one rank: gated (Shazeer, arXiv 2002.05202) or not."""

from collections.abc import Iterator

import torch

from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.plan.product import SUMMED_AFTER, Around
from nanovllm.layers.adapted import leave_delta
from nanovllm.layers.context import LayerContext, ModelContext
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.quantized import column_multiple, has_measured_inputs
from nanovllm.layers.step import Call
from nanovllm.layers.weights import CheckpointWeight, WeightedModule
from nanovllm.model_config import LayerSpec, Quantization


class MLP(WeightedModule):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))): [T, hidden] -> [T, hidden], a partial sum."""

    def __init__(
        self, context: LayerContext, hidden_size: int, intermediate_size: int, *, activation: str = "silu",
        gated: bool = True, bias: bool = False,
        precisions: tuple[Quantization | None, Quantization | None] = (None, None), around: Around = SUMMED_AFTER,
        path: str = "",
    ) -> None:  # fmt: skip
        """activation: one of kernels/pointwise/activation.py's ACTIVATIONS. precisions: of gate and up, and of down.
        path: before the names of its products."""
        super().__init__()
        self.kernels, self.activation, self.gated = context.kernels, activation, gated
        outputs = dict.fromkeys(("gate_proj", "up_proj") if gated else ("up_proj",), intermediate_size)
        multiple = max(map(column_multiple, precisions))  # also where only one of the two is quantised
        after = "gate" if gated and activation == "silu" else ""
        self.gate_up_proj = MergedColumnParallelLinear(
            context, hidden_size, outputs, bias=bias, adds_bias=False, precision=precisions[0], multiple=multiple,
            around=around.first(after, has_measured_inputs(precisions[1])), name=f"{path}gate_up",
        )  # fmt: skip
        self.down_proj = RowParallelLinear(
            context, intermediate_size, hidden_size, bias=bias, precision=precisions[1], multiple=multiple,
            around=around.last(), name=f"{path}down",
        )  # fmt: skip
        self.linears = self.gate_up_proj, self.down_proj
        self.operations = tuple(linear.product for linear in self.linears)

    def forward(self, x: torch.Tensor | FP8Rows, call: Call) -> torch.Tensor:
        """[T, hidden] -> a partial sum [T, hidden]; see ParallelLinear."""
        up = self.gate_up_proj
        launch = up.launch(x.shape[0], call)
        matrix, delta = leave_delta(up.matrix, x, launch, call)
        y = matrix.multiply(x, launch, call)
        if not launch.gate:
            y = self.kernels.activation(y, self.activation, self.gated, up.bias, launch.rounds, delta)
        return self.down_proj(y, call)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.gate_up_proj.checkpoint_weights(prefix)
        yield from self.down_proj.checkpoint_weights(f"{prefix}.down_proj")


def dense_mlp(context: ModelContext, spec: LayerSpec, around: Around) -> MLP:
    """The MLP of a layer, as its model's configuration has it."""
    config = context.config
    return MLP(
        context, config.hidden_size, spec.intermediate_size or config.intermediate_size, activation=config.activation,
        gated=config.gated_mlp, bias=config.mlp_bias, around=around,
        precisions=(spec.precision("gate_up"), spec.precision("down")),
    )  # fmt: skip
