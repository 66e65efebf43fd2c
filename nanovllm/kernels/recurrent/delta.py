"""The gated delta rule (Yang et al., "Gated Delta Networks", arXiv 2412.06464), with the gated norm behind it.

A head's state S [K, V], float32 in the arithmetic, goes through the tokens of a row:

    S <- a S;  u = b (v - S^T k);  S <- S + k u^T;  o = S^T q / sqrt(K);  y = norm(o) * weight * silu(z)

with a = exp(-exp(A_log) softplus(a_in + dt_bias)) and b = most * sigmoid(b_in). Kernels pad K and V to powers of two.

Decode rows take one step (here); prompt chunks go 64 tokens at a time (delta_prompt.py).
"""

from typing import NamedTuple

import torch
from torch.nn.functional import silu as torch_silu
from torch.nn.functional import softplus as torch_softplus

from nanovllm.kernels.base.activations import silu
from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.recurrent.delta_prompt import DeltaSizes, scan_prompts
from nanovllm.kernels.recurrent.gates import decay, sigmoid
from nanovllm.kernels.recurrent.rows import StepRows, row_places
from nanovllm.kernels.recurrent.states import count_places, load_state, padded_range, store_state

_ROOMY = 128 * 128
"""Elements of a state that four warps hold in registers."""


class DeltaWeights(NamedTuple):
    """Parameters of the rule on this rank."""

    A_log: torch.Tensor
    """float32 [value_heads]"""
    dt_bias: torch.Tensor
    """float32 [value_heads]"""
    norm: torch.Tensor
    """[value_dim]"""
    eps: float
    most: float = 1.0
    """Bound of b: 1, or 2, with which a state's eigenvalues may be negative."""


@triton.jit
def _gated_norm(out, z, NORM, eps, dims, is_dim, V: tl.constexpr):
    """norm(out) * weight * silu(z) of out, z [n, padded V], with roundings to z's dtype between them."""
    dtype: tl.constexpr = z.dtype
    out = out.to(dtype).to(tl.float32)
    normed = (out * tl.rsqrt(tl.sum(out * out, 1) / V + eps)[:, None]).to(dtype).to(tl.float32)
    scaled = (tl.load(NORM + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :] * normed).to(dtype).to(tl.float32)
    return (scaled * silu(z.to(tl.float32))).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _decode_kernel(
    X, A, B, Z, A_LOG, DT_BIAS, NORM, STATES, OUT, READ, WRITE, gate_stride, z_stride, state_stride, eps, most, scale,
    num_rows, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_TILE: tl.constexpr,
    V_TILE: tl.constexpr, HAS_PLACES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The token of row program_id(1), value head program_id(0), whose whole state [K, V] this program holds, and those
    of the rows that go on from there. With PDL the state is read before gdc_wait: this kernel wrote it, or one of the
    scan, in a step before. (As decode attention does, this counts on the embedding, an ordinary kernel, for what was
    prepared in this step.)"""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head, first = tl.program_id(0), tl.program_id(1)
    keys, is_key = padded_range(K, K_TILE)
    dims, is_dim = padded_range(V, V_TILE)
    live = is_key[:, None] & is_dim[None, :]
    key_head = head // (HV // HK)
    count = count_places(READ, WRITE, first, num_rows, HAS_PLACES)
    read = tl.where(count > 0, tl.load(READ + first), -1)
    places = head * K * V + keys[:, None] * V + dims[None, :]
    state = load_state(STATES, read, state_stride, places, live)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for place in range(count):
        row = (first + place).to(tl.int64)
        x = X + row * (2 * HK * K + HV * V)
        q = tl.load(x + key_head * K + keys, mask=is_key, other=0.0).to(tl.float32) * scale
        k = tl.load(x + (HK + key_head) * K + keys, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(x + 2 * HK * K + head * V + dims, mask=is_dim, other=0.0).to(tl.float32)
        log_kept = decay(tl.load(A + row * gate_stride + head), A_LOG, DT_BIAS, head)
        rate = most * sigmoid(tl.load(B + row * gate_stride + head))
        moved = state.to(tl.float32) * tl.exp(log_kept)
        change = rate * (v - tl.sum(k[:, None] * moved, 0))
        moved += k[:, None] * change[None, :]
        store_state(STATES, tl.load(WRITE + row).to(tl.int64), state_stride, places, moved, live)
        state = moved.to(STATES.dtype.element_ty)
        out = tl.sum(q[:, None] * moved, 0)
        z = tl.load(Z + row * z_stride + head * V + dims, mask=is_dim, other=0.0)
        y = _gated_norm(out[None, :], z[None, :], NORM, eps, dims, is_dim, V)
        tl.store(OUT + row * (HV * V) + head * V + dims, tl.reshape(y, (V_TILE,)), mask=is_dim)


@triton.jit(do_not_specialize=["first", "num_rows"])
def _norm_kernel(
    OUT, Z, NORM, z_stride, eps, first, num_rows, HV: tl.constexpr, V: tl.constexpr, V_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gated norm of OUT [T, HV, V] in place, BLOCK pairs of a token and a head from token `first` on."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, head = (first + pair // HV).to(tl.int64), pair % HV
    dims, is_dim = padded_range(V, V_TILE)
    live = (pair < num_rows)[:, None] & is_dim[None, :]
    places = OUT + (token * HV + head)[:, None] * V + dims[None, :]
    z = tl.load(Z + token[:, None] * z_stride + head[:, None] * V + dims[None, :], mask=live, other=0.0)
    y = _gated_norm(tl.load(places, mask=live, other=0.0), z, NORM, eps, dims, is_dim, V)
    tl.store(places, y, mask=live)


def gated_delta_rule(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, z: torch.Tensor, weights: DeltaWeights, sizes: DeltaSizes,
    states: torch.Tensor, rows: StepRows,
) -> torch.Tensor:  # fmt: skip
    """x [T, channels]: queries and keys of length 1, and values, as causal_conv leaves them; a, b [T, value_heads] of
    one stride; z [T, value_heads * value_dim] -> y [T, value_heads * value_dim]; padding is left as it is.

    states [L, value_heads, key_dim, value_dim], each line contiguous, float32 or bfloat16: by line, moved on.
    """
    hk, hv, k, v = sizes
    tokens, decodes = x.shape[0], rows.num_decode_rows
    out = torch.empty(tokens, hv * v, dtype=x.dtype, device=x.device)
    assert a.stride(0) == b.stride(0)
    k_tile, v_tile = triton.next_power_of_2(k), triton.next_power_of_2(v)
    if decodes:
        read, write, _, _ = rows.lines
        _decode_kernel[(hv, decodes)](
            x, a, b, z, *weights[:3], states, out, read, write, a.stride(0), z.stride(0), states.stride(0),
            weights.eps, weights.most, k**-0.5, decodes, HK=hk, HV=hv, K=k, V=v, K_TILE=k_tile, V_TILE=v_tile,
            HAS_PLACES=rows.has_places, num_warps=4 if k_tile * v_tile <= _ROOMY else 8, **pdl_options(x.device),
        )  # fmt: skip
    if rows.num_rows > decodes:
        scan_prompts(x, a, b, weights.A_log, weights.dt_bias, weights.most, sizes, states, rows, out)
        block, pairs = 16, (tokens - decodes) * hv
        _norm_kernel[(triton.cdiv(pairs, block),)](
            out, z, weights.norm, z.stride(0), weights.eps, decodes, pairs, HV=hv, V=v, V_TILE=v_tile,
            BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def gated_delta_rule_reference(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, z: torch.Tensor, weights: DeltaWeights, sizes: DeltaSizes,
    states: torch.Tensor, rows: StepRows,
) -> torch.Tensor:  # fmt: skip
    """Plain twin of `gated_delta_rule`: the definition, token by token."""
    hk, hv, k, v = sizes
    q, keys, values = x.float().split([hk * k, hk * k, hv * v], dim=1)
    q, keys = (part.unflatten(1, (hk, k)).repeat_interleave(hv // hk, 1) for part in (q * k**-0.5, keys))
    values, log_kept = values.unflatten(1, (hv, v)), -weights.A_log.exp() * torch_softplus(a.float() + weights.dt_bias)
    kept, rate = log_kept.exp(), weights.most * b.float().sigmoid()
    out = torch.zeros(x.shape[0], hv, v, device=x.device)
    for row in row_places(rows):
        state = row.load(states).float()
        for number, t in enumerate(range(row.tokens.start, row.tokens.stop), 1):
            state *= kept[t, :, None, None]
            change = rate[t, :, None] * (values[t] - torch.einsum("hk,hkv->hv", keys[t], state))
            state += keys[t, :, :, None] * change[:, None]
            out[t] = torch.einsum("hk,hkv->hv", q[t], state)
            if number == row.keep_at:
                states[row.keep] = state.to(states.dtype)
        states[row.write] = state.to(states.dtype)
    out = out.to(x.dtype).float()
    normed = (out * torch.rsqrt(out.square().mean(-1, keepdim=True) + weights.eps)).to(x.dtype)
    return ((weights.norm * normed).float() * torch_silu(z.float().view_as(out))).to(x.dtype).flatten(1)
