"""SiLU, GELU, relu(x) ** 2, and activation(gate) * up as kernels that multiply compute it behind their sums."""

from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit
def silu(x):
    """float32 -> x / (1 + exp(-x))."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu_tanh(x):
    """float32 -> GELU (Hendrycks and Gimpel, arXiv 1606.08415), approximated by a tanh."""
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # sqrt(2 / pi)
    tanh = 1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)
    return 0.5 * x * (1.0 + tanh)


@triton.jit
def gelu_mul(gate, up, dtype: tl.constexpr):
    """silu_mul with gelu_tanh in place of SiLU."""
    return gelu_tanh(gate.to(dtype).to(tl.float32)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def silu_mul(gate, up, dtype: tl.constexpr):
    """Sums of gates and ups, float32 of one shape -> silu(gate) * up in float32, with the roundings of a kernel of its
    own (pointwise/activation.py) but the last: sums and SiLU are rounded to dtype."""
    return silu(gate.to(dtype).to(tl.float32)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def relu_squared(x, dtype: tl.constexpr):
    """Sums of an expert without gates, float32 -> relu(x) ** 2 in float32, of sums that are rounded to dtype."""
    x = tl.maximum(x.to(dtype).to(tl.float32), 0.0)
    return x * x


@triton.jit
def gate_mul(gate, up, dtype: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Sums of an expert's gates and ups -> its activation (ExpertActivation, moe/experts.py), as silu_mul gives it."""
    if ALPHA is None:
        return gelu_mul(gate, up, dtype)
    elif LIMIT is None:
        return silu_mul(gate, up, dtype)
    else:
        gate = tl.minimum(gate.to(dtype).to(tl.float32), LIMIT)
        up = tl.minimum(tl.maximum(up.to(dtype).to(tl.float32), -LIMIT), LIMIT)
        return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
