"""Attention whose sums have one order for a token, whatever its step: decode and prefill kernels share this arithmetic.

A row's keys are cut into tiles of TILE keys and chunks of several tiles, both at fixed places of the row. A chunk is an
online softmax over its tiles, begun anew; chunks are added up one after the other (`fold`). So a program that walks
over a whole row, programs that each compute one chunk and a third that adds them up, and a program that does this for
128 queries side by side come to the same bits. What makes that true of tiles of different heights:

- maxima have no order;
- every sum over keys or dimensions is a matrix product of the tensor cores, the softmax's denominator too (times ones):
  their order along the summed dimension does not depend on the other rows or on the instruction that is chosen
  (measured on compute capability 9.0);
- all else is element by element, and no multiplication is fused with an addition but where it is written so
  (enable_fp_fusion=False).
"""


from nanovllm.kernels.attention.scores import soft_cap
from nanovllm.kernels.base.triton_import import tl, triton

CHUNK, WIDE_CHUNK = 128, 1024
"""Keys of a chunk, and of those that begin at WIDE_FROM or later."""
WIDE_FROM = 4096
NOTHING = -1e30
"""Maximum of a chunk before its first key: finite, for a query may see none of a tile's keys."""
ONES = 16
"""Columns of the ones that probabilities are summed with: the least that a product takes."""

_CHUNK, _WIDE_CHUNK, _WIDE_FROM = tl.constexpr(CHUNK), tl.constexpr(WIDE_CHUNK), tl.constexpr(WIDE_FROM)
_NOTHING, _ONES = tl.constexpr(NOTHING), tl.constexpr(ONES)


def tile_keys(head_dim: int) -> int:
    """Keys of a tile; divides CHUNK."""
    return 32 if head_dim > 128 else 64


@triton.jit
def ends_chunk(end):
    """Whether a chunk ends at key `end`."""
    return end % tl.where(end > _WIDE_FROM, _WIDE_CHUNK, _CHUNK) == 0


@triton.jit
def empty(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """A chunk before its first tile, or a row before its first chunk: maximum [ROWS] in units of log2, sum of weights
    (each column of [ROWS, ONES]), unnormalised output [ROWS, DIMS]."""
    top = tl.full([ROWS], _NOTHING, tl.float32)
    return top, tl.zeros([ROWS, _ONES], tl.float32), tl.zeros([ROWS, DIMS], tl.float32)


@triton.jit
def attend(q, k, v, m, sums, acc, visible, scale_log2, CAP: tl.constexpr):
    """One tile of online softmax. visible: which keys each query sees, [queries or 1, keys]; None: all."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAP is not None:
        scores = soft_cap(scores * scale_log2, CAP)
        scale_log2 = 1.0
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale_log2)
    p = tl.exp2(tl.fma(scores, scale_log2, -m_new[:, None])).to(v.dtype)
    alpha = tl.exp2(m - m_new)[:, None]
    sums = tl.dot(p, tl.full([v.shape[0], _ONES], 1.0, v.dtype), sums * alpha, input_precision="ieee")
    acc = tl.dot(p, v, acc * alpha, input_precision="ieee")
    return m_new, sums, acc


@triton.jit
def fold(m, sums, acc, top, total, out):
    """Adds a chunk's result (m, sums, acc) to what its row has before it (top, total, out); the same three of both.
    A row without anything takes the chunk's bits; a chunk without anything changes none of the row's."""
    new = tl.maximum(top, m)
    before = tl.exp2(top - new)[:, None]
    weight = tl.exp2(m - new)[:, None]
    return new, total * before + sums * weight, out * before + acc * weight


@triton.jit
def attend_in_order(q, k, v, state, scale_log2, visible, CAP: tl.constexpr, ends):
    """One tile of a row. state: of its present chunk, and of those before, each as `empty` has it. ends: whether the
    chunk's last tile this is."""
    m, sums, acc = attend(q, k, v, state[0][0], state[0][1], state[0][2], visible, scale_log2, CAP)
    top, total, out = state[1]
    if ends:
        top, total, out = fold(m, sums, acc, top, total, out)
        m, sums, acc = empty(acc.shape[0], acc.shape[1])
    return (m, sums, acc), (top, total, out)
