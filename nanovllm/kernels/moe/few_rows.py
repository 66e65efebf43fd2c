"""A mixture of experts for a handful of tokens: two kernels after the router's GEMM, on one rank with norm and residual
inside.

With so few choices nearly every one is of another expert, so each reads its expert's weights by itself, as the product
of one row does (kernels/gemm/fma.py), and nothing is sorted. Every program finds the experts of its token anew from the
logits, which takes less time than a kernel whose result all would wait for. A token's sums have an order of their own,
so they do not depend on its neighbours.
"""

from dataclasses import dataclass

import torch

from nanovllm.kernels.base.device import pdl_options, start_early
from nanovllm.kernels.base.float_order import from_ordered, to_ordered
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
from nanovllm.kernels.moe.routing import LOWEST, TopK
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.pointwise.norm import Norm

_TAKEN: tl.constexpr = tl.constexpr(-(1 << 31))
"""Key of a taken expert, below that of any logit."""
_LOWEST: tl.constexpr = tl.constexpr(LOWEST)


@triton.jit
def load_scores(
    LOGITS, row, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr, BIAS=None
):  # fmt: skip
    """A token's logits, plus the router's BIAS, as integers of the same order, a copy for each warp: int32 [WARPS,
    BLOCK]."""
    expert = tl.arange(0, BLOCK)[None, :] + tl.zeros([WARPS, 1], tl.int32)
    score = tl.load(LOGITS + row * WIDTH + expert, mask=expert < EXPERTS, other=0.0, cache_modifier=".cg")
    if BIAS is not None:
        score += tl.load(BIAS + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    score = tl.where(score == score, tl.maximum(score, _LOWEST), _LOWEST)
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 is no less
    return tl.where(expert < EXPERTS, to_ordered(score), _TAKEN)


@triton.jit
def take_best(keys):
    """(expert [WARPS, 1], its key [WARPS, 1], `keys` without it), the lower number where two are equal. Integers,
    because a warp finds the greatest of 32 in one instruction."""
    expert = tl.arange(0, keys.shape[1])[None, :]
    key = tl.max(keys, axis=1)[:, None]
    best = tl.min(tl.where(keys == key, expert, keys.shape[1]), axis=1)[:, None]
    return best, key, tl.where(expert == best, _TAKEN, keys)


@triton.jit
def best_of(keys, slot):
    """The expert [WARPS, 1] of a slot; slot 0 has the best."""
    expert, _, keys = take_best(keys)
    for _ in range(slot):
        expert, _, keys = take_best(keys)
    return expert


@triton.jit
def choose(keys, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, SCALE: tl.constexpr):
    """The best TOP_K experts, best first, and their weights: tuples of [WARPS, 1]."""
    all_keys = keys
    experts, scores = (), ()
    for _ in tl.static_range(TOP_K):
        expert, key, keys = take_best(keys)
        experts = experts + (expert,)
        scores = scores + (from_ordered(key),)
    total = tl.zeros(scores[0].shape, tl.float32)
    if RENORMALISE:
        for slot in tl.static_range(TOP_K):
            total += tl.exp(scores[slot] - scores[0])
    else:
        every = tl.exp(from_ordered(all_keys) - scores[0])
        total += tl.sum(tl.where(all_keys == _TAKEN, 0.0, every), axis=1)[:, None]
    weights = ()
    for slot in tl.static_range(TOP_K):
        weights = weights + (tl.exp(scores[slot] - scores[0]) / total * SCALE,)
    return experts, weights


@triton.jit
def _gate_up_kernel(
    X, GAIN, W, LOGITS, OUT, n_out, eps,
    K: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr, PRELOAD: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (column tiles, TOP_K, tokens). X [tokens, K], before its norm where there is a GAIN; OUT [tokens, TOP_K,
    n_out], best first."""
    walk: tl.constexpr = LaneWalk(K, CHUNKS, STEPS, WARPS, EVEN_K, EVEN_N)
    PER_WARP: tl.constexpr = BLOCK_N // WARPS
    pid, slot, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    warp = tl.arange(0, WARPS)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Not before: what the router wrote may be read by the next kernel as soon as that starts.
        tl.extra.cuda.gdc_launch_dependents()
    expert = best_of(load_scores(LOGITS, row, WIDTH, EXPERTS, BLOCK, WARPS), slot)
    w_rows, w_live = weight_rows(warp * PER_WARP + tl.arange(0, PER_WARP)[None, :], pid, n_out, BLOCK_N, True)
    row_ptrs = ((W + (expert * (2 * n_out) + w_rows).to(tl.int64) * K)[:, :, None, None],)
    row_live = w_live[:, :, None, None]
    tiles = load_steps(row_ptrs, row_live, 0, PRELOAD, walk)
    x_ptr, gain, scales = X + row * K, 0.0, ()
    if GAIN is not None:
        scales = (row_scale(x_ptr, True, eps, walk),)
        gain = load_vector(GAIN, True, 0, walk)
    accs = products(tiles, row_ptrs, row_live, x_ptr, 1, GAIN, gain, scales, 1, PRELOAD, False, walk)
    out_lane, y = warp * (PER_WARP // 2) + tl.arange(0, PER_WARP // 2)[None, :], tl.sum(accs[0], axis=2)
    store_tile(y, 0.0, out_lane, 0, OUT + (row * TOP_K + slot) * n_out, 1, pid, n_out, BLOCK_N, True)


@triton.jit
def _down_kernel(
    H, W, LOGITS, OUT, n_out,
    K: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr, SCALE: tl.constexpr, ADDS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
    STEPS: tl.constexpr, PRELOAD: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PDL: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (column tiles, tokens). H [tokens, TOP_K, K]; OUT [tokens, n_out], with ADDS added to. The experts' steps
    along K follow one another, and weights are fetched PRELOAD of them ahead."""
    walk: tl.constexpr = LaneWalk(K, CHUNKS, STEPS, WARPS, EVEN_K, EVEN_N)
    PER_WARP: tl.constexpr = BLOCK_N // WARPS
    pid, row = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, WARPS)[:, None] * PER_WARP + tl.arange(0, PER_WARP)[None, :]
    w_rows, w_live = weight_rows(lane, pid, n_out, BLOCK_N, False)
    row_live = w_live[:, :, None, None]
    # The router ended before the kernel before this one let it start, and weights are always there.
    keys = load_scores(LOGITS, row, WIDTH, EXPERTS, BLOCK, WARPS)
    experts, weights = choose(keys, TOP_K, RENORMALISE, SCALE)
    row_ptrs = ()
    for slot in tl.static_range(TOP_K):
        row_ptrs = row_ptrs + ((W + (experts[slot] * n_out + w_rows).to(tl.int64) * K)[:, :, None, None],)
    tiles = load_steps(row_ptrs, row_live, 0, PRELOAD, walk)
    start_early(PDL)
    out = OUT + row * n_out + w_rows
    if ADDS:
        residual = tl.load(out, mask=w_live, other=0.0)
    total = tl.zeros([WARPS, PER_WARP, 32], dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        acc = tl.zeros([WARPS, PER_WARP, 32], dtype=tl.float32)
        for step in tl.static_range(STEPS):
            tile = tiles[0].to(tl.float32)
            tiles = tiles[1:]
            if slot * STEPS + step + PRELOAD < TOP_K * STEPS:
                tiles = tiles + load_steps(row_ptrs, row_live, slot * STEPS + step + PRELOAD,
                                           slot * STEPS + step + PRELOAD + 1, walk)  # fmt: skip
            h = load_vector(H + (row * TOP_K + slot) * K, True, step, walk)
            acc += lane_sums(tile * h.to(tl.float32))
        total += acc * weights[slot][:, :, None]
    y = tl.sum(total, axis=2)
    if ADDS:
        y += residual.to(tl.float32)
    tl.store(out, y.to(OUT.dtype.element_ty), mask=w_live)


@dataclass(frozen=True)
class Chosen:
    """Logits by which tokens choose experts, float32 [1, T, experts or more], and a bias [experts] on them. The softmax
    of them chooses (`options` without sigmoid or groups)."""

    logits: torch.Tensor
    options: TopK
    bias: torch.Tensor | None = None


def gate_up(
    x: torch.Tensor, weight: torch.Tensor, chosen: Chosen, config: GemmConfig, norm: Norm | None = None
) -> torch.Tensor:
    """silu(gate) * up of the experts that each row of x [T, H] chose, best first: [T, top_k, I], by weight [E, 2 I, H],
    gates first. norm: of kind "rms", of x, before it. Everything is contiguous, and but for logits of one dtype."""
    (rows, hidden), (experts, n, k), top_k = x.shape, weight.shape, chosen.options.top_k
    assert k == hidden, weight.shape
    out = x.new_empty(rows, top_k, n // 2)
    _gate_up_kernel[(triton.cdiv(n, config.block_n), top_k, rows)](
        x, norm and norm.weight, weight, chosen.logits, out, n // 2, norm.eps if norm else 0.0,
        **choice_constants(chosen, experts, x.device), **walk_constants(weight, config),
    )  # fmt: skip
    return out


def down(
    h: torch.Tensor, weight: torch.Tensor, chosen: Chosen, config: GemmConfig, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum over its experts, times their scores, for each row of h [T, top_k, I], as gate_up makes it, by weight
    [E, H, I]: [T, H]. residual [T, H]: it is added to in place, and returned."""
    (rows, top_k, width), (experts, hidden, k), options = h.shape, weight.shape, chosen.options
    assert k == width, weight.shape
    out = h.new_empty(rows, hidden) if residual is None else residual
    _down_kernel[(triton.cdiv(hidden, config.block_n), rows)](
        h, weight, chosen.logits, out, hidden, RENORMALISE=options.renormalise, SCALE=options.scale,
        ADDS=residual is not None, **choice_constants(chosen, experts, h.device),
        **walk_constants(weight, config, top_k),
    )  # fmt: skip
    return out


def choice_constants(chosen: Chosen, experts: int, device: torch.device) -> dict[str, int | bool]:
    """Constants of kernels that choose among so many experts."""
    options, block = chosen.options, max(32, triton.next_power_of_2(experts))
    assert not options.sigmoid and options.num_groups == 1, options
    found = {"WIDTH": chosen.logits.shape[-1], "EXPERTS": experts, "BLOCK": block, "TOP_K": options.top_k}
    return {**found, **pdl_options(device)}
