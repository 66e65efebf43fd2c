"""Products by experts' weights of 4 and 8 bits, by tiles of the rows that chose one expert.

The kernel knows a format by the code of a number and the columns of a group. A tile of weights is on the left of the
product, widened in registers from words that already are a thread's part of that operand. Sums are those of 128
columns, in groups of 16 of 64, each begun anew, times a factor, added up in float32: a row's bits depend on such blocks
alone, not on the tile or on other rows.
"""

from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import triton
from nanovllm.kernels.gemm.packed import SPAN, PackedWeight
from nanovllm.kernels.moe.packed_kernel import packed_tile_kernel
from nanovllm.kernels.moe.routing import Routing
from nanovllm.kernels.plan.config import GemmConfig


def multiply(
    x: Tensor, weight: PackedWeight, routing: Routing, config: GemmConfig, bias: Tensor | None,
    delta: Tensor | None, out: Tensor, gated: bool, activation: tuple[float | None, float | None],
) -> Tensor:  # fmt: skip
    """Fills and returns `out`: if gated [T * top_k, I], of x [T, H], else [top_k, T, H], of that; see moe/experts.py.
    activation: alpha and limit. delta: see there."""
    if x.shape[1] != weight.k or not x.is_contiguous():
        raise ValueError(f"4-bit experts [{weight.n}, {weight.k}] do not fit x {list(x.shape)}, {x.stride()}")
    n_out = out.shape[-1]
    grid = (triton.cdiv(n_out, config.block_n), routing.tiles.shape[0])
    packed_tile_kernel[grid](
        x, weight.words, weight.scales, weight.factors, bias, delta, routing.tiles, routing.order, routing.weights, out,
        routing.num_tokens, n_out, weight.k, 1.0, TOP_K=routing.top_k, GATED=gated, ALPHA=activation[0],
        LIMIT=activation[1], CODE=weight.code, GROUP=weight.group, HAS_ZEROS=weight.has_zeros, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, STAGES=config.stages, EVEN_K=weight.k % SPAN == 0, PTX=x.is_cuda,
        PAIRED=gated and weight.n == 2 * n_out, num_warps=config.num_warps, **pdl_options(x.device),
    )  # fmt: skip
    return out
