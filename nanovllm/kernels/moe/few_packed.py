"""A mixture of experts in 4 or 8 bits for a handful of tokens: as moe/few_rows.py, each choice reads its expert's
weights by itself, as gemm/stream.py reads a PackedWeight. A program of `down` takes the experts one after the other for
one long row. The router and its experts may have biases.
"""

from dataclasses import dataclass

from torch import Tensor

from nanovllm.kernels.base.activations import gate_mul
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.packed import PackedWeight
from nanovllm.kernels.gemm.packed_operands import add_blocks, load_blocks, of_expert
from nanovllm.kernels.gemm.stream_operands import columns_of, finish, load_parts, load_pieces, right, steps_of
from nanovllm.kernels.gemm.unpack import SPAN
from nanovllm.kernels.moe.few_rows import choice_constants, choose, load_scores, take_best
from nanovllm.kernels.moe.routing import TopK
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.pointwise.norm import Norm


@triton.jit
def _same(expert):
    """The number that all warps found, [WARPS, 1], as one: pointers from it take any layout, those from a tensor are
    moved from one to another."""
    return tl.max(tl.max(expert, axis=1), axis=0)


@triton.jit
def _biased(acc, BIAS, at, live, factor):
    """acc [W, 16, 8] plus BIAS at [W, 16, 1], where `live`, times a factor, in one place of each weight row."""
    if BIAS is not None:
        warp, column = tl.arange(0, acc.shape[0])[:, None, None], tl.arange(0, 8)[None, None, :]
        bias = tl.load(BIAS + at, mask=live & (warp == 0), other=0.0).to(tl.float32) * factor
        acc += tl.where(column == 0, bias, 0.0)
    return acc


@triton.jit
def _row_factor(FACTORS, at):
    """Factors of weight rows [W, 16, 1]; 1 where there are none."""
    if FACTORS is None:
        return 1.0
    else:
        return tl.load(FACTORS + at)


@triton.jit
def _gate_up_kernel(
    X, GAIN, W, SCALES, FACTORS, BIAS, LOGITS, ROUTER_BIAS, OUT, n_out, eps,
    K: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, STEPS: tl.constexpr, PRELOAD: tl.constexpr, CODE: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of 16 columns, TOP_K, tokens). X [tokens, K], before its norm where there is a GAIN; OUT [tokens,
    TOP_K, n_out], best first. BIAS [EXPERTS, 2 n_out]."""
    BLOCKS: tl.constexpr = (K + SPAN - 1) // SPAN
    PARTS: tl.constexpr = (STEPS + 7) // 8
    RUN: tl.constexpr = 16 if GROUP == 16 else None
    dtype: tl.constexpr = X.dtype.element_ty
    first, slot, row = tl.program_id(0) * 16, tl.program_id(1), tl.program_id(2)
    gains = ()
    for part in tl.static_range(PARTS):
        if GAIN is not None:
            gains = gains + (load_pieces(GAIN, part * 8, K, WARPS, 32, 1, None, 4, RUN),)
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Not before: what the router wrote may be read by a later kernel as soon as that starts.
        tl.extra.cuda.gdc_launch_dependents()
    expert, _, keys = take_best(load_scores(LOGITS, row, WIDTH, EXPERTS, BLOCK, WARPS, ROUTER_BIAS))
    for _ in range(slot):
        expert, _, keys = take_best(keys)
    expert = _same(expert).to(tl.int64)
    words, scales = of_expert(W, SCALES, expert, 2 * n_out, BLOCKS, CODE, GROUP)
    warp, tiles = tl.arange(0, WARPS)[None, :, None], ()
    for step in tl.static_range(PRELOAD):
        tiles = tiles + load_blocks(words, scales, first, n_out, step * WARPS + warp, BLOCKS - 1, 2 * n_out, 2, CODE,
                                    GROUP)  # fmt: skip
    col, accs, factors = (first + tl.arange(0, 16))[None, :, None], (), ()
    for half in tl.static_range(2):
        at = expert * (2 * n_out) + half * n_out + tl.minimum(col, n_out - 1)
        accs = accs + (_biased(tl.zeros([WARPS, 16, 8], tl.float32), BIAS, at, col < n_out, 1.0),)
        factors = factors + (_row_factor(FACTORS, at),)
    loaded = load_parts(X + row * K, None, gains, 0, eps, K, PARTS, WARPS, 32, 1, None, 4, RUN)
    for step in tl.static_range(STEPS):
        accs = add_blocks(accs, tiles, loaded[step // 8], factors, step, 1, dtype, CODE, GROUP, HAS_ZEROS, PTX)
        tiles = tiles[2:]
        if step + PRELOAD < STEPS:
            tiles = tiles + load_blocks(words, scales, first, n_out, (step + PRELOAD) * WARPS + warp, BLOCKS - 1,
                                        2 * n_out, 2, CODE, GROUP)  # fmt: skip
    y = gate_mul(finish(accs[0]), finish(accs[1]), dtype, ALPHA, LIMIT)
    col = first + tl.arange(0, 16)
    tl.store(OUT + (row * TOP_K + slot) * n_out + col, y.to(dtype), mask=col < n_out)


@triton.jit
def _load_step(
    W, SCALES, numbers, first, n_out, block, BLOCKS: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """load_blocks of a row of so many blocks of each expert; past its end those of the first."""
    block = block[None, :, None]
    expert = _of_blocks(numbers, block, numbers[0], BLOCKS).to(tl.int64)
    words, scales = of_expert(W, SCALES, expert, n_out, BLOCKS, CODE, GROUP)
    return load_blocks(words, scales, first, n_out, block % BLOCKS, BLOCKS - 1, n_out, 1, CODE, GROUP)


@triton.jit
def _load_h(
    h_ptr, begin, K: tl.constexpr, BLOCKS: tl.constexpr, TOP_K: tl.constexpr, WARPS: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    """What load_parts gives of h [TOP_K, K] for 8 columns, from step `begin` on: its rows, of so many blocks, are one
    after the other."""
    block, found = steps_of(begin, 1)[:, None, None] * WARPS + tl.arange(0, WARPS)[None, :, None], ()
    for piece in tl.static_range(4):
        at = block % BLOCKS * SPAN + columns_of(piece, 32, 4, RUN)
        live = (block < TOP_K * BLOCKS) & (at < K)
        found = found + (tl.load(h_ptr + block // BLOCKS * K + at, mask=live, other=0.0),)
    return right(found)


@triton.jit
def _same_of_all(experts, weights, BLOCK_K: tl.constexpr):
    """_same of all choices, by one exchange between warps: (numbers, weights)."""
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
def _of_blocks(values, block, past, BLOCKS: tl.constexpr):
    """The value of each block: those of the first of `values`, one for BLOCKS, come first. Past the last ones `past`.
    """
    found = tl.zeros(block.shape, past.dtype) + past
    for slot in tl.static_range(len(values)):
        found = tl.where(block // BLOCKS == slot, values[slot], found)
    return found


@triton.jit
def _down_kernel(
    H, W, SCALES, FACTORS, BIAS, LOGITS, ROUTER_BIAS, OUT, n_out,
    K: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr, RENORMALISE: tl.constexpr, SCALING: tl.constexpr, ADDS: tl.constexpr, STEPS: tl.constexpr,
    PRELOAD: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of 16 columns, tokens). H [tokens, TOP_K, K]; OUT [tokens, n_out], with ADDS added to. BIAS
    [EXPERTS, n_out]. The experts' blocks follow one another."""
    BLOCKS: tl.constexpr = (K + SPAN - 1) // SPAN
    RUN: tl.constexpr = 16 if GROUP == 16 else 32
    dtype: tl.constexpr = H.dtype.element_ty
    first, row = tl.program_id(0) * 16, tl.program_id(1)
    warp, col = tl.arange(0, WARPS), (first + tl.arange(0, 16))[None, :, None]
    # The router ended before the kernel before this one let it start, and weights are always there.
    keys = load_scores(LOGITS, row, WIDTH, EXPERTS, BLOCK, WARPS, ROUTER_BIAS)
    experts, weights = choose(keys, TOP_K, RENORMALISE, SCALING)
    numbers, weights = _same_of_all(experts, weights, BLOCK_K)
    tiles = ()
    for step in tl.static_range(PRELOAD):
        tiles = tiles + _load_step(W, SCALES, numbers, first, n_out, step * WARPS + warp, BLOCKS, CODE, GROUP)
    acc = tl.zeros([WARPS, 16, 8], tl.float32)
    for slot in tl.static_range(TOP_K):
        at = numbers[slot].to(tl.int64) * n_out + col
        acc = _biased(acc, BIAS, at, col < n_out, weights[slot])
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    cols = first + tl.arange(0, 16)
    out = OUT + row * n_out + cols
    if ADDS:
        residual = tl.load(out, mask=cols < n_out, other=0.0)
    loaded = ()
    for part in tl.static_range((STEPS + 7) // 8):
        loaded = loaded + (_load_h(H + row * (TOP_K * K), part * 8, K, BLOCKS, TOP_K, WARPS, RUN),)
    accs = (acc,)
    for step in tl.static_range(STEPS):
        block = (step * WARPS + warp)[:, None, None]
        factor = _of_blocks(weights, block, weights[0] * 0.0, BLOCKS)
        if FACTORS is not None:
            at = _of_blocks(numbers, block, numbers[0], BLOCKS).to(tl.int64) * n_out
            factor *= tl.load(FACTORS + at + tl.minimum(col, n_out - 1))
        accs = add_blocks(accs, tiles, loaded[step // 8], (factor,), step, 1, dtype, CODE, GROUP, HAS_ZEROS, PTX)
        tiles = tiles[1:]
        if step + PRELOAD < STEPS:
            tiles = tiles + _load_step(W, SCALES, numbers, first, n_out, (step + PRELOAD) * WARPS + warp, BLOCKS, CODE,
                                       GROUP)  # fmt: skip
    y = finish(accs[0])
    if ADDS:
        y += residual.to(tl.float32)
    tl.store(out, y.to(OUT.dtype.element_ty), mask=cols < n_out)


@dataclass(frozen=True)
class Chosen:
    """What tokens choose experts by. logits float32 [1, T, experts or more]; bias [experts], on them."""

    logits: Tensor
    options: TopK
    bias: Tensor | None = None


def gate_up(
    x: Tensor, weight: PackedWeight, chosen: Chosen, config: GemmConfig, norm: Norm | None = None,
    bias: Tensor | None = None, activation: tuple[float | None, float | None] = (1.0, None),
) -> Tensor:  # fmt: skip
    """The activation (alpha and limit) of gate and up of the experts that each row of x [T, H] chose, best first: [T,
    top_k, I], by weight [E, 2 I, H], gates first, and bias [E, 2 I]. norm: of kind "rms", of x, before it. The softmax
    of the logits chooses."""
    rows, options, width = x.shape[0], chosen.options, weight.n // 2
    out = x.new_empty(rows, options.top_k, width)
    _gate_up_kernel[(triton.cdiv(width, 16), options.top_k, rows)](
        x, norm and norm.weight, weight.words, weight.scales, weight.factors, bias, chosen.logits, chosen.bias, out,
        width, norm.eps if norm else 0.0, ALPHA=activation[0], LIMIT=activation[1],
        **_constants(weight, config, chosen, 1, x),
    )  # fmt: skip
    return out


def down(
    h: Tensor, weight: PackedWeight, chosen: Chosen, config: GemmConfig, residual: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sum over its experts, times their scores, for each row of h [T, top_k, I], as gate_up makes it, by weight
    [E, H, I] and bias [E, H]: [T, H]. residual [T, H]: it is added to in place, and returned."""
    rows, options = h.shape[0], chosen.options
    out = h.new_empty(rows, weight.n) if residual is None else residual
    _down_kernel[(triton.cdiv(weight.n, 16), rows)](
        h, weight.words, weight.scales, weight.factors, bias, chosen.logits, chosen.bias, out, weight.n,
        BLOCK_K=triton.next_power_of_2(options.top_k), RENORMALISE=options.renormalise, SCALING=options.scale,
        ADDS=residual is not None, **_constants(weight, config, chosen, options.top_k, h),
    )  # fmt: skip
    return out


def _constants(
    weight: PackedWeight, config: GemmConfig, chosen: Chosen, num_experts: int, x: Tensor
) -> dict[str, int | bool | str | None]:
    """num_experts: that one program multiplies by."""
    experts, options = weight.words.shape[0], chosen.options
    assert x.shape[-1] == weight.k and x.is_contiguous() and not options.sigmoid and options.num_groups == 1
    groups = config.block_k // SPAN.value
    steps = triton.cdiv(weight.words.shape[1] * num_experts, groups)
    return {
        "K": weight.k, "STEPS": steps, "PRELOAD": min(config.stages, steps), "CODE": weight.code,
        "GROUP": weight.group, "HAS_ZEROS": weight.has_zeros, "PTX": x.is_cuda, "WARPS": groups,
        "num_warps": config.num_warps, "maxnreg": config.max_registers or None,
        **choice_constants(chosen.logits, experts, options, x.device),
    }  # fmt: skip
