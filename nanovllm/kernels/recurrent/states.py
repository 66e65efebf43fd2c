"""State of a row by its line, and the pieces in which a prompt chunk goes: for all kernels of recurrent states."""

from nanovllm.kernels.base.triton_import import tl, triton

PIECE = 64
"""Tokens of a piece."""


@triton.jit
def load_state(STATES, read, state_stride, places):
    """The state that a row reads, at `places` of a line; read: its line, -1: zeros."""
    return tl.load(STATES + tl.maximum(read, 0).to(tl.int64) * state_stride + places, mask=read >= 0, other=0.0)


@triton.jit
def store_state(STATES, line, state_stride, places, state):
    """Writes a state at `places` of a line, int64."""
    tl.store(STATES + line * state_stride + places, state.to(STATES.dtype.element_ty))


@triton.jit
def count_pieces(offset, count, C: tl.constexpr):
    """Number of pieces of a row of `count` tokens; see piece_of."""
    return (count - offset + C - 1) // C + (offset > 0).to(tl.int32)


@triton.jit
def piece_of(index, offset, count, C: tl.constexpr):
    """First token and end of a row's piece: the first one has `offset` tokens, if that is not 0, the others C."""
    begin = tl.where(offset > 0, tl.where(index > 0, offset + (index - 1) * C, 0), index * C)
    end = tl.where((offset > 0) & (index == 0), offset, begin + C)
    return begin, tl.minimum(end, count)
