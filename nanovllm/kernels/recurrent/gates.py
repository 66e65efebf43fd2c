"""Gates of recurrent layers, in float32."""

from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit
def sigmoid(x):
    """Any float -> 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x.to(tl.float32)))


@triton.jit
def softplus(x):
    """float32 -> log(1 + exp(x))."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def decay(a, A_LOG, DT_BIAS, head):
    """Logarithm of what a head keeps of its state over a token whose gate is `a`: -exp(A_log) softplus(a + dt_bias)."""
    return -tl.exp(tl.load(A_LOG + head)) * softplus(a.to(tl.float32) + tl.load(DT_BIAS + head))
