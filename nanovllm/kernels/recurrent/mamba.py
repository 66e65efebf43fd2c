"""Mamba-2 (Dao and Gu, "Transformers are SSMs", arXiv 2405.21060); gated_norm.py has the norm behind it.

A head's state S [N, P], float32 in the arithmetic, goes through the tokens of a row:

    S <- e^(-exp(A_log) t) S + b (t x)^T;  o = S^T c + D x

with the step t = max(softplus(dt + dt_bias), least); heads of a group share b and c. Decode rows take one step; prompt
chunks go in pieces (section 6): with G the running sum of -exp(A_log) t within a piece and S the state before it

    O = e^G C S + tril(C B^T e^(G_i - G_j)) (t X)
    S <- e^(G_end) S + (e^(G_end - G) B)^T (t X)

A row whose state is kept is cut there: its first piece is the shorter one.
"""

import math
from typing import NamedTuple

import torch
from torch.nn.functional import softplus as torch_softplus

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.recurrent.gates import softplus
from nanovllm.kernels.recurrent.rows import StepRows, row_places
from nanovllm.kernels.recurrent.states import PIECE, count_pieces, count_places, load_state, piece_of, store_state

_COLUMNS = 32
"""Columns of a state that a program holds."""


class MambaSizes(NamedTuple):
    """Heads of this rank. Head h has the b and c of group h * groups // heads."""

    heads: int
    groups: int
    dim: int
    """P"""
    state: int
    """N"""

    @property
    def inner(self) -> int:
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """Number of those of x, b and c together, as the convolution has them."""
        return self.inner + 2 * self.groups * self.state


class MambaWeights(NamedTuple):
    """Parameters on this rank."""

    A_log: torch.Tensor
    """float32 [heads]"""
    dt_bias: torch.Tensor
    """float32 [heads]"""
    D: torch.Tensor
    """float32 [heads]"""
    least: float
    """Least step."""


@triton.jit(do_not_specialize=["num_rows"])
def _decode_kernel(
    X, DT, A_LOG, DT_BIAS, SKIP, STATES, OUT, READ, WRITE, dt_stride, state_stride, least, num_rows,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, HAS_PLACES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The token of row program_id(2), head program_id(1), of BP columns of its state [N, P], and those of the rows that
    go on from there. With PDL that is read before gdc_wait, as by the kernel of delta.py."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head, first = tl.program_id(1), tl.program_id(2)
    keys, dims = tl.arange(0, N), tl.program_id(0) * BP + tl.arange(0, BP)
    count = count_places(READ, WRITE, first, num_rows, HAS_PLACES)
    read = tl.where(count > 0, tl.load(READ + first), -1)
    places = head * N * P + keys[:, None] * P + dims[None, :]
    state = load_state(STATES, read, state_stride, places)
    if PDL:
        tl.extra.cuda.gdc_wait()
    bias = tl.load(DT_BIAS + head)
    for place in range(count):
        row = (first + place).to(tl.int64)
        x = X + row * (H * P + 2 * G * N)
        of_group = x + H * P + head // (H // G) * N + keys
        value = tl.load(x + head * P + dims).to(tl.float32)
        b = tl.load(of_group).to(tl.float32)
        c = tl.load(of_group + G * N).to(tl.float32)
        step = tl.maximum(softplus(tl.load(DT + row * dt_stride + head).to(tl.float32) + bias), least)
        moved = state.to(tl.float32) * tl.exp(-tl.exp(tl.load(A_LOG + head)) * step)
        moved += b[:, None] * (step * value)[None, :]
        store_state(STATES, tl.load(WRITE + row).to(tl.int64), state_stride, places, moved)
        state = moved.to(STATES.dtype.element_ty)
        out = tl.sum(c[:, None] * moved, 0) + tl.load(SKIP + head) * value
        tl.store(OUT + row * (H * P) + head * P + dims, out.to(OUT.dtype.element_ty))


@triton.jit(do_not_specialize=["first_row"])
def _scan_kernel(
    X, DT, A_LOG, DT_BIAS, SKIP, STATES, OUT, CU_SEQLENS, READ, WRITE, KEEP, KEEP_AT, dt_stride, state_stride,
    first_row, least, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """OUT [T, H, P] and the state of row first_row + program_id(2), head program_id(1), of BP columns of P."""
    head, row = tl.program_id(1), first_row + tl.program_id(2)
    keys, dims = tl.arange(0, N), tl.program_id(0) * BP + tl.arange(0, BP)
    start = tl.load(CU_SEQLENS + row)
    count = tl.load(CU_SEQLENS + row + 1) - start
    if count > 0:
        dtype: tl.constexpr = X.dtype.element_ty
        keep_at = tl.load(KEEP_AT + row)
        read = tl.load(READ + row)
        inside = head * N * P + keys[:, None] * P + dims[None, :]
        state = load_state(STATES, read, state_stride, inside).to(tl.float32)
        rate, bias, skip = -tl.exp(tl.load(A_LOG + head)), tl.load(DT_BIAS + head), tl.load(SKIP + head)
        order = tl.arange(0, C)
        before = order[None, :] <= order[:, None]
        offset = keep_at % C
        for index in range(count_pieces(offset, count, C)):
            begin, end = piece_of(index, offset, count, C)
            tokens = begin + order
            live = tokens < end
            places = (start + tokens).to(tl.int64)
            x = X + places[:, None] * (H * P + 2 * G * N)
            of_group = x + H * P + head // (H // G) * N + keys[None, :]
            value = tl.load(x + head * P + dims[None, :], mask=live[:, None], other=0.0).to(tl.float32)
            b = tl.load(of_group, mask=live[:, None], other=0.0)
            c = tl.load(of_group + G * N, mask=live[:, None], other=0.0)
            dt = tl.load(DT + places * dt_stride + head, mask=live, other=0.0).to(tl.float32)
            step = tl.where(live, tl.maximum(softplus(dt + bias), least), 0.0)
            sums = tl.cumsum(rate * step, 0)
            total = tl.sum(rate * step, 0)
            out = tl.dot(c, state.to(dtype), input_precision="tf32x3") * tl.exp(sums)[:, None] + skip * value
            value *= step[:, None]
            kept = tl.exp(tl.where(before, sums[:, None] - sums[None, :], 0.0))
            scores = tl.dot(c, tl.trans(b), input_precision="tf32x3") * tl.where(before, kept, 0.0)
            out = tl.dot(scores.to(dtype), value.to(dtype), out, input_precision="tf32x3")
            tl.store(OUT + places[:, None] * (H * P) + head * P + dims[None, :], out.to(dtype), mask=live[:, None])
            value *= tl.exp(total - sums)[:, None]
            state = tl.dot(tl.trans(b), value.to(dtype), state * tl.exp(total), input_precision="tf32x3")
            if end == keep_at:
                keep = tl.load(KEEP + row).to(tl.int64)
                store_state(STATES, keep, state_stride, inside, state)
        write = tl.load(WRITE + row).to(tl.int64)
        store_state(STATES, write, state_stride, inside, state)


def mamba(
    x: torch.Tensor, dt: torch.Tensor, weights: MambaWeights, sizes: MambaSizes, states: torch.Tensor, rows: StepRows
) -> torch.Tensor:
    """x [T, channels]: x, b and c as causal_conv leaves them; dt [T, heads] -> o [T, heads * dim]; padding is
    left as it is.

    states [L, heads, state, dim], each line contiguous, float32 or bfloat16: by line, moved on. dim is a multiple of
    16, state a power of two from 16 on.
    """
    heads, groups, dim, state = sizes
    tokens, decodes = x.shape[0], rows.num_decode_rows
    out = torch.empty(tokens, heads * dim, dtype=x.dtype, device=x.device)
    block, read, write = math.gcd(dim, _COLUMNS), rows.lines.read, rows.lines.write
    constants = {"H": heads, "G": groups, "P": dim, "N": state, "BP": block, "num_warps": 4}
    operands = (x, dt, weights.A_log, weights.dt_bias, weights.D, states, out)
    if decodes:
        _decode_kernel[(dim // block, heads, decodes)](
            *operands, read, write, dt.stride(0), states.stride(0), weights.least, decodes, **constants,
            HAS_PLACES=rows.has_places, **pdl_options(x.device),
        )  # fmt: skip
    if rows.num_rows > decodes:
        _scan_kernel[(dim // block, heads, rows.num_rows - decodes)](
            *operands, rows.cu_seqlens, *rows.lines, dt.stride(0), states.stride(0), decodes, weights.least, C=PIECE,
            num_stages=2, **constants,
        )  # fmt: skip
    return out


def mamba_reference(
    x: torch.Tensor, dt: torch.Tensor, weights: MambaWeights, sizes: MambaSizes, states: torch.Tensor, rows: StepRows
) -> torch.Tensor:
    """Plain twin of `mamba`: the definition, token by token."""
    heads, groups, dim, state = sizes
    values, b, c = x.float().split([sizes.inner, groups * state, groups * state], dim=1)
    values = values.unflatten(1, (heads, dim))
    b, c = (part.unflatten(1, (groups, state)).repeat_interleave(heads // groups, 1) for part in (b, c))
    step = torch_softplus(dt.float() + weights.dt_bias).clamp(min=weights.least)
    kept, out = (-weights.A_log.exp() * step).exp(), torch.zeros_like(values)
    for row in row_places(rows):
        own = row.load(states).float()
        for number, t in enumerate(range(row.tokens.start, row.tokens.stop), 1):
            own *= kept[t, :, None, None]
            own += b[t, :, :, None] * (step[t, :, None] * values[t])[:, None]
            out[t] = torch.einsum("hn,hnp->hp", c[t], own) + weights.D[:, None] * values[t]
            if number == row.keep_at:
                states[row.keep] = own.to(states.dtype)
        states[row.write] = own.to(states.dtype)
    return out.flatten(1).to(x.dtype)
