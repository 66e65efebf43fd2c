"""The gated delta rule over prompt chunks, in pieces of 64 tokens (arXiv 2412.06464, section 3.3).

With G the running sum of log a within a piece and S the state before it, the changes u of the piece's tokens solve
(I + A) U = b (V - e^G K S), where A_ij = b_i (k_i . k_j) e^(G_i - G_j) for j < i. So

    U = T b (V - e^G K S)    T = (I + A)^-1
    O = e^G Q S + tril(Q K^T e^(G_i - G_j)) U
    S <- e^(G_end) S + (e^(G_end - G) K)^T U

T and tril(...) depend on no state, so one kernel computes them for all pieces side by side; a second goes through a
row's pieces. A row whose state is kept is cut there: its first piece is the shorter one.
"""

import math
from typing import NamedTuple

import torch

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.recurrent.gates import decay, sigmoid
from nanovllm.kernels.recurrent.rows import StepRows
from nanovllm.kernels.recurrent.states import PIECE, count_pieces, load_state, padded_range, piece_of, store_state

_COLUMNS = 64
"""Columns of a state that a program of the scan holds: a piece of 48 heads takes 4.0 us, with 32 columns 6.5 (H200)."""
_BLOCK = 16
"""Tokens of the triangles that are solved one token after the other."""


class DeltaSizes(NamedTuple):
    """Heads of this rank. Value head h has the queries and keys of key head h * key_heads // value_heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def unit(self) -> tuple[int, int]:
        """causal_conv's `unit`: queries and keys."""
        return 2 * self.key_heads * self.key_dim, self.key_dim

    @property
    def channels(self) -> int:
        return self.unit[0] + self.value_heads * self.value_dim


@triton.jit
def _solve_triangle(a, C: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 for a float32 [C, C], zero on and above the diagonal.

    Its diagonal blocks of B are inverted by substitution, all at once. With L of these blocks and N the rest,
    I + a = L (I + M), M = L^-1 N, and of M, which has C / B blocks below the diagonal, the power C / B is zero:
    (I + M)^-1 = (I - M) (I + M^2) for four blocks. (Powers of all of `a` would grow beyond any
    precision.) PRECISION: of its products.
    """
    tl.static_assert(C == 4 * B)
    block = tl.arange(0, C) // B
    in_block = block[:, None] == block[None, :]
    blocks = tl.arange(0, C // B)
    own = (blocks[:, None] == blocks[None, :])[:, None, :, None]
    diagonal = tl.sum(tl.where(own, tl.reshape(a, (C // B, B, C // B, B)), 0.0), 2)
    place = tl.arange(0, B)
    solved = tl.zeros((C // B, B, B), tl.float32)
    for i in range(1, B):
        here = (place == i)[None, :, None]
        row = tl.sum(tl.where(here, diagonal, 0.0), 1)
        new = -row - tl.sum(row[:, :, None] * solved, 1)
        solved = tl.where(here, new[:, None, :], solved)
    solved += (place[:, None] == place[None, :]).to(tl.float32)[None, :, :]
    inverse = tl.reshape(tl.where(own, solved[:, :, None, :], 0.0), (C, C))
    m = tl.dot(inverse, tl.where(in_block, 0.0, a), input_precision=PRECISION)
    eye = (tl.arange(0, C)[:, None] == tl.arange(0, C)[None, :]).to(tl.float32)
    powers = tl.dot(eye - m, eye + tl.dot(m, m, input_precision=PRECISION), input_precision=PRECISION)
    return tl.dot(powers, inverse, input_precision=PRECISION)


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _triangle_kernel(
    X, A, B, A_LOG, DT_BIAS, INVERSE, SCORES, SUMS, CU_SEQLENS, KEEP_AT, gate_stride, most, first_row, num_rows,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_TILE: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """INVERSE and SCORES [T, HV, C] and SUMS float32 [T, HV] of piece program_id(1) and value head program_id(0).
    Pieces are counted through all rows, each row with room for two that are not full."""
    head, piece = tl.program_id(0), tl.program_id(1)
    number = tl.full((), -1, tl.int32)
    for block in range(0, num_rows, 32):
        rows = block + tl.arange(0, 32)
        begins = tl.load(CU_SEQLENS + first_row + rows, mask=rows < num_rows, other=1 << 30)
        begins = (begins - tl.load(CU_SEQLENS + first_row)) // C + 2 * rows
        number += tl.sum((begins <= piece).to(tl.int32), 0)
    row = first_row + number
    start = tl.load(CU_SEQLENS + row)
    count = tl.load(CU_SEQLENS + row + 1) - start
    offset = tl.load(KEEP_AT + row) % C
    index = piece - ((start - tl.load(CU_SEQLENS + first_row)) // C + 2 * number)
    begin, end = piece_of(index, offset, count, C)
    if begin < count:
        tokens = begin + tl.arange(0, C)
        live = tokens < end
        places = (start + tokens).to(tl.int64)
        keys, is_key = padded_range(K, K_TILE)
        width: tl.constexpr = 2 * HK * K + HV * V
        x = X + places[:, None] * width + head // (HV // HK) * K + keys[None, :]
        q = tl.load(x, mask=live[:, None] & is_key[None, :], other=0.0)
        k = tl.load(x + HK * K, mask=live[:, None] & is_key[None, :], other=0.0)
        gate = tl.load(A + places * gate_stride + head, mask=live, other=0.0)
        rate = most * sigmoid(tl.load(B + places * gate_stride + head, mask=live, other=0.0))
        sums = tl.cumsum(tl.where(live, decay(gate, A_LOG, DT_BIAS, head), 0.0), 0)
        order = tl.arange(0, C)
        below = order[None, :] < order[:, None]
        kept = tl.exp(tl.where(below, sums[:, None] - sums[None, :], 0.0))
        target = (places * HV + head)[:, None] * C + order[None, :]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * kept
        scores = tl.where(order[None, :] <= order[:, None], scores, 0.0).to(SCORES.dtype.element_ty)
        tl.store(SCORES + target, scores, mask=live[:, None])
        a = tl.dot(k, tl.trans(k), input_precision="ieee") * kept * rate[:, None]
        inverse = _solve_triangle(tl.where(below & live[:, None], a, 0.0), C, BLOCK, PRECISION)
        tl.store(INVERSE + target, inverse.to(INVERSE.dtype.element_ty), mask=live[:, None])
        tl.store(SUMS + places * HV + head, sums, mask=live)


@triton.jit(do_not_specialize=["first_row"])
def _scan_kernel(
    X, B, INVERSE, SCORES, SUMS, STATES, OUT, CU_SEQLENS, READ, WRITE, KEEP, KEEP_AT, gate_stride, state_stride,
    most, first_row, scale, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_TILE: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """OUT [T, HV, V] and the state of row first_row + program_id(2), value head program_id(1), of BV columns of V."""
    head, row = tl.program_id(1), first_row + tl.program_id(2)
    keys, is_key = padded_range(K, K_TILE)
    dims = tl.program_id(0) * BV + tl.arange(0, BV)
    start = tl.load(CU_SEQLENS + row)
    count = tl.load(CU_SEQLENS + row + 1) - start
    if count > 0:
        dtype: tl.constexpr = X.dtype.element_ty
        width: tl.constexpr = 2 * HK * K + HV * V
        key_head = head // (HV // HK)
        keep_at = tl.load(KEEP_AT + row)
        read = tl.load(READ + row)
        inside = head * K * V + keys[:, None] * V + dims[None, :]
        state = load_state(STATES, read, state_stride, inside, is_key[:, None]).to(tl.float32)
        order = tl.arange(0, C)
        offset = keep_at % C
        for index in range(count_pieces(offset, count, C)):
            begin, end = piece_of(index, offset, count, C)
            tokens = begin + order
            live = tokens < end
            is_there = live[:, None] & is_key[None, :]
            places = (start + tokens).to(tl.int64)
            x = X + places[:, None] * width
            q = tl.load(x + key_head * K + keys[None, :], mask=is_there, other=0.0)
            k = tl.load(x + (HK + key_head) * K + keys[None, :], mask=is_there, other=0.0)
            v = tl.load(x + 2 * HK * K + head * V + dims[None, :], mask=live[:, None], other=0.0)
            square = (places * HV + head)[:, None] * C + order[None, :]
            inverse = tl.load(INVERSE + square, mask=live[:, None], other=0.0)
            scores = tl.load(SCORES + square, mask=live[:, None], other=0.0)
            sums = tl.load(SUMS + places * HV + head, mask=live, other=0.0)
            rate = most * sigmoid(tl.load(B + places * gate_stride + head, mask=live, other=0.0))
            total = tl.load(SUMS + (start + end - 1).to(tl.int64) * HV + head)
            kept = tl.exp(sums)[:, None]
            rounded = state.to(dtype)
            missing = rate[:, None] * (v.to(tl.float32) - kept * tl.dot(k, rounded, input_precision="ieee"))
            change = tl.dot(inverse, missing.to(dtype), input_precision="ieee")
            out = tl.dot(q, rounded, input_precision="ieee") * kept
            out = tl.dot(scores, change.to(dtype), out, input_precision="ieee") * scale
            tl.store(OUT + places[:, None] * (HV * V) + head * V + dims[None, :], out.to(dtype), mask=live[:, None])
            left = tl.where(live, tl.exp(total - sums), 0.0)
            change = (change * left[:, None]).to(dtype)
            state = tl.dot(tl.trans(k), change, state * tl.exp(total), input_precision="ieee")
            if end == keep_at:
                keep = tl.load(KEEP + row).to(tl.int64)
                store_state(STATES, keep, state_stride, inside, state, is_key[:, None])
        write = tl.load(WRITE + row).to(tl.int64)
        store_state(STATES, write, state_stride, inside, state, is_key[:, None])


def scan_prompts(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, most: float,
    sizes: DeltaSizes, states: torch.Tensor, rows: StepRows, out: torch.Tensor,
) -> None:  # fmt: skip
    """The rule over all rows behind the decodes: writes o into out [T, value_heads * value_dim], and moves the states
    on. For the others see `gated_delta_rule`."""
    hk, hv, k, v = sizes
    first, tokens = rows.num_decode_rows, x.shape[0]
    num_rows = rows.num_rows - first
    inverse, scores = (torch.empty(tokens, hv, PIECE, dtype=x.dtype, device=x.device) for _ in range(2))
    sums = torch.empty(tokens, hv, dtype=torch.float32, device=x.device)
    constants = {"HK": hk, "HV": hv, "K": k, "V": v, "K_TILE": triton.next_power_of_2(k), "C": PIECE}
    pieces = (tokens - first) // PIECE + 2 * num_rows
    _triangle_kernel[(hv, pieces)](
        x, a, b, A_log, dt_bias, inverse, scores, sums, rows.cu_seqlens, rows.lines.keep_at, a.stride(0), most,
        first, num_rows, BLOCK=_BLOCK, num_warps=4,
        PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32", **constants,
    )  # fmt: skip
    block = math.gcd(v, _COLUMNS)
    _scan_kernel[(v // block, hv, num_rows)](
        x, b, inverse, scores, sums, states, out, rows.cu_seqlens, *rows.lines, b.stride(0), states.stride(0), most,
        first, k**-0.5, BV=block, num_warps=4, num_stages=2, **constants,
    )  # fmt: skip
