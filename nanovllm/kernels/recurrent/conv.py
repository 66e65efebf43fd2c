"""Causal convolution of each channel with the row's last tokens; SiLU and the norm of queries and keys behind it, or a
gate before it and one behind it."""

import math

import torch
from torch.nn.functional import silu as torch_silu

from nanovllm.kernels.base.activations import silu
from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.recurrent.rows import StepRows, row_places
from nanovllm.kernels.recurrent.states import count_places

_BLOCK_T = 16
_BLOCK_C = 256
_EPS = 1e-6
"""Added to the sum of squares of a query or key."""


@triton.jit
def _inputs(X, cols, mask, C: tl.constexpr, GATED: tl.constexpr):
    """Inputs in columns `cols` of X; GATED: those of a third part of it, times the first one."""
    if GATED:
        x = tl.load(X + 2 * C + cols, mask=mask, other=0.0).to(tl.float32)
        return (x * tl.load(X + cols, mask=mask, other=0.0).to(tl.float32)).to(X.dtype.element_ty)
    else:
        return tl.load(X + cols, mask=mask, other=0.0)


@triton.jit
def _move_on(
    X, LAST, INTO, line, read, last_stride, start, end, cols, mask, x_stride, C: tl.constexpr, W: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Writes the W - 1 inputs before token `end` into a line, the oldest first: it may be the one that is read."""
    target = INTO + line.to(tl.int64) * last_stride
    for i in tl.static_range(W - 1):
        token = end - (W - 1) + i
        new, old = mask & (token >= 0), mask & (token < 0) & (read >= 0)
        value = _inputs(X + (start + token).to(tl.int64) * x_stride, cols, new, C, GATED)
        value += tl.load(LAST + (token + W - 1) * C + cols, mask=old, other=0.0)
        tl.store(target + i * C + cols, value, mask=mask)


@triton.jit
def _columns(first, C: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr):
    """Channels from `first` on of BLOCK_C lanes, TILE for each vector of DIM, and which lanes have one."""
    lanes = tl.arange(0, BLOCK_C)
    if TILE == DIM:
        return first + lanes, first + lanes < C
    else:
        cols = first + lanes // TILE * DIM + lanes % TILE
        return cols, (lanes % TILE < DIM) & (cols < C)


@triton.jit(do_not_specialize=["first_row", "num_shares", "num_rows"])
def _conv_kernel(
    X, WEIGHT, BIAS, LAST, OUT, CU_SEQLENS, READ, WRITE, KEEP, KEEP_AT, x_stride, last_stride, first_row,
    num_shares, eps, num_rows, C: tl.constexpr, W: tl.constexpr, UNIT: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, GATED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, HAS_PLACES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """OUT [T, C] of row first_row + program_id(1), of BLOCK_C // TILE vectors of DIM channels, from X [T, x_stride];
    the programs along axis 2 share its tokens by BLOCK_T. The first one moves the row's lines of LAST [L, W - 1, C] on.
    The first UNIT channels are vectors that are scaled to length 1. TILE: the next power of two from DIM on. GATED: X
    has three parts of C columns, see causal_conv. HAS_PLACES: a row is one of the num_rows decodes; its tokens are
    those of all rows that go on from there, each with a line. With PDL a row's places are read before gdc_wait, as
    decode attention reads its own."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = first_row + tl.program_id(1)
    share = tl.program_id(2)
    start = tl.load(CU_SEQLENS + row)
    count = tl.load(CU_SEQLENS + row + 1) - start
    if HAS_PLACES:
        count = count_places(READ, WRITE, row, num_rows, True)
    first = tl.program_id(0) * (BLOCK_C // TILE * DIM)
    cols, mask = _columns(first, C, DIM, TILE, BLOCK_C)
    read = tl.load(READ + row)
    last = LAST + tl.maximum(read, 0).to(tl.int64) * last_stride
    if PDL:
        tl.extra.cuda.gdc_wait()
    for begin in range(share * BLOCK_T, count, num_shares * BLOCK_T):
        tokens = begin + tl.arange(0, BLOCK_T)
        sums = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for i in tl.static_range(W):
            source = tokens - (W - 1) + i
            old = ((source < 0) & (read >= 0))[:, None] & mask[None, :]
            new = ((source >= 0) & (tokens < count))[:, None] & mask[None, :]
            x = _inputs(X + (start + source).to(tl.int64)[:, None] * x_stride, cols[None, :], new, C, GATED)
            x += tl.load(last + (source + W - 1)[:, None] * C + cols[None, :], mask=old, other=0.0)
            sums += x.to(tl.float32) * tl.load(WEIGHT + cols * W + i, mask=mask, other=0.0).to(tl.float32)[None, :]
        if BIAS is not None:
            sums += tl.load(BIAS + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
        live = (tokens < count)[:, None] & mask[None, :]
        if GATED:
            gates = X + (start + tokens).to(tl.int64)[:, None] * x_stride + C + cols[None, :]
            sums = sums.to(OUT.dtype.element_ty).to(tl.float32)
            out = (sums * tl.load(gates, mask=live, other=0.0).to(tl.float32)).to(OUT.dtype.element_ty)
        else:
            out = silu(sums).to(OUT.dtype.element_ty)
        if first < UNIT:
            vectors = tl.reshape(out.to(tl.float32), (BLOCK_T, BLOCK_C // TILE, TILE))
            vectors *= tl.rsqrt(tl.sum(vectors * vectors, 2) + eps)[:, :, None]
            out = tl.reshape(vectors, (BLOCK_T, BLOCK_C)).to(OUT.dtype.element_ty)
        tl.store(OUT + (start + tokens).to(tl.int64)[:, None] * C + cols[None, :], out, mask=live)
    if (share == 0) & (count > 0):
        keep_at = tl.load(KEEP_AT + row)
        if keep_at > 0:
            keep = tl.load(KEEP + row)
            _move_on(X, last, LAST, keep, read, last_stride, start, keep_at, cols, mask, x_stride, C, W, GATED)
        for place in range(count if HAS_PLACES else 1):
            end = place + 1 if HAS_PLACES else count
            write = tl.load(WRITE + row + place)
            _move_on(X, last, LAST, write, read, last_stride, start, end, cols, mask, x_stride, C, W, GATED)


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, last: torch.Tensor, rows: StepRows, bias: torch.Tensor | None = None,
    unit: tuple[int, int] = (0, 1), gated: bool = False,
) -> torch.Tensor:  # fmt: skip
    """silu(sum over i of weight[:, i] * the input W - 1 - i tokens before, and bias): x [T, C], whose last dimension is
    contiguous, weight [C, W], bias [C] -> [T, C]; padding is left uninitialised. Sums are in float32.

    last [L, W - 1, C], each line contiguous: the last inputs of rows, oldest first, by line; moved on.
    unit: (n, dim): the first n channels, vectors of dim, are scaled to length 1 behind the SiLU.
    gated: x is b | c | values, [T, 3 C]; b * values is the input, and the result is c * the sums, without SiLU.
    """
    channels, width = weight.shape
    out = torch.empty(x.shape[0], channels, dtype=x.dtype, device=x.device)
    decodes, num_rows, dim, tile = rows.num_decode_rows, rows.num_rows, unit[1], triton.next_power_of_2(unit[1])
    vectors = math.gcd(_BLOCK_C // tile, unit[0] // dim)
    shares = max(1, min(64, triton.cdiv(rows.num_tokens - decodes, _BLOCK_T)))
    for first, count, share, block_t in ((0, decodes, 1, 1), (decodes, num_rows - decodes, shares, _BLOCK_T)):
        if count:
            _conv_kernel[(triton.cdiv(channels, vectors * dim), count, share)](
                x, weight, bias, last, out, rows.cu_seqlens, *rows.lines, x.stride(0), last.stride(0), first,
                share, _EPS, decodes, C=channels, W=width, UNIT=unit[0], DIM=dim, TILE=tile, GATED=gated,
                BLOCK_T=block_t, BLOCK_C=vectors * tile, HAS_PLACES=rows.has_places and block_t == 1,
                num_warps=2 if block_t == 1 else 4, **pdl_options(x.device, block_t == 1),
            )  # fmt: skip
    return out


def causal_conv_reference(
    x: torch.Tensor, weight: torch.Tensor, last: torch.Tensor, rows: StepRows, bias: torch.Tensor | None = None,
    unit: tuple[int, int] = (0, 1), gated: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Plain twin of `causal_conv`."""
    out, width = torch.zeros(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device), weight.shape[1]
    b, c, values = x.chunk(3, 1) if gated else (None, None, x)
    x = values if b is None else b * values
    for row in row_places(rows):
        inputs = torch.cat([row.load(last), x[row.tokens]])
        places = torch.arange(len(inputs) - width + 1, device=x.device)[:, None] + torch.arange(width, device=x.device)
        sums = (inputs[places].float() * weight.T.float()).sum(1)
        sums = sums if bias is None else sums + bias.float()
        out[row.tokens] = torch_silu(sums).to(x.dtype) if c is None else c[row.tokens] * sums.to(x.dtype)
        if row.keep_at:
            last[row.keep] = inputs[row.keep_at : row.keep_at + width - 1]
        last[row.write] = inputs[len(inputs) - width + 1 :]
    vectors = out[:, : unit[0]].unflatten(1, (-1, unit[1])).float()
    out[:, : unit[0]] = (vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + _EPS)).flatten(1).to(x.dtype)
    return out
