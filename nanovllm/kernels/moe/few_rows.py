"""A mixture of experts for a handful of tokens: two kernels after the router's GEMM, on one rank with norm and residual
inside.

With so few choices nearly every one is of another expert, so each reads its expert's weights by itself, as the product
of one row does (kernels/gemm/fma.py), and nothing is sorted. A token's sums have an order of their own, so they do not
depend on its neighbours.
"""

import torch

from nanovllm.kernels.base.activations import gelu_mul, relu_squared, silu
from nanovllm.kernels.base.device import start_early
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.epilogue import store_tile, weight_rows
from nanovllm.kernels.gemm.fma import (
    LaneWalk,
    lane_sums,
    load_steps,
    load_vector,
    products,
    row_scale,
    walk_constants,
)
from nanovllm.kernels.moe.choice import (
    Choosing,
    Chosen,
    best_of,
    choice_constants,
    choose,
    load_scores,
    load_shared,
    shared_weight,
)
from nanovllm.kernels.moe.experts import ExpertActivation
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.pointwise.norm import Norm


@triton.jit
def _gate_up_kernel(
    X, GAIN, W, BESIDE, LOGITS, BIAS, CORRECTION, OUT, n_out, eps,
    K: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr, LOGITS_SCALE: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr, PRELOAD: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (column tiles, TOP_K + PARTS, tokens). X [tokens, K], before its norm where there is a GAIN; OUT [tokens,
    TOP_K + PARTS, n_out], best first: silu(gate) * up, with GELU that in place of SiLU, not GATED relu(up) ** 2. The
    last PARTS are those of a shared expert, whose weight BESIDE has PARTS * n_out rows of each sort."""
    how: tl.constexpr = Choosing(WIDTH, EXPERTS, BLOCK, TOP_K, WARPS, SIGMOID, LOGITS_SCALE)
    walk: tl.constexpr = LaneWalk(K, CHUNKS, STEPS, WARPS, EVEN_K, EVEN_N)
    PER_WARP: tl.constexpr = BLOCK_N // WARPS
    pid, slot, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    warp = tl.arange(0, WARPS)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Not before: what the router wrote may be read by the next kernel as soon as that starts.
        tl.extra.cuda.gdc_launch_dependents()
    _, keys = load_scores(LOGITS, BIAS, CORRECTION, row, how)
    expert = best_of(keys, slot % TOP_K if PARTS > 0 else slot)  # a part of a shared expert needs none
    w_rows, w_live = weight_rows(warp * PER_WARP + tl.arange(0, PER_WARP)[None, :], pid, n_out, BLOCK_N, GATED)
    ptrs = W + (expert * ((2 if GATED else 1) * n_out) + w_rows).to(tl.int64) * K
    if PARTS > 0:
        before = tl.where(w_rows >= n_out, (slot - TOP_K + PARTS - 1) * n_out, (slot - TOP_K) * n_out)
        ptrs = tl.where(slot < TOP_K, ptrs, BESIDE + (before + w_rows).to(tl.int64) * K)
    row_ptrs = (ptrs[:, :, None, None],)
    row_live = w_live[:, :, None, None]
    tiles = load_steps(row_ptrs, row_live, 0, PRELOAD, walk)
    x_ptr, gain, scales = X + row * K, 0.0, ()
    if GAIN is not None:
        scales = (row_scale(x_ptr, True, eps, walk),)
        gain = load_vector(GAIN, True, 0, walk)
    accs = products(tiles, row_ptrs, row_live, x_ptr, 1, GAIN, gain, scales, 1, PRELOAD, False, walk)
    y = tl.sum(accs[0], axis=2)
    OUT_WIDTH: tl.constexpr = PER_WARP // 2 if GATED else PER_WARP
    if GATED:
        gate, up = tl.split(tl.reshape(y, [WARPS, OUT_WIDTH, 2]))
        y = gelu_mul(gate, up, OUT.dtype.element_ty) if GELU else silu(gate) * up
    else:
        y = relu_squared(y, OUT.dtype.element_ty)
    out_lane, out = warp * OUT_WIDTH + tl.arange(0, OUT_WIDTH)[None, :], OUT + (row * (TOP_K + PARTS) + slot) * n_out
    store_tile(y, 0.0, out_lane, 0, out, 1, pid, n_out, WARPS * OUT_WIDTH, False)


@triton.jit
def _down_kernel(
    H, W, BESIDE, LOGITS, BIAS, CORRECTION, FACTORS, SHARED, OUT, n_out,
    K: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr, LOGITS_SCALE: tl.constexpr, PARTS: tl.constexpr, RENORMALISE: tl.constexpr,
    SCALE: tl.constexpr, ADDS: tl.constexpr, SHARED_GATE: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
    STEPS: tl.constexpr, PRELOAD: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PDL: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (column tiles, tokens). H [tokens, TOP_K + PARTS, K], the last of a shared expert by BESIDE [n_out, PARTS *
    K]; OUT [tokens, n_out], with ADDS added to; SHARED, or None: what such an expert computed, see load_shared. The
    experts' steps along K follow one another, and weights are fetched PRELOAD of them ahead."""
    how: tl.constexpr = Choosing(WIDTH, EXPERTS, BLOCK, TOP_K, WARPS, SIGMOID, LOGITS_SCALE)
    walk: tl.constexpr = LaneWalk(K, CHUNKS, STEPS, WARPS, EVEN_K, EVEN_N)
    PER_WARP: tl.constexpr = BLOCK_N // WARPS
    pid, row = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, WARPS)[:, None] * PER_WARP + tl.arange(0, PER_WARP)[None, :]
    w_rows, w_live = weight_rows(lane, pid, n_out, BLOCK_N, False)
    row_live = w_live[:, :, None, None]
    # The router ended before the kernel before this one let it start, and weights are always there.
    scores, keys = load_scores(LOGITS, BIAS, CORRECTION, row, how)
    experts, weights = choose(scores, keys, CORRECTION, FACTORS, RENORMALISE, SCALE, how)
    row_ptrs = ()
    for slot in tl.static_range(TOP_K):
        row_ptrs = row_ptrs + ((W + (experts[slot] * n_out + w_rows).to(tl.int64) * K)[:, :, None, None],)
    for part in tl.static_range(PARTS):
        row_ptrs = row_ptrs + ((BESIDE + (w_rows * (PARTS * K) + part * K))[:, :, None, None],)
        weights = weights + (shared_weight(LOGITS, row, SHARED_GATE, how),)
    tiles = load_steps(row_ptrs, row_live, 0, PRELOAD, walk)
    start_early(PDL)
    out = OUT + row * n_out + w_rows
    if ADDS:
        residual = tl.load(out, mask=w_live, other=0.0)
    if SHARED is not None:
        shared = load_shared(SHARED, w_rows, w_live, LOGITS, row, n_out, SHARED_GATE, how)
    total = tl.zeros([WARPS, PER_WARP, 32], dtype=tl.float32)
    for slot in tl.static_range(TOP_K + PARTS):
        acc = tl.zeros([WARPS, PER_WARP, 32], dtype=tl.float32)
        for step in tl.static_range(STEPS):
            tile = tiles[0].to(tl.float32)
            tiles = tiles[1:]
            if slot * STEPS + step + PRELOAD < (TOP_K + PARTS) * STEPS:
                tiles = tiles + load_steps(row_ptrs, row_live, slot * STEPS + step + PRELOAD,
                                           slot * STEPS + step + PRELOAD + 1, walk)  # fmt: skip
            h = load_vector(H + (row * (TOP_K + PARTS) + slot) * K, True, step, walk)
            acc += lane_sums(tile * h.to(tl.float32))
        total += acc * weights[slot][:, :, None]
    y = tl.sum(total, axis=2)
    if SHARED is not None:
        y += shared
    if ADDS:
        y += residual.to(tl.float32)
    tl.store(out, y.to(OUT.dtype.element_ty), mask=w_live)


def gate_up(
    x: torch.Tensor, weight: torch.Tensor, chosen: Chosen, config: GemmConfig, activation: ExpertActivation,
    norm: Norm | None = None, beside: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The activation, which clamps nothing, of the experts that each row of x [T, H] chose, best first: [T, top_k, I],
    by weight [E, 2 I, H], gates first, or without gates [E, I, H]. norm: of kind "rms", of x, before it. beside: weight
    of a shared expert of a multiple of I, whose activation follows in as many parts more. Everything is contiguous, and
    but for logits and factors of one dtype."""
    (rows, hidden), (experts, n, k), top_k = x.shape, weight.shape, chosen.options.top_k
    assert k == hidden and activation.limit is None, (weight.shape, activation)
    n_out, parts = n // 2 if activation.gated else n, 0 if beside is None else beside.shape[0] // n
    out = x.new_empty(rows, top_k + parts, n_out)
    _gate_up_kernel[(triton.cdiv(n, config.block_n), top_k + parts, rows)](
        x, norm and norm.weight, weight, beside, chosen.logits, chosen.bias, chosen.correction, out, n_out,
        norm.eps if norm else 0.0, PARTS=parts, GATED=activation.gated, GELU=activation.alpha is None,
        **choice_constants(chosen, experts, x.device), **walk_constants(weight, config),
    )  # fmt: skip
    return out


def down(
    h: torch.Tensor, weight: torch.Tensor, chosen: Chosen, config: GemmConfig, residual: torch.Tensor | None = None,
    shared: torch.Tensor | None = None, shared_gate: bool = False, beside: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The sum over its experts, times their scores, for each row of h [T, top_k, I], as gate_up makes it, by weight
    [E, H, I]: [T, H]. shared [T, H] is added, or the rest of h by `beside` [H, I of a shared expert], with shared_gate
    times the sigmoid of the logit behind the experts'. residual [T, H]: it is added to in place, and returned."""
    (rows, slots, width), (experts, hidden, k), options = h.shape, weight.shape, chosen.options
    parts = slots - options.top_k
    assert k == width and parts == (0 if beside is None else beside.shape[1] // k), (h.shape, weight.shape)
    out = h.new_empty(rows, hidden) if residual is None else residual
    _down_kernel[(triton.cdiv(hidden, config.block_n), rows)](
        h, weight, beside, chosen.logits, chosen.bias, chosen.correction, chosen.factors, shared, out, hidden,
        PARTS=parts, RENORMALISE=options.renormalise, SCALE=options.scale, ADDS=residual is not None,
        SHARED_GATE=shared_gate,
        **choice_constants(chosen, experts, h.device), **walk_constants(weight, config, slots),
    )  # fmt: skip
    return out
