"""Lanes of a tile of decode attention, and the state and result of a chunk of a row's keys."""

from nanovllm.kernels.attention.fixed_order import NOTHING, empty
from nanovllm.kernels.attention.pages import keys_within
from nanovllm.kernels.attention.scores import exp_of_sink
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.quantize import group_scales, rounded

_NOTHING = tl.constexpr(NOTHING)


@triton.jit
def store_heads_rounded(y, ROUNDED, row, heads, mask, HQ: tl.constexpr):
    """Stores heads y [HEADS, 128] of a row, or each of its own, in ROUNDED: values e4m3 [rows, HQ * 128], scales [HQ,
    stride], and this stride, since a head is a group of those that share a scale (kernels/fp8/)."""
    VALUES, SCALES, stride = ROUNDED
    scale = group_scales(y.to(tl.float32))
    places = VALUES + (row * HQ + heads)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(places, rounded(y.to(tl.float32), scale[:, None]), mask=mask[:, None])
    tl.store(SCALES + heads * stride + row, scale, mask=mask)


@triton.jit
def lanes_of(LANES: tl.constexpr, G: tl.constexpr, PLACES: tl.constexpr):
    """Place and query head of each of a tile's lanes [LANES]: a place's G heads lie side by side."""
    lanes = tl.arange(0, LANES)
    if PLACES == 1:
        return 0, lanes
    else:
        return lanes // G, lanes % G


@triton.jit
def _has_query(heads, own_end, G: tl.constexpr, PLACES: tl.constexpr):
    """Mask of the lanes with a query, by their heads or their rows' ends."""
    return heads < G if PLACES == 1 else own_end > 0


@triton.jit
def load_lanes(Q, row, place, kv_head, heads, dims, own_end, q_strides, G: tl.constexpr, D: tl.constexpr,
               PLACES: tl.constexpr):
    """Queries [lanes, D up to a power of two] of a row and those that share its keys; zeros where there is none."""
    mask = _has_query(heads, own_end, G, PLACES)[:, None] & (dims < D)[None, :]
    queries = Q + row * q_strides[0] + (kv_head * G + heads[:, None]) * q_strides[1] + dims[None, :]
    if PLACES > 1:
        queries += (place * q_strides[0])[:, None]
    return tl.load(queries, mask=mask, other=0.0)


@triton.jit
def visible_keys(n, first, own_end, window, BLOCK_N: tl.constexpr, E4M3: tl.constexpr, WINDOWED: tl.constexpr,
                 PLACES: tl.constexpr):
    """Mask of the keys of the tile at key n that each lane sees [lanes or 1, BLOCK_N], or with E4M3 its transpose."""
    if PLACES > 1:
        own_first = own_end[:, None] - window if WINDOWED else first
        visible = keys_within(n, own_first, own_end[:, None], BLOCK_N, WINDOWED)
        return tl.trans(visible) if E4M3 else visible
    else:
        visible = keys_within(n, first, own_end, BLOCK_N, WINDOWED)
        return visible[:, None] if E4M3 else visible[None, :]


@triton.jit
def finish_chunk(state, OUT, ROUNDED, PARTIAL, LSE, SINKS, row, kv_head, chunk_of, out_strides, HKV: tl.constexpr,
                 G: tl.constexpr, D: tl.constexpr, MAX_SPLITS: tl.constexpr, E4M3: tl.constexpr,
                 FIXED: tl.constexpr, PLACES: tl.constexpr, own_end):
    """Stores a chunk's result: where it is its row's only one, the row's."""
    m, sums, acc = state[1] if FIXED else state
    if E4M3:
        sums = tl.trans(sums)
        acc = tl.join(tl.trans(acc[0]), tl.trans(acc[1])).reshape(acc[0].shape[1], 2 * acc[0].shape[0])
    total = tl.max(sums, 1) if FIXED else tl.sum(sums, 1)
    place, heads = lanes_of(acc.shape[0], G, PLACES)
    dims = tl.arange(0, acc.shape[1])
    is_lane = _has_query(heads, own_end, G, PLACES)
    mask = is_lane[:, None] & (dims < D)[None, :]
    chunk = chunk_of & 0xFFFF
    if chunk_of >> 16 == 1:
        if SINKS is not None:
            total += exp_of_sink(SINKS, kv_head * G + heads, is_lane, m)
        y = (acc / total[:, None]).to(OUT.dtype.element_ty)
        if ROUNDED is not None:
            store_heads_rounded(y, ROUNDED, row + place, kv_head * G + heads, is_lane, HKV * G)
        else:
            OUT_HEADS = OUT + row * out_strides[0] + kv_head * G * out_strides[1]
            if PLACES > 1:
                OUT_HEADS += (place * out_strides[0])[:, None]
            tl.store(OUT_HEADS + heads[:, None] * out_strides[1] + dims[None, :], y, mask=mask)
    else:
        entries = ((row * HKV + kv_head) * G + heads) * MAX_SPLITS + chunk
        if PLACES > 1:
            entries += place * (HKV * G * MAX_SPLITS)
        if FIXED:
            tl.store(LSE + entries * 2, m, mask=is_lane)
            tl.store(LSE + entries * 2 + 1, total, mask=is_lane)
        else:
            if PLACES > 1:  # a query may see none of its chunk's keys
                total = tl.where(total > 0, total, 1.0)
            tl.store(LSE + entries, m + tl.log2(total), mask=is_lane)
            acc /= total[:, None]
        tl.store(PARTIAL + entries[:, None] * D + dims[None, :], acc, mask=mask)


@triton.jit
def new_chunk(BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, DIMS: tl.constexpr, E4M3: tl.constexpr,
              FIXED: tl.constexpr, PLACES: tl.constexpr):
    """The state of a chunk before its first tile: maximum, sums and unnormalised output, as _attend or attend_e4m3 has
    them; FIXED: two such, of the present chunk and of those before (attend_in_order)."""
    m = tl.full([BLOCK_H], float("-inf") if PLACES == 1 else _NOTHING, tl.float32)  # of several, one may see no key
    if FIXED:
        state = (empty(BLOCK_H, DIMS), empty(BLOCK_H, DIMS))
    elif E4M3:
        zeros = tl.zeros([DIMS, BLOCK_H], tl.float32)
        state = (m, tl.zeros([BLOCK_N, BLOCK_H], tl.float32), (zeros, zeros))
    else:
        state = (m, tl.zeros([BLOCK_H, BLOCK_N], tl.float32), tl.zeros([BLOCK_H, DIMS], tl.float32))
    return state
