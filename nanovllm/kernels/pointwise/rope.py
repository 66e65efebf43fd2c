"""QK-norm, rotary embedding and the store of keys and values in the paged cache, in one pass over the projections.

Rotation (Su et al., arXiv 2104.09864) pairs dimension i with i + rotary_dim / 2, as Hugging Face's models do. Rounding
is theirs too: the biased projection, the norm's result, the norm times weight, cos, sin, each product and their sum are
rounded to the model's dtype, but for the families that multiply in float32 (QKNormRope).

The cache never holds a value that is not finite: attention multiplies what a row cannot see by a weight of zero, and
0 x NaN would reach a request that gets the block later. Such a value is stored as 0 and makes its key NaN. Keys are
masked by their scores, so the NaN is seen by the rows that own it, and by no other.
"""

from dataclasses import dataclass

import torch

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.pointwise.kv_store import store_cached, store_heads, store_kv_reference

PDL_TOKENS = 512
"""Maximum tokens for which the time between kernels is worth saving by PDL."""
PDL_REGISTERS = 56
"""Maximum registers of a thread, with PDL. With 64, which the compiler takes by itself, this kernel starts 12 us
earlier beside 8B's GEMM of one row and holds it up: 3,984 us a step, 3,900 with 56. Without PDL it is 3,981; 0.6B takes
612 with PDL, 694 without (H200)."""
HEADS_PER_PROGRAM = 16
"""Heads of a program in any step, of up to 256 elements each: another number might sum in another order, and a token's
result would depend on its step."""


@dataclass(frozen=True)
class QKNormRope:
    """Norm and rotation that turn a layer's projections into queries and keys. Every field is a constant of the
    kernel."""

    num_heads: int
    """Query heads of this rank."""
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """The first dimensions of a head, which are rotated; 0: none."""
    norm: str | None = None
    """RMSNorm: "head": of each head by itself; "width": over all heads of the whole model, queries and keys apart."""
    eps: float = 1e-6
    norm_after_rope: bool = False
    norm_in_float32: bool = False
    """The normalised value is not rounded before it is multiplied by the weight."""
    rope_in_float32: bool = False
    """cos, sin and the products are not rounded, only the result."""
    value_norm: bool = False
    """RMSNorm of each value head, without a weight."""
    values_are_keys: bool = False
    """The projections have no values: they are the keys, before norm and rotation."""

    def heads(self, qkv: torch.Tensor) -> torch.Tensor:
        """[T, width] -> [T, query, then key, then (of their own) value heads, head_dim]."""
        parts = 1 if self.values_are_keys else 2
        return qkv.view(qkv.shape[0], self.num_heads + parts * self.num_kv_heads, self.head_dim)

    @property
    def heads_per_program(self) -> int:
        """Heads that one program of the kernel has."""
        return HEADS_PER_PROGRAM if self.head_dim <= 256 else HEADS_PER_PROGRAM // 2


@triton.jit
def load_heads(ROW, BIAS, heads, cols, mask, D: tl.constexpr):
    """Columns `cols` of the heads, [HEADS, cols], with the bias added."""
    offsets = heads[:, None] * D + cols[None, :]
    x = tl.load(ROW + offsets, mask=mask, other=0.0)
    if BIAS is not None:
        bias = tl.load(BIAS + offsets, mask=mask, other=0.0)
        x = (x.to(tl.float32) + bias.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _normed(x, inverse_rms, weight, IN_FLOAT32: tl.constexpr):
    normed = x.to(tl.float32) * inverse_rms
    if not IN_FLOAT32:
        normed = normed.to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _rotated(first, second, cos, sin, IN_FLOAT32: tl.constexpr):
    """Products are rounded before they are added."""
    dtype = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    if IN_FLOAT32:
        out_first, out_second = a * cos - b * sin, b * cos + a * sin
    else:
        cos = cos.to(dtype).to(tl.float32)
        sin = sin.to(dtype).to(tl.float32)
        out_first = (a * cos).to(dtype).to(tl.float32) - (b * sin).to(dtype).to(tl.float32)
        out_second = (b * cos).to(dtype).to(tl.float32) + (a * sin).to(dtype).to(tl.float32)
    return out_first.to(dtype), out_second.to(dtype)


@triton.jit
def _load_vectors(pointers, mask, HALF: tl.constexpr):
    """Both halves, each [1, HALF_PADDED]."""
    first = tl.load(pointers, mask=mask, other=0.0)
    return first[None, :], tl.load(pointers + HALF, mask=mask, other=0.0)[None, :]


@triton.jit
def _load_either(Q_WEIGHT, K_WEIGHT, cols, mask, group, Q_GROUPS: tl.constexpr, HALF: tl.constexpr):
    """Both halves, as _load_vectors does: of Q_WEIGHT in a group of query heads, else of K_WEIGHT."""
    q_first, q_second = _load_vectors(Q_WEIGHT + cols, mask & (group < Q_GROUPS), HALF)
    k_first, k_second = _load_vectors(K_WEIGHT + cols, mask & (group >= Q_GROUPS), HALF)
    return q_first + k_first, q_second + k_second  # one of the two is zero


@triton.jit
def _load_parts(ROW, BIAS, heads, count, D: tl.constexpr, HALF: tl.constexpr):
    """Both halves of the rotated dimensions, and the rest (where there is none, a value that is not used), of those
    `heads` below `count`."""
    cols = tl.arange(0, triton.next_power_of_2(HALF))
    mask = (heads < count)[:, None] & (cols < HALF)[None, :]
    first = load_heads(ROW, BIAS, heads, cols, mask, D)
    second = load_heads(ROW, BIAS, heads, cols + HALF, mask, D)
    rest = first
    if 2 * HALF < D:
        cols = 2 * HALF + tl.arange(0, triton.next_power_of_2(D - 2 * HALF))
        rest = load_heads(ROW, BIAS, heads, cols, (heads < count)[:, None] & (cols < D)[None, :], D)
    return first, second, rest


@triton.jit
def _norm_rope(parts, spoil, WEIGHT, mean_square, weight_first, weight_second, cos, sin, heads, count, D: tl.constexpr,
               HALF: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, AFTER: tl.constexpr,
               NORM_FLOAT32: tl.constexpr, ROPE: tl.constexpr, ROPE_FLOAT32: tl.constexpr):  # fmt: skip
    """Normalises and rotates the parts that _load_parts gave. `spoil`, zeros and NaN, makes NaN of the heads where it
    has one; a norm's sum takes it along."""
    first, second, rest = parts
    if ROPE and AFTER:
        first, second = _rotated(first, second, cos, sin, ROPE_FLOAT32)
    if NORM is not None:
        if NORM == "head":
            first32, second32 = first.to(tl.float32), second.to(tl.float32)
            squares = first32 * first32 + second32 * second32
            if spoil is not None:
                squares += spoil
            squares = tl.sum(squares, 1)
            if 2 * HALF < D:
                squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
            inverse_rms = tl.rsqrt(squares / D + EPS)[:, None]
        else:
            inverse_rms = tl.rsqrt(mean_square + EPS)
            weight_first, weight_second, weight_rest = _load_parts(WEIGHT, None, heads, count, D, HALF)
        first = _normed(first, inverse_rms, weight_first, NORM_FLOAT32)
        second = _normed(second, inverse_rms, weight_second, NORM_FLOAT32)
        if 2 * HALF < D:
            if NORM == "head":
                cols = 2 * HALF + tl.arange(0, triton.next_power_of_2(D - 2 * HALF))
                weight_rest = tl.load(WEIGHT + cols, mask=cols < D, other=0.0)[None, :]
            rest = _normed(rest, inverse_rms, weight_rest, NORM_FLOAT32)
    if ROPE and not AFTER:
        first, second = _rotated(first, second, cos, sin, ROPE_FLOAT32)
    if spoil is not None and NORM != "head":
        first = (first.to(tl.float32) + tl.sum(spoil, 1)[:, None]).to(first.dtype)
    return first, second, rest


@triton.jit
def _scaled(x, scale):
    return (x.to(tl.float32) * scale).to(x.dtype)


@triton.jit
def _saturated(x):
    """x as float16 can hold it: its largest value in place of larger ones, NaN as it is."""
    return tl.clamp(x.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _finite(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _finite_values(parts, D: tl.constexpr, HALF: tl.constexpr):
    """The parts of values with 0 for what is not finite; and, [HEADS, cols], 0 or NaN for each head that had such."""
    first, second, rest = parts
    spoil = first.to(tl.float32) * 0.0 + second.to(tl.float32) * 0.0
    if 2 * HALF < D:
        spoil += tl.sum(rest.to(tl.float32) * 0.0, 1)[:, None]
    return (_finite(first), _finite(second), _finite(rest)), spoil


@triton.jit
def _unit_values(parts, D: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr):
    """The parts of values, normalised without a weight."""
    first, second, rest = parts
    squares = tl.sum(first.to(tl.float32) * first.to(tl.float32) + second.to(tl.float32) * second.to(tl.float32), 1)
    if 2 * HALF < D:
        squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
    inverse_rms = tl.rsqrt(squares / D + EPS)[:, None]
    first, second = (first.to(tl.float32) * inverse_rms).to(first.dtype), second.to(tl.float32) * inverse_rms
    return first, second.to(first.dtype), (rest.to(tl.float32) * inverse_rms).to(first.dtype)


@triton.jit
def _load_keys_values(
    row, BIAS, heads, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr, VALUE_NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Loads some heads of a row's keys and of its values, with their biases added, as _load_parts does; VALUE_NORM:
    these normalised."""
    K_BIAS, V_BIAS = BIAS, BIAS
    if BIAS is not None:
        K_BIAS, V_BIAS = BIAS + Q_HEADS * D, BIAS + (Q_HEADS + KV_HEADS) * D
    keys, values = row + Q_HEADS * D, row + (Q_HEADS + KV_HEADS) * D
    parts = _load_parts(keys, K_BIAS, heads, KV_HEADS, D, HALF)
    v_parts = parts
    if not VALUES_ARE_KEYS:
        v_parts = _load_parts(values, V_BIAS, heads, KV_HEADS, D, HALF)
    if VALUE_NORM:
        v_parts = _unit_values(v_parts, D, HALF, EPS)
    return parts, v_parts


@triton.jit
def _qk_norm_rope_store_kernel(
    QKV, QUERIES, BIAS, Q_WEIGHT, K_WEIGHT, MEAN_SQUARES, COS_SIN, QUERY_SCALE, POSITIONS, K_CACHE, V_CACHE, KV_SCALES,
    SLOT_MAPPING, qkv_stride, k_strides, v_strides, scale_stride, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, AFTER: tl.constexpr,
    NORM_FLOAT32: tl.constexpr, ROPE_FLOAT32: tl.constexpr, VALUE_NORM: tl.constexpr, VALUES_ARE_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, Q_GROUPS: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """qk_norm_rope_store, which has the shapes: QKV [T, (Q_HEADS + 2 KV_HEADS) * D], caches [blocks, KV_HEADS,
    BLOCK_SIZE, D]. Token `program_id(0)`; `program_id(1)` counts Q_GROUPS groups of HEADS query heads, then groups of
    as many key/value heads. What is None is not there: BIAS, norms, COS_SIN (no rotation), QUERY_SCALE, KV_SCALES.
    QUERIES: QKV, or the same memory as float16."""
    ROPE: tl.constexpr = COS_SIN is not None
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    cols = tl.arange(0, triton.next_power_of_2(HALF))
    mask_cols = cols < HALF
    row = QKV + token * qkv_stride
    # What does not depend on the projections is read before they are there; between the kernels that
    # write it, at the start of the step, and this one there are ordinary ones.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(POSITIONS + token).to(tl.int64)
    slot = tl.load(SLOT_MAPPING + token)
    is_query = group < Q_GROUPS
    weight_first, weight_second, cos, sin = 0.0, 0.0, 0.0, 0.0
    if NORM == "head":
        weight_first, weight_second = _load_either(Q_WEIGHT, K_WEIGHT, cols, mask_cols, group, Q_GROUPS, HALF)
    if ROPE:
        cos, sin = _load_vectors(COS_SIN + position * (2 * HALF) + cols, mask_cols, HALF)
    if PDL:
        tl.extra.cuda.gdc_wait()
    q_mean_square, k_mean_square = 0.0, 0.0
    if NORM == "width":
        q_mean_square, k_mean_square = tl.load(MEAN_SQUARES + token * 2), tl.load(MEAN_SQUARES + token * 2 + 1)
    if is_query:
        heads = group * HEADS + tl.arange(0, HEADS)
        parts = _load_parts(row, BIAS, heads, Q_HEADS, D, HALF)
        first, second, rest = _norm_rope(parts, None, Q_WEIGHT, q_mean_square, weight_first, weight_second, cos, sin,
                                         heads, Q_HEADS, D, HALF, NORM, EPS, AFTER, NORM_FLOAT32, ROPE, ROPE_FLOAT32)
        if QUERY_SCALE is not None:
            scale = tl.load(QUERY_SCALE + position).to(QKV.dtype.element_ty).to(tl.float32)
            first, second, rest = _scaled(first, scale), _scaled(second, scale), _scaled(rest, scale)
        if QUERIES.dtype.element_ty != QKV.dtype.element_ty:
            first, second, rest = _saturated(first), _saturated(second), _saturated(rest)
        store_heads(QUERIES + token * qkv_stride, D, (first, second, rest), heads, Q_HEADS, D, HALF)
    else:
        if slot >= 0:
            heads = (group - Q_GROUPS) * HEADS + tl.arange(0, HEADS)
            parts, v_parts = _load_keys_values(row, BIAS, heads, Q_HEADS, KV_HEADS, D, HALF, VALUES_ARE_KEYS,
                                               VALUE_NORM, EPS)
            block, offset = (slot // BLOCK_SIZE).to(tl.int64), slot % BLOCK_SIZE
            K_SCALES = None if KV_SCALES is None else KV_SCALES + block * scale_stride + offset * 2
            V_SCALES = None if K_SCALES is None else K_SCALES + 1
            v_parts, spoil = _finite_values(v_parts, D, HALF)
            v_row = V_CACHE + block * v_strides[0] + offset * v_strides[2]
            store_cached(v_row, v_strides[1], V_SCALES, BLOCK_SIZE * 2, v_parts, heads, KV_HEADS, D, HALF)
            parts = _norm_rope(parts, spoil, K_WEIGHT, k_mean_square, weight_first, weight_second, cos, sin, heads,
                               KV_HEADS, D, HALF, NORM, EPS, AFTER, NORM_FLOAT32, ROPE, ROPE_FLOAT32)
            k_row = K_CACHE + block * k_strides[0] + offset * k_strides[2]
            store_cached(k_row, k_strides[1], K_SCALES, BLOCK_SIZE * 2, parts, heads, KV_HEADS, D, HALF)


def qk_norm_rope_store(
    qkv: torch.Tensor, how: QKNormRope, positions: torch.Tensor, slot_mapping: torch.Tensor, k_cache: torch.Tensor,
    v_cache: torch.Tensor, *, cos_sin: torch.Tensor | None = None, q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None, mean_squares: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, query_scale: torch.Tensor | None = None, kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Normalises and rotates queries in place and keys on their way into the cache; values go there as they are, or
    normalised. A value that is not finite is stored as 0 and makes its key NaN (a part of it at least).

    qkv [T, (Hq + 2 Hkv) * D]: queries, keys, values (which may be missing, as Hq or Hkv may be 0: how); its query part
    is overwritten. positions int32 [T]. slot_mapping int32 [T]: block * block_size + offset, -1: store nothing.
    k_cache, v_cache [blocks, Hkv, block_size, D]: any strides but the last. cos_sin float32 [max_position,
    rotary_dim]: cosines of the rotary_dim / 2 angles, then sines. Norm weights [D], for norm="width" [heads * D],
    with mean_squares float32 [T, 2] of queries and of keys. bias [(Hq + 2 Hkv) * D]: added first. query_scale
    float32 [max_position]: factor on the queries by position, applied last. kv_scales: see store_kv_reference.
    Returns the queries, a view [T, Hq, D] of qkv: as float16 with kv_scales and bfloat16 qkv
    (kernels/attention/e4m3.py says why), cut at +-65504. Rows of qkv may be strided.
    """
    num_tokens, half = qkv.shape[0], (how.rotary_dim or how.head_dim) // 2
    queries = _queries(qkv, how, kv_scales)
    queries_change = how.norm or how.rotary_dim or bias is not None or query_scale is not None
    queries_change = queries_change or queries.dtype != qkv.dtype
    each = how.heads_per_program
    q_groups = triton.cdiv(how.num_heads, each) if queries_change else 0
    pdl = pdl_options(qkv.device, num_tokens <= PDL_TOKENS)
    if num_tokens:
        _qk_norm_rope_store_kernel[(num_tokens, q_groups + triton.cdiv(how.num_kv_heads, each))](
            qkv, queries, bias, q_norm_weight, k_norm_weight, mean_squares, cos_sin if how.rotary_dim else None,
            query_scale, positions, k_cache, v_cache, kv_scales, slot_mapping, qkv.stride(0), k_cache.stride()[:3],
            v_cache.stride()[:3], None if kv_scales is None else kv_scales.stride(0), Q_HEADS=how.num_heads,
            KV_HEADS=how.num_kv_heads, D=how.head_dim, HALF=half,
            NORM=how.norm, EPS=how.eps, AFTER=how.norm_after_rope, NORM_FLOAT32=how.norm_in_float32,
            ROPE_FLOAT32=how.rope_in_float32, VALUE_NORM=how.value_norm, VALUES_ARE_KEYS=how.values_are_keys,
            BLOCK_SIZE=k_cache.shape[2], Q_GROUPS=q_groups, HEADS=each, num_warps=4, **pdl,
            **({"maxnreg": PDL_REGISTERS} if pdl["PDL"] else {}),
            enable_fp_fusion=False,  # or products would not be rounded before their sum
        )  # fmt: skip
    return queries


def _queries(qkv: torch.Tensor, how: QKNormRope, kv_scales: torch.Tensor | None) -> torch.Tensor:
    """Empty tensor for the queries, in the dtype that attention takes."""
    queries = how.heads(qkv)[:, : how.num_heads]
    return queries if kv_scales is None or qkv.dtype != torch.bfloat16 else queries.view(torch.float16)


def qk_norm_rope_store_reference(
    qkv: torch.Tensor, how: QKNormRope, positions: torch.Tensor, slot_mapping: torch.Tensor, k_cache: torch.Tensor,
    v_cache: torch.Tensor, *, cos_sin: torch.Tensor | None = None, q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None, mean_squares: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, query_scale: torch.Tensor | None = None, kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Plain twin of `qk_norm_rope_store`."""
    biased = how.heads(qkv if bias is None else qkv + bias)
    q, k = biased[:, : how.num_heads], biased[:, how.num_heads : how.num_heads + how.num_kv_heads]
    v = k if how.values_are_keys else biased[:, how.num_heads + how.num_kv_heads :]
    if how.value_norm:
        v = (v.float() * torch.rsqrt(v.float().square().mean(-1, keepdim=True) + how.eps)).to(v.dtype)
    cos_sin = cos_sin[positions.long()].unsqueeze(1) if how.rotary_dim and cos_sin is not None else None
    q_mean, k_mean = (None, None) if mean_squares is None else mean_squares.unsqueeze(1).split(1, dim=2)
    q = _norm_rope_reference(q, how, q_norm_weight, q_mean, cos_sin)
    k = _norm_rope_reference(k, how, k_norm_weight, k_mean, cos_sin)
    if query_scale is not None:
        q = q * query_scale[positions.long()].to(q.dtype)[:, None, None]
    queries = _queries(qkv, how, kv_scales)
    queries.copy_(q if queries.dtype == q.dtype else q.float().clamp(-65504, 65504))
    finite = v.isfinite()
    k = k.masked_fill(~finite.all(-1, keepdim=True), float("nan"))
    if how.num_kv_heads:
        store_kv_reference(k, v.where(finite, 0), k_cache, v_cache, slot_mapping, kv_scales)
    return queries


def _norm_rope_reference(
    x: torch.Tensor, how: QKNormRope, weight: torch.Tensor | None, mean_square: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """x [T, heads, D]; mean_square [T, 1, 1]; cos_sin [T, 1, rotary_dim]."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        if how.norm is None or weight is None:
            return x
        mean = x.float().square().mean(-1, keepdim=True) if mean_square is None else mean_square
        normed = x.float() * torch.rsqrt(mean + how.eps)
        by = weight if mean_square is None else weight.view(-1, how.head_dim)
        return (normed * by.float()).to(x.dtype) if how.norm_in_float32 else (normed.to(x.dtype) * by).to(x.dtype)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        if cos_sin is None:
            return x
        cos, sin = (cos_sin if how.rope_in_float32 else cos_sin.to(x.dtype)).chunk(2, dim=-1)
        first, second, rest = x.tensor_split((how.rotary_dim // 2, how.rotary_dim), dim=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*(part.to(x.dtype) for part in rotated), rest), dim=-1)

    return norm(rotate(x)) if how.norm_after_rope else rotate(norm(x))
