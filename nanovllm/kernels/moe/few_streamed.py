"""A mixture of experts in FP8, or in 4 or 8 bits, for a handful of tokens: as moe/few_rows.py, each choice reads its
expert's weights by itself, as gemm/stream.py does. A program of `down` takes the experts one after the other for one
long row. The router and packed experts may have biases.

In FP8 by the products of fp8/reference.py: both kernels round what they take, the first once it is normalised. That
every program of `down` rounds all of h takes less time than a kernel more, if that is not too much.
"""

from typing import Any

from torch import Tensor

from nanovllm.kernels.base.activations import gate_mul, relu_squared
from nanovllm.kernels.base.device import start_early
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.operands import FP8Weight
from nanovllm.kernels.fp8.quantize import quantize_rows
from nanovllm.kernels.fp8.reference import GROUP
from nanovllm.kernels.gemm.packed import PackedWeight
from nanovllm.kernels.gemm.packed_operands import load_blocks
from nanovllm.kernels.gemm.stream import (
    Operands,
    add_products,
    add_step,
    load_steps,
    no_sums,
    operands_of,
    walk_constants,
)
from nanovllm.kernels.gemm.stream_operands import (
    Walk,
    block_scales,
    columns_of,
    finish,
    is_packed,
    load_gains,
    load_weights,
    part_of_x,
    right,
    steps_of,
)
from nanovllm.kernels.gemm.unpack import SPAN, of_expert
from nanovllm.kernels.moe.choice import (
    Choosing,
    Chosen,
    best_of,
    choice_constants,
    choose,
    load_scores,
    load_shared,
)
from nanovllm.kernels.moe.experts import ExpertActivation
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.plan.fits import rounds_inside
from nanovllm.kernels.pointwise.norm import Norm


@triton.jit
def _biased(acc, BIAS, at, live, factor):
    """acc [W, 16, 8] plus BIAS at [W, 16, 1], where `live`, times a factor, in one place of each weight row."""
    if BIAS is not None:
        warp, column = tl.arange(0, acc.shape[0])[:, None, None], tl.arange(0, 8)[None, None, :]
        bias = tl.load(BIAS + at, mask=live & (warp == 0), other=0.0).to(tl.float32) * factor
        acc += tl.where(column == 0, bias, 0.0)
    return acc


@triton.jit
def _of_rows(accs, BIAS, SCALE, expert, first, n_out, PARTS: tl.constexpr, walk):
    """accs [WARPS, 16, 8] with the biases of a packed expert's rows, and its factors, 1 where there are none, as
    add_products takes scales."""
    col, biased, factors, scales = (first + tl.arange(0, 16))[None, :, None], (), (), ()
    for half in tl.static_range(walk.halves):
        at = expert * (walk.halves * n_out) + half * n_out + tl.minimum(col, n_out - 1)
        biased = biased + (_biased(accs[half], BIAS, at, col < n_out, 1.0),)
        if SCALE is not None:
            factors = factors + (tl.load(SCALE + at),)
    for _ in tl.static_range(PARTS):
        scales = scales + factors
    return biased, scales


@triton.jit
def _gate_up_kernel(
    X, GAIN, W, PACKED, SCALE, BIAS, LOGITS, ROUTER_BIAS, CORRECTION, OUT, n_out, groups, scale_rows, eps,
    K: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr, LOGITS_SCALE: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    STEPS: tl.constexpr, PRELOAD: tl.constexpr, ROWS_EACH: tl.constexpr,
    EVEN_K: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of 16 columns, TOP_K, tokens). X [tokens, K], before its norm where there is a GAIN; OUT [tokens,
    TOP_K, n_out], best first. Weights as stream_kernel has them, of each expert; SCALE: of e4m3 [EXPERTS, scale_rows,
    groups], else of rows, [EXPERTS, 2 n_out], as BIAS is, or not GATED n_out."""
    HALVES: tl.constexpr = 2 if GATED else 1
    how: tl.constexpr = Choosing(WIDTH, EXPERTS, BLOCK, TOP_K, WARPS, SIGMOID, LOGITS_SCALE)
    walk: tl.constexpr = Walk(CODE, GROUP, HAS_ZEROS, PTX, K, EVEN_K, WARPS, 1, HALVES)
    PARTS: tl.constexpr = (STEPS + 7) // 8
    first, slot, row = tl.program_id(0) * 16, tl.program_id(1), tl.program_id(2)
    gains = load_gains(GAIN, PARTS, walk)
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Not before: what the router wrote may be read by a later kernel as soon as that starts.
        tl.extra.cuda.gdc_launch_dependents()
    _, keys = load_scores(LOGITS, ROUTER_BIAS, CORRECTION, row, how)
    expert = best_of(keys, slot)
    if is_packed(CODE):
        # One number for all warps: pointers from it take any layout, those from a tensor are moved to another.
        expert = tl.max(tl.max(expert, axis=1), axis=0).to(tl.int64)
        w_ptr, PACKED = of_expert(W, PACKED, expert, HALVES * n_out, (K + SPAN - 1) // SPAN, CODE, GROUP)
    else:
        expert = tl.reshape(expert, [1, WARPS, 1]).to(tl.int64)
        w_ptr = W + expert * (HALVES * n_out * K)
    tiles, accs = load_steps(w_ptr, PACKED, first, n_out, 0, PRELOAD, walk), no_sums(walk)
    if is_packed(CODE):
        accs, scales = _of_rows(accs, BIAS, SCALE, expert, first, n_out, PARTS, walk)
    else:
        of_expert_ptr = SCALE + tl.permute(expert, [1, 0, 2]) * (scale_rows * groups)
        scales = block_scales(of_expert_ptr, first, n_out, groups, ROWS_EACH, PARTS, walk)
    accs = add_products(accs, tiles, scales, gains, X + row * K, None, 0, eps, None, w_ptr, PACKED, first, n_out, STEPS,
                        PRELOAD, PARTS, walk)
    dtype: tl.constexpr = OUT.dtype.element_ty
    if GATED:
        y = gate_mul(finish(accs[0], 1), finish(accs[1], 1), dtype, ALPHA, LIMIT)
    else:
        y = relu_squared(finish(accs[0], 1), dtype)
    col = first + tl.arange(0, 16)
    tl.store(OUT + (row * TOP_K + slot) * n_out + col, y.to(dtype), mask=col < n_out)


@triton.jit
def _of_all_warps(experts, weights, BLOCK_K: tl.constexpr):
    """Numbers and weights of all choices, [WARPS, 1] each, as one number each, by one exchange between warps."""
    lane = tl.arange(0, BLOCK_K)
    found = tl.zeros([experts[0].shape[0], BLOCK_K], tl.int32)
    shares = tl.zeros(found.shape, tl.float32)
    for slot in tl.static_range(len(experts)):
        found = tl.where(lane[None, :] == slot, experts[slot], found)
        shares = tl.where(lane[None, :] == slot, weights[slot], shares)
    found, shares, numbers, factors = tl.max(found, axis=0), tl.max(shares, axis=0), (), ()
    for slot in tl.static_range(len(experts)):
        numbers = numbers + (tl.max(tl.where(lane == slot, found, 0), axis=0),)
        factors = factors + (tl.sum(tl.where(lane == slot, shares, 0.0), axis=0),)
    return numbers, factors


@triton.jit
def _of_groups(values, group, past, GROUPS: tl.constexpr):
    """The value of each group of columns: those of the first of `values`, one for GROUPS, come first. Past the last
    ones `past`."""
    found = tl.zeros(group.shape, past.dtype) + past
    for slot in tl.static_range(len(values)):
        found = tl.where(group // GROUPS == slot, values[slot], found)
    return found


@triton.jit
def _step_of_e4m3(W, SCALE, numbers, weights, first, n_out, groups, scale_rows, step, ROWS_EACH: tl.constexpr,
                  GROUPS: tl.constexpr, walk):  # fmt: skip
    """Pointers [1, W, 1] to a step's weights, of a row that has GROUPS groups of each expert, and past its end those of
    expert 0; and their factors [W, 1, 1], the experts' weights times the scales of blocks, and past the end 0."""
    group = step * walk.warps + tl.arange(0, walk.warps)[:, None]
    expert = _of_groups(numbers, group, tl.zeros([1, 1], tl.int32), GROUPS).to(tl.int64)
    weight = _of_groups(weights, group, tl.zeros([1, 1], tl.float32), GROUPS)
    at = SCALE + expert * (scale_rows * groups) + first // ROWS_EACH * groups + group % GROUPS
    factor = weight * tl.load(at, mask=group // GROUPS < len(numbers), other=0.0)
    base = (W + expert * (n_out * walk.k) + group % GROUPS * 128)[:, :, None]
    return tl.permute(base, [1, 0, 2]), factor[:, :, None]


@triton.jit
def _packed_factor(SCALE, numbers, weights, first, n_out, step, GROUPS: tl.constexpr, walk):
    """Weights of a step's experts, times the factors of rows where there are such: [W, 16 or 1, 1]."""
    block = (step * walk.warps + tl.arange(0, walk.warps))[:, None, None]
    factor = _of_groups(weights, block, weights[0] * 0.0, GROUPS)
    if SCALE is not None:
        col = (first + tl.arange(0, 16))[None, :, None]
        at = _of_groups(numbers, block, numbers[0], GROUPS).to(tl.int64) * n_out
        factor *= tl.load(SCALE + at + tl.minimum(col, n_out - 1))
    return factor


@triton.jit
def _load_step(W, PACKED, numbers, steps, first, n_out, step, GROUPS: tl.constexpr, walk):
    """Loads a step of weights: of packed ones of a row that has GROUPS blocks of each expert, past its end those of the
    first; of e4m3 where `steps` says."""
    warp = tl.arange(0, walk.warps)[None, :, None]
    if is_packed(walk.code):
        block = step * walk.warps + warp
        expert = _of_groups(numbers, block, numbers[0], GROUPS).to(tl.int64)
        words, scales = of_expert(W, PACKED, expert, n_out, GROUPS, walk.code, walk.group)
        return load_blocks(words, scales, first, n_out, block % GROUPS, walk)
    else:
        cols = tl.arange(0, 64)[None, None, :] + warp * 0
        return (load_weights(steps[step][0], first, n_out, cols, walk),)


@triton.jit
def _load_h(H, H_SCALE, part, scale_stride, TOP_K: tl.constexpr, GROUPS: tl.constexpr, walk):
    """Part of a row of h [TOP_K, K], as add_step takes it, for weights in e4m3 rounded, here unless it has scales: its
    rows, of GROUPS groups each, are one after the other."""
    if is_packed(walk.code):
        warp = tl.arange(0, walk.warps)[None, :, None]
        block, found = steps_of(part * 8, walk)[:, None, None] * walk.warps + warp, ()
        for piece in tl.static_range(4):
            at = block % GROUPS * SPAN + columns_of(piece, walk)
            live = (block < TOP_K * GROUPS) & (at < walk.k)
            found = found + (tl.load(H + block // GROUPS * walk.k + at, mask=live, other=0.0),)
        return right(found)
    else:
        long: tl.constexpr = Walk(walk.code, 0, False, walk.ptx, TOP_K * walk.k, True, walk.warps, 1, 1)
        return part_of_x(H, H_SCALE, (), 1.0, part, scale_stride, long, None)


@triton.jit(do_not_specialize=["scale_stride"])
def _down_kernel(
    H, H_SCALE, W, PACKED, SCALE, BIAS, LOGITS, ROUTER_BIAS, CORRECTION, FACTORS, SHARED, OUT, scale_stride, n_out,
    groups, scale_rows,
    K: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr, LOGITS_SCALE: tl.constexpr, BLOCK_K: tl.constexpr, RENORMALISE: tl.constexpr,
    SCALING: tl.constexpr, ADDS: tl.constexpr, SHARED_GATE: tl.constexpr, STEPS: tl.constexpr, PRELOAD: tl.constexpr,
    ROWS_EACH: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of 16 columns, tokens). H [tokens, TOP_K, K], by weights in e4m3 K of whole groups, itself in e4m3
    where it has an H_SCALE [groups of all, scale_stride]; OUT [tokens, n_out], with ADDS added to; SHARED, or None: see
    load_shared. Weights, SCALE and BIAS as those of _gate_up_kernel."""
    how: tl.constexpr = Choosing(WIDTH, EXPERTS, BLOCK, TOP_K, WARPS, SIGMOID, LOGITS_SCALE)
    walk: tl.constexpr = Walk(CODE, GROUP, HAS_ZEROS, PTX, K, True, WARPS)  # of e4m3 groups are whole
    GROUPS: tl.constexpr = (K + 127) // 128
    first, row = tl.program_id(0) * 16, tl.program_id(1)
    col = first + tl.arange(0, 16)
    # The router ended before the kernel before this one let it start, and weights are always there.
    scores, keys = load_scores(LOGITS, ROUTER_BIAS, CORRECTION, row, how)
    numbers, weights = choose(scores, keys, CORRECTION, FACTORS, RENORMALISE, SCALING, how)
    tiles, steps = (), ()
    if is_packed(CODE):
        numbers, weights = _of_all_warps(numbers, weights, BLOCK_K)
    else:
        for step in tl.static_range(STEPS):
            steps = steps + (_step_of_e4m3(W, SCALE, numbers, weights, first, n_out, groups, scale_rows, step,
                                           ROWS_EACH, GROUPS, walk),)  # fmt: skip
    for step in tl.static_range(PRELOAD):
        tiles = tiles + _load_step(W, PACKED, numbers, steps, first, n_out, step, GROUPS, walk)
    acc = tl.zeros([WARPS, 16, 8], tl.float32)
    if BIAS is not None:
        for slot in tl.static_range(TOP_K):
            at = numbers[slot].to(tl.int64) * n_out + col[None, :, None]
            acc = _biased(acc, BIAS, at, (col < n_out)[None, :, None], weights[slot])
    start_early(PDL)
    out = OUT + row * n_out + col
    if ADDS:
        residual = tl.load(out, mask=col < n_out, other=0.0)
    if SHARED is not None:
        shared = load_shared(SHARED, col, col < n_out, LOGITS, row, n_out, SHARED_GATE, how)
    h_scale = None if H_SCALE is None else H_SCALE + row
    loaded = ()
    for part in tl.static_range((STEPS + 7) // 8):
        loaded = loaded + (_load_h(H + row * (TOP_K * K), h_scale, part, scale_stride, TOP_K, GROUPS, walk),)
    for step in tl.static_range(STEPS):
        x = loaded[step // 8]  # type: ignore[var-annotated]
        if is_packed(CODE):
            factor = _packed_factor(SCALE, numbers, weights, first, n_out, step, GROUPS, walk)
        else:
            factor = x[2] * steps[step][1]
        acc = add_step((acc,), tiles, x, (factor,), step, H.dtype.element_ty, walk)[0]
        tiles = tiles[1:]
        if step + PRELOAD < STEPS:
            tiles = tiles + _load_step(W, PACKED, numbers, steps, first, n_out, step + PRELOAD, GROUPS, walk)
    y = finish(acc, 1)
    if SHARED is not None:
        y += shared
    if ADDS:
        y += residual.to(tl.float32)
    tl.store(out, y.to(OUT.dtype.element_ty), mask=col < n_out)


def gate_up(
    x: Tensor, weight: FP8Weight | PackedWeight, chosen: Chosen, config: GemmConfig, activation: ExpertActivation,
    norm: Norm | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The activation of the experts that each row of x [T, H] chose, best first: [T, top_k, I], by weight [E, 2 I, H],
    gates first, or without gates [E, I, H], and of packed weights bias [E, as many]. norm: of kind "rms", of x, before
    it."""
    rows, top_k, operands = x.shape[0], chosen.options.top_k, operands_of(weight)
    width = weight.shape[1] // (1 + activation.gated)
    constants = _constants(operands, weight.shape, config, chosen, 1, x)
    out = x.new_empty(rows, top_k, width)
    _gate_up_kernel[(triton.cdiv(width, 16), top_k, rows)](
        x, norm and norm.weight, *operands[:3], bias, chosen.logits, chosen.bias, chosen.correction, out, width,
        operands.groups, operands.scale_rows, norm.eps if norm else 0.0, GATED=activation.gated, ALPHA=activation.alpha,
        LIMIT=activation.limit, EVEN_K=x.shape[1] % config.block_k == 0, **constants,
    )  # fmt: skip
    return out


def down(
    h: Tensor, weight: FP8Weight | PackedWeight, chosen: Chosen, config: GemmConfig, residual: Tensor | None = None,
    shared: Tensor | None = None, shared_gate: bool = False, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sum over its experts, times their scores, for each row of h [T, top_k, I], as gate_up makes it, by weight
    [E, H, I], and of packed weights bias [E, H]: [T, H]. residual, shared and shared_gate: see few_rows.down."""
    rows, hidden, options, operands = h.shape[0], weight.shape[1], chosen.options, operands_of(weight)
    constants = _constants(operands, weight.shape, config, chosen, options.top_k, h)
    out = h.new_empty(rows, hidden) if residual is None else residual
    h_scale = stride = None
    if isinstance(weight, FP8Weight) and not rounds_inside(1, h[0].numel(), False):
        h, h_scale, _ = quantize_rows(h.flatten(1))
        stride = h_scale.stride(1)
    _down_kernel[(triton.cdiv(hidden, 16), rows)](
        h, h_scale, *operands[:3], bias, chosen.logits, chosen.bias, chosen.correction, chosen.factors, shared, out,
        stride, hidden, operands.groups, operands.scale_rows, BLOCK_K=triton.next_power_of_2(options.top_k),
        RENORMALISE=options.renormalise, SCALING=options.scale, ADDS=residual is not None, SHARED_GATE=shared_gate,
        **constants,
    )  # fmt: skip
    return out


def _constants(
    operands: Operands, shape: tuple[int, ...], config: GemmConfig, chosen: Chosen, num_experts: int, x: Tensor
) -> dict[str, Any]:
    """shape: of the weight. num_experts: that one program multiplies by."""
    experts, _, k = shape
    assert x.shape[-1] == k and x.is_contiguous(), (x.shape, x.stride(), shape)
    of_walk = walk_constants(operands, config, k, triton.cdiv(k, GROUP) * GROUP * num_experts)
    return {**of_walk, "ROWS_EACH": operands.rows_each, **choice_constants(chosen, experts, x.device)}


def takes(gate_up: FP8Weight, down: FP8Weight) -> bool:
    """Whether these kernels multiply by them."""
    shared = gate_up.rows_each % 16 == 0 and down.rows_each % 16 == 0
    measured = gate_up.input_scale is None and down.input_scale is None
    return gate_up.in_blocks and down.in_blocks and shared and measured and down.values.shape[2] % GROUP == 0
