"""Mean squares of queries and of keys over all heads of a model, for the norm of its whole width: each rank's part."""

import torch

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.pointwise.rope import QKNormRope, load_heads


@triton.jit
def _qk_mean_squares_kernel(QKV, BIAS, K_SHARES, OUT, qkv_stride, q_share, Q_WIDTH: tl.constexpr,
                            K_WIDTH: tl.constexpr, D: tl.constexpr, Q_PADDED: tl.constexpr, K_PADDED: tl.constexpr,
                            ):  # fmt: skip
    """OUT float32 [T, 2] from QKV [T, Q_WIDTH + 2 K_WIDTH], BIAS of its width or None, K_SHARES float32 [K_WIDTH / D];
    token `program_id(0)`. A whole row in one program: the order of the sum does not depend on the step."""
    token = tl.program_id(0).to(tl.int64)
    zero = tl.arange(0, 1)
    cols = tl.arange(0, Q_PADDED)
    q = load_heads(QKV + token * qkv_stride, BIAS, zero, cols, (cols < Q_WIDTH)[None, :], D).to(tl.float32)
    tl.store(OUT + token * 2, tl.sum(tl.sum(q * q, 1), 0) * q_share)
    cols = tl.arange(0, K_PADDED)
    mask = (cols < K_WIDTH)[None, :]
    share = tl.load(K_SHARES + cols // D, mask=cols < K_WIDTH, other=0.0)[None, :]
    k = load_heads(QKV + token * qkv_stride, BIAS, zero, Q_WIDTH + cols, mask, D).to(tl.float32)
    tl.store(OUT + token * 2 + 1, tl.sum(tl.sum(k * k * share, 1), 0))


def qk_mean_squares(
    qkv: torch.Tensor, how: QKNormRope, q_share: float, k_shares: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean squares of a token's queries and keys over all heads of the whole model, this rank's part, float32 [T, 2];
    the ranks' parts add up.

    qkv [T, (Hq + 2 Hkv) * D]; bias [(Hq + 2 Hkv) * D]. q_share: 1 / elements of all queries. k_shares float32 [Hkv]: 1
    / elements of all keys, or 0 for a head that is counted elsewhere. Rows of qkv may be strided.
    """
    q_width, k_width = how.num_heads * how.head_dim, how.num_kv_heads * how.head_dim
    out = torch.empty(qkv.shape[0], 2, dtype=torch.float32, device=qkv.device)
    if qkv.shape[0]:
        _qk_mean_squares_kernel[(qkv.shape[0],)](
            qkv, bias, k_shares, out, qkv.stride(0), q_share, Q_WIDTH=q_width, K_WIDTH=k_width, D=how.head_dim,
            Q_PADDED=triton.next_power_of_2(q_width), K_PADDED=triton.next_power_of_2(k_width), num_warps=4,
        )  # fmt: skip
    return out


def qk_mean_squares_reference(
    qkv: torch.Tensor, how: QKNormRope, q_share: float, k_shares: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Plain twin of `qk_mean_squares`."""
    biased = qkv if bias is None else qkv + bias
    squares = how.heads(biased).float().square().sum(-1)
    q, k = squares[:, : how.num_heads], squares[:, how.num_heads : how.num_heads + how.num_kv_heads]
    return torch.stack((q.sum(1) * q_share, (k * k_shares).sum(1)), dim=1)
