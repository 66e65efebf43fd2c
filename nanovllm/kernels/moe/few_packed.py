"""down of packed experts for a handful of tokens, each choice by programs of its own, for a consumer that adds up the
results of a token's experts: there are several times as many programs as in moe/few_streamed.py, so all processors get
about as many, and those that come while gate and up run read all their weights before these end."""

from torch import Tensor

from nanovllm.kernels.base.device import start_early
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.packed import PackedWeight
from nanovllm.kernels.gemm.stream import add_products, load_steps, no_sums, operands_of, walk_constants
from nanovllm.kernels.gemm.stream_operands import Walk, finish
from nanovllm.kernels.gemm.unpack import SPAN, of_expert
from nanovllm.kernels.moe.choice import Choosing, Chosen, choice_constants, choose, load_scores
from nanovllm.kernels.moe.few_streamed import of_all_warps, of_rows
from nanovllm.kernels.plan.config import GemmConfig


@triton.jit
def _down_of_choice_kernel(
    H, W, PACKED, SCALE, BIAS, LOGITS, ROUTER_BIAS, CORRECTION, FACTORS, OUT, n_out,
    K: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr, LOGITS_SCALE: tl.constexpr, BLOCK_K: tl.constexpr, RENORMALISE: tl.constexpr,
    SCALING: tl.constexpr, STEPS: tl.constexpr, PRELOAD: tl.constexpr, EVEN_K: tl.constexpr, CODE: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of 16 columns, TOP_K, tokens). H [tokens, TOP_K, K]; OUT float32 [TOP_K, tokens, n_out]. Weights,
    SCALE and BIAS as in few_streamed.py."""
    how: tl.constexpr = Choosing(WIDTH, EXPERTS, BLOCK, TOP_K, WARPS, SIGMOID, LOGITS_SCALE)
    walk: tl.constexpr = Walk(CODE, GROUP, HAS_ZEROS, PTX, K, EVEN_K, WARPS)
    PARTS: tl.constexpr = (STEPS + 7) // 8
    first, slot, row = tl.program_id(0) * 16, tl.program_id(1), tl.program_id(2)
    # The router ended before the kernel before this one let it start, and weights are always there.
    scores, keys = load_scores(LOGITS, ROUTER_BIAS, CORRECTION, row, how)
    experts, weights = choose(scores, keys, CORRECTION, FACTORS, RENORMALISE, SCALING, how)
    numbers, shares = of_all_warps(experts, weights, BLOCK_K)
    expert, share = numbers[0], shares[0]
    for other in tl.static_range(1, TOP_K):
        expert = tl.where(slot == other, numbers[other], expert)
        share = tl.where(slot == other, shares[other], share)
    expert = expert.to(tl.int64)
    w_ptr, PACKED = of_expert(W, PACKED, expert, n_out, (K + SPAN - 1) // SPAN, CODE, GROUP)
    tiles = load_steps(w_ptr, PACKED, first, n_out, 0, PRELOAD, walk)
    accs, scales = of_rows(no_sums(walk), BIAS, SCALE, expert, first, n_out, PARTS, walk)
    start_early(PDL)
    accs = add_products(accs, tiles, scales, (), H + (row * TOP_K + slot) * K, None, 0, 0.0, None, w_ptr, PACKED,
                        first, n_out, STEPS, PRELOAD, PARTS, walk)  # fmt: skip
    col = first + tl.arange(0, 16)
    out = OUT + (slot * tl.num_programs(2) + row) * n_out + col
    tl.store(out, finish(accs[0], 1) * share, mask=col < n_out)


def down(h: Tensor, weight: PackedWeight, chosen: Chosen, config: GemmConfig, bias: Tensor | None = None) -> Tensor:
    """The results of its experts, times their scores, for each row of h [T, top_k, I], as gate_up makes it, by weight
    [E, H, I] and bias [E, H]: float32 [top_k, T, H], best first."""
    (rows, top_k, k), (experts, hidden, _), options = h.shape, weight.shape, chosen.options
    assert k == weight.k and h.is_contiguous(), (h.shape, h.stride(), weight.shape)
    operands, out = operands_of(weight), chosen.logits.new_empty(top_k, rows, hidden)
    _down_of_choice_kernel[(triton.cdiv(hidden, 16), top_k, rows)](
        h, *operands[:3], bias, chosen.logits, chosen.bias, chosen.correction, chosen.factors, out, hidden,
        BLOCK_K=triton.next_power_of_2(top_k), RENORMALISE=options.renormalise, SCALING=options.scale,
        EVEN_K=k % config.block_k == 0, **walk_constants(operands, config, k, k),
        **choice_constants(chosen, experts, h.device),
    )  # fmt: skip
    return out
