"""Tiles of keys or values out of the pages of a row, for decode and prefill kernels."""

from nanovllm.kernels.attention.scores import padded_dims
from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit
def keys_within(start, first, end, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """Mask [BLOCK_N] of the keys of the tile at `start` that belong to first .. end, which may be [H, 1] each."""
    keys = start + tl.arange(0, BLOCK_N)
    return (keys >= first) & (keys < end) if WINDOWED else keys < end


@triton.jit
def look_up(TABLE_ROW, start, known, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The block of the tile at key `start`, or of each of its keys where tiles do not divide pages. known: which of
    them the table has, the others get block 0; None: all."""
    keys = start if PAGE % BLOCK_N == 0 else start + tl.arange(0, BLOCK_N)
    if known is None:
        return tl.load(TABLE_ROW + keys // PAGE)
    else:
        return tl.load(TABLE_ROW + keys // PAGE, mask=known, other=0)


@triton.jit
def load_tile(CACHE, block, kv_head, start, known, strides, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
              TMA: tl.constexpr):
    """Keys (or values) start .. start + BLOCK_N of a row as [BLOCK_N, D up to a power of two], of the `block` that
    look_up found. Those that are not `known` (a mask; None: all are) are zeros, or with TMA what others have there."""
    if TMA:
        return CACHE.load([block.to(tl.int32), kv_head, start % PAGE, 0]).reshape(BLOCK_N, D)
    else:
        tokens = tl.arange(0, BLOCK_N)
        dims = tl.arange(0, padded_dims(D))[None, :]
        tile = CACHE + block.to(tl.int64) * strides[0] + kv_head * strides[1]
        if PAGE % BLOCK_N == 0:  # a tile never leaves its page
            pointers = (tile + start % PAGE * strides[2]) + ((tokens * strides[2])[:, None] + dims)
        else:
            pointers = (tile + (start + tokens) % PAGE * strides[2])[:, None] + dims
        if known is not None:
            return tl.load(pointers, mask=known[:, None] & (dims < D), other=0.0)
        elif padded_dims(D) == D:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=dims < D, other=0.0)
