"""Functions that the attention kernels share."""

from nanovllm.kernels.base.triton_import import tl, triton

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)


@triton.constexpr_function
def padded_dims(head_dim):
    """Width of a tile for this head_dim: a power of two, and at least the 16 that tl.dot needs."""
    return max(16, triton.next_power_of_2(head_dim))


@triton.jit
def soft_cap(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP), scores and CAP in units of log2; tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    return CAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2_E / CAP)) + 1.0))


@triton.jit
def softmax_step(scores, m, scale_log2):
    """One tile's part of an online softmax: the running maximum m [H] with those of its scores [H, N], which scale_log2
    brings to units of log2; the weights [H, N] of its keys; and the factor [H] on what was summed before."""
    m_new = tl.maximum(m, tl.max(scores, 1) * scale_log2)
    return m_new, tl.exp2(scores * scale_log2 - m_new[:, None]), tl.exp2(m - m_new)


@triton.jit
def exp_of_sink(SINKS, heads, mask, m):
    """exp(sink) / 2 ** m of the heads where mask is true: what their sinks add to sums of 2 ** (score - m)."""
    return tl.exp2(tl.load(SINKS + heads, mask=mask, other=0.0).to(tl.float32) * _LOG2_E - m)
