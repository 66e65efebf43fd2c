"""The dense MLP of one rank: gated (Shazeer, arXiv 2002.05202) or not."""

from collections.abc import Iterator

import torch

from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.pointwise.norm import Norm
from nanovllm.layers.context import LayerContext
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.quantized import column_multiple, takes_fp8
from nanovllm.layers.weights import CheckpointWeight, WeightedModule
from nanovllm.model_config import Quantization


class MLP(WeightedModule):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))): [T, hidden] -> [T, hidden], a partial sum."""

    def __init__(
        self, context: LayerContext, hidden_size: int, intermediate_size: int, *, activation: str = "silu",
        gated: bool = True, bias: bool = False,
        precisions: tuple[Quantization | None, Quantization | None] = (None, None), fuses: bool = False,
        adds_parts: bool = True,
    ) -> None:  # fmt: skip
        """activation: one of kernels/pointwise/activation.py's KINDS. precisions: of gate and up, and of down. fuses:
        nothing but an RMSNorm stands before the MLP and nothing but the addition to the residual stream behind it, so
        its kernels may compute both. adds_parts: see Product."""
        super().__init__()
        self.kernels, self.activation, self.gated = context.kernels, activation, gated
        outputs = dict.fromkeys(("gate_proj", "up_proj") if gated else ("up_proj",), intermediate_size)
        multiple = max(map(column_multiple, precisions))  # also where only one of the two is quantised
        self.is_swiglu = gated and activation == "silu"
        rounds = self.is_swiglu and takes_fp8(precisions[1], context.planner.rules.device)
        self.gate_up_proj = MergedColumnParallelLinear(
            context, hidden_size, outputs, bias=bias, precision=precisions[0], multiple=multiple,
            before="norm" if fuses else "", after="gate" if self.is_swiglu else "", rounds=rounds,
        )  # fmt: skip
        self.down_proj = RowParallelLinear(
            context, intermediate_size, hidden_size, bias=bias, precision=precisions[1], multiple=multiple,
            after="residual" if fuses else "", adds_parts=adds_parts,
        )  # fmt: skip
        self.operations = (self.gate_up_proj.product, self.down_proj.product)

    def forward(
        self, x: torch.Tensor | FP8Rows, *, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, hidden] -> a partial sum [T, hidden]. norm, residual: see ParallelLinear."""
        up = self.gate_up_proj
        if self.is_swiglu:
            return self.down_proj(up.silu_mul(x, self.kernels, norm=norm), residual=residual)
        y = up.matrix.multiply(x, up.launches[x.shape[0]].config)
        return self.down_proj(self.kernels.activation(y, self.activation, self.gated, up.bias))

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.gate_up_proj.checkpoint_weights(prefix)
        yield from self.down_proj.checkpoint_weights(f"{prefix}.down_proj")
