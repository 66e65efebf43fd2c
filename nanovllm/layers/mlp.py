"""The dense MLP of one rank: gated (Shazeer, arXiv 2002.05202) or not."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import torch

from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.pointwise.norm import Norm
from nanovllm.layers.context import LayerContext
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.quantized import column_multiple
from nanovllm.layers.weights import CheckpointWeight, WeightedModule
from nanovllm.model_config import Quantization


class MLP(WeightedModule):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))): [T, hidden] -> [T, hidden], a partial sum."""

    def __init__(
        self, context: LayerContext, hidden_size: int, intermediate_size: int, *, activation: str = "silu",
        gated: bool = True, bias: bool = False,
        precisions: tuple[Quantization | None, Quantization | None] = (None, None),
    ) -> None:  # fmt: skip
        """activation: one of kernels/pointwise/activation.py's KINDS. precisions: of gate and up, and of down."""
        super().__init__()
        self.kernels, self.activation, self.gated = context.kernels, activation, gated
        outputs = dict.fromkeys(("gate_proj", "up_proj") if gated else ("up_proj",), intermediate_size)
        multiple = max(map(column_multiple, precisions))  # also where only one of the two is quantised
        self.gate_up_proj = MergedColumnParallelLinear(
            context, hidden_size, outputs, bias=bias, precision=precisions[0], multiple=multiple
        )
        self.down_proj = RowParallelLinear(
            context, intermediate_size, hidden_size, bias=bias, precision=precisions[1], multiple=multiple
        )

    @property
    def can_fuse(self) -> bool:
        """Our GEMM kernels compute this activation themselves."""
        return self.gated and self.activation == "silu"

    @property
    def pdl_rows(self) -> AbstractSet[int]:
        """Numbers of rows that end in a kernel of our own; see ParallelLinear."""
        return self.down_proj.pdl_rows

    @property
    def takes_rounded(self) -> bool:
        """As ParallelLinear has it."""
        return self.gate_up_proj.takes_rounded

    def forward(self, x: torch.Tensor | FP8Rows) -> torch.Tensor:
        if self.can_fuse:
            rounds = self.down_proj.takes_rounded
            return self.down_proj(self.gate_up_proj.forward_silu_mul(x, self.kernels, rounds))
        up = self.gate_up_proj
        return self.down_proj(self.kernels.activation(up.matmul(x), self.activation, self.gated, up.bias))

    def add_normed_to(self, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """residual [T, hidden] += this block of its RMSNorm, in place; returns residual. For one rank alone, where it
        can_fuse."""
        activated = self.gate_up_proj.forward_normed_silu_mul(residual, norm, self.kernels)
        assert isinstance(activated, torch.Tensor)  # nobody asked for rounded ones
        return self.down_proj.add_to(residual, activated)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.gate_up_proj.checkpoint_weights(prefix)
        yield from self.down_proj.checkpoint_weights(f"{prefix}.down_proj")
