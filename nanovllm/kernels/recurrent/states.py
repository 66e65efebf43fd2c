"""State of a row by its line, and the pieces in which a prompt chunk goes: for all kernels of recurrent states."""

from nanovllm.kernels.base.triton_import import tl, triton

PIECE = 64
"""Tokens of a piece."""


@triton.jit
def load_state(STATES, read, state_stride, places, mask=True):
    """The state that a row reads, at `places` of a line; read: its line, -1: zeros."""
    line = STATES + tl.maximum(read, 0).to(tl.int64) * state_stride
    return tl.load(line + places, mask=mask & (read >= 0), other=0.0)


@triton.jit
def store_state(STATES, line, state_stride, places, state, mask=True):
    """Writes a state at `places` of a line, int64."""
    tl.store(STATES + line * state_stride + places, state.to(STATES.dtype.element_ty), mask=mask)


@triton.jit
def padded_range(SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Numbers from 0 to PADDED - 1, a power of two, and which of them are below SIZE."""
    numbers = tl.arange(0, PADDED)
    if SIZE == PADDED:
        return numbers, tl.full((PADDED,), 1, tl.int1)
    else:
        return numbers, numbers < SIZE


@triton.jit
def goes_on(READ, WRITE, row, num_rows):
    """Whether a decode row begins where the row before it has left off: both are places of one decode. READ, WRITE:
    lines, int32 [num_rows]."""
    there = (row > 0) & (row < num_rows)
    read = tl.load(READ + row, mask=there, other=-1)
    return (read >= 0) & (read == tl.load(WRITE + row - 1, mask=there, other=-1))


@triton.jit
def count_places(READ, WRITE, row, num_rows, HAS_PLACES: tl.constexpr):
    """Number of rows that a decode row is the first of, which one program computes one after another; 0: it is no first
    one."""
    count = 1
    if HAS_PLACES:
        count = tl.where(goes_on(READ, WRITE, row, num_rows), 0, 1)
        while (count > 0) & goes_on(READ, WRITE, row + count, num_rows):
            count += 1
    return count


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
