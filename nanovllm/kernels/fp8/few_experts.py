"""A mixture of experts in FP8 for a handful of tokens: as moe/few_rows.py, by the products of reference.py.

Two kernels after the router's GEMM: the first normalises and rounds what it takes, before the second is one that
rounds. A program multiplies by the weights of one token's experts as gemm/stream.py does; that of `down` takes the
experts one after the other for one long row.
"""

import torch

from nanovllm.kernels.base.activations import silu_mul
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.operands import FP8Weight
from nanovllm.kernels.fp8.quantize import quantize_rows
from nanovllm.kernels.fp8.reference import GROUP
from nanovllm.kernels.gemm.stream_operands import (
    add_halves,
    add_step,
    finish,
    groups_of_steps,
    load_parts,
    load_pieces,
    load_step,
    load_weights,
    load_x,
)
from nanovllm.kernels.moe.few_rows import choice_constants, choose, load_scores, take_best
from nanovllm.kernels.moe.routing import TopK
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.pointwise.norm import Norm


@triton.jit
def _gate_up_kernel(
    X, GAIN, W, SCALE, LOGITS, OUT, n_out, groups, scale_rows, eps,
    K: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    STEPS: tl.constexpr, PRELOAD: tl.constexpr, ROWS_EACH: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of 16 columns, TOP_K, tokens). X [tokens, K], before its norm; OUT [tokens, TOP_K, n_out], best
    first."""
    SPAN: tl.constexpr = WARPS * 128
    PARTS: tl.constexpr = (STEPS + 7) // 8
    first, slot, row = tl.program_id(0) * 16, tl.program_id(1), tl.program_id(2)
    gains = ()
    for part in tl.static_range(PARTS):
        gains = gains + (load_pieces(GAIN, part * 8, K, WARPS),)
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Not before: what the router wrote may be read by a later kernel as soon as that starts.
        tl.extra.cuda.gdc_launch_dependents()
    expert, _, keys = take_best(load_scores(LOGITS, row, WIDTH, EXPERTS, BLOCK, WARPS))
    for _ in range(slot):
        expert, _, keys = take_best(keys)
    expert = tl.reshape(expert, [1, WARPS, 1]).to(tl.int64)
    weight, scale = W + expert * (2 * n_out * K), SCALE + tl.permute(expert, [1, 0, 2]) * (scale_rows * groups)
    warp = tl.arange(0, WARPS)
    cols = warp[None, :, None] * 128 + tl.arange(0, 64)[None, None, :]
    tiles = ()
    for step in tl.static_range(PRELOAD):
        tiles = tiles + load_step(weight, first, n_out, cols + step * SPAN, K, EVEN_K, 2)
    accs, both = (tl.zeros([WARPS, 16, 8], tl.float32), tl.zeros([WARPS, 16, 8], tl.float32)), ()
    loaded = load_parts(X + row * K, None, gains, 0, eps, K, PARTS, WARPS)
    for part in tl.static_range(PARTS):
        group, of_halves = groups_of_steps(part * 8, WARPS), ()
        for half in tl.static_range(2):
            at = scale + (half * n_out + first) // ROWS_EACH * groups + group
            of_halves = of_halves + (loaded[part][2] * tl.load(at, mask=group < groups, other=0.0),)
        both = both + (of_halves,)
    for step in tl.static_range(STEPS):
        accs = add_halves(accs, tiles, loaded[step // 8], both[step // 8], step, 1)
        tiles = tiles[2:]
        if step + PRELOAD < STEPS:
            tiles = tiles + load_step(weight, first, n_out, cols + (step + PRELOAD) * SPAN, K, EVEN_K, 2)
    y = silu_mul(finish(accs[0]), finish(accs[1]), OUT.dtype.element_ty)
    col = first + tl.arange(0, 16)
    tl.store(OUT + (row * TOP_K + slot) * n_out + col, y.to(OUT.dtype.element_ty), mask=col < n_out)


@triton.jit(do_not_specialize=["scale_stride"])
def _down_kernel(
    h_ptr, H_SCALE, W, SCALE, LOGITS, RESIDUAL, scale_stride, n_out, groups, scale_rows,
    K: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr, SCALING: tl.constexpr, STEPS: tl.constexpr, PRELOAD: tl.constexpr,
    ROWS_EACH: tl.constexpr, PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of 16 columns, tokens). h e4m3 [tokens, TOP_K * K], K of whole groups; RESIDUAL [tokens, n_out] is
    added to."""
    first, row = tl.program_id(0) * 16, tl.program_id(1)
    warp = tl.arange(0, WARPS)
    # The router ended before the kernel before this one let it start, and weights are always there.
    keys = load_scores(LOGITS, row, WIDTH, EXPERTS, BLOCK, WARPS)
    experts, weights = choose(keys, TOP_K, RENORMALISE, SCALING)
    bases, factors, tiles = (), (), ()
    for step in tl.static_range(STEPS):
        group = step * WARPS + warp[:, None]
        slot = group // (K // 128)
        expert, weight = tl.zeros([WARPS, 1], tl.int32), tl.zeros([WARPS, 1], tl.float32)
        for each in tl.static_range(TOP_K):
            expert = tl.where(slot == each, experts[each], expert)
            weight = tl.where(slot == each, weights[each], weight)
        expert, inside = expert.to(tl.int64), group % (K // 128)
        at = SCALE + expert * (scale_rows * groups) + first // ROWS_EACH * groups + inside
        factors = factors + ((weight * tl.load(at, mask=slot < TOP_K, other=0.0))[:, :, None],)
        bases = bases + (tl.permute((W + expert * (n_out * K) + inside * 128)[:, :, None], [1, 0, 2]),)
    cols = tl.arange(0, 64)[None, None, :] + warp[None, :, None] * 0
    for step in tl.static_range(PRELOAD):
        tiles = tiles + (load_weights(bases[step], first, n_out, cols, K, True),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    col = first + tl.arange(0, 16)
    residual = tl.load(RESIDUAL + row * n_out + col, mask=col < n_out, other=0.0)
    loaded = ()
    for part in tl.static_range((STEPS + 7) // 8):
        x = load_x(h_ptr + row * (TOP_K * K), H_SCALE + row, part * 8, scale_stride, TOP_K * K, WARPS)
        loaded = loaded + (x,)
    acc = tl.zeros([WARPS, 16, 8], dtype=tl.float32)
    for step in tl.static_range(STEPS):
        x = loaded[step // 8]  # type: ignore[var-annotated]
        acc = add_step(acc, tiles[0], x, x[2] * factors[step], step)
        tiles = tiles[1:]
        if step + PRELOAD < STEPS:
            tiles = tiles + (load_weights(bases[step + PRELOAD], first, n_out, cols, K, True),)
    y = residual.to(tl.float32) + finish(acc)
    tl.store(RESIDUAL + row * n_out + col, y.to(RESIDUAL.dtype.element_ty), mask=col < n_out)


def gate_up(
    x: torch.Tensor, weight: FP8Weight, logits: torch.Tensor, options: TopK, config: GemmConfig, norm: Norm
) -> torch.Tensor:
    """moe/few_rows.py's, of x [T, H] and weight [E, 2 I, H] in e4m3 with scales of blocks: [T, top_k * I]."""
    (rows, hidden), experts, width = x.shape, weight.values.shape[0], weight.values.shape[1] // 2
    out, steps = x.new_empty(rows, options.top_k * width), triton.cdiv(hidden, config.block_k)
    _gate_up_kernel[(triton.cdiv(width, 16), options.top_k, rows)](
        x, norm.weight, weight.values, weight.scale, logits, out, width, weight.scale.shape[2], weight.scale.shape[1],
        norm.eps, K=hidden, STEPS=steps, PRELOAD=min(config.stages, steps), ROWS_EACH=weight.rows_each,
        EVEN_K=hidden % config.block_k == 0, WARPS=config.num_warps, num_warps=config.num_warps,
        **choice_constants(logits, experts, options, x.device),
    )  # fmt: skip
    return out


def down(
    h: torch.Tensor, weight: FP8Weight, logits: torch.Tensor, options: TopK, config: GemmConfig, residual: torch.Tensor
) -> torch.Tensor:
    """moe/few_rows.py's, of h [T, top_k * I], I of whole groups, and weight [E, H, I]."""
    (experts, hidden, width), (values, scales, _) = weight.values.shape, quantize_rows(h)
    steps = triton.cdiv(h.shape[1], config.block_k)
    _down_kernel[(triton.cdiv(hidden, 16), h.shape[0])](
        values, scales, weight.values, weight.scale, logits, residual, scales.stride(1), hidden, weight.scale.shape[2],
        weight.scale.shape[1], K=width, RENORMALISE=options.renormalise, SCALING=options.scale, STEPS=steps,
        PRELOAD=min(config.stages, steps), ROWS_EACH=weight.rows_each, WARPS=config.num_warps,
        num_warps=config.num_warps, **choice_constants(logits, experts, options, h.device),
    )  # fmt: skip
    return residual


def takes(gate_up: FP8Weight, down: FP8Weight) -> bool:
    """Whether these kernels multiply by them."""
    shared = gate_up.rows_each % 16 == 0 and down.rows_each % 16 == 0
    measured = gate_up.input_scale is None and down.input_scale is None
    return gate_up.in_blocks and down.in_blocks and shared and measured and down.values.shape[2] % GROUP == 0
