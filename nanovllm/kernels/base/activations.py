"""SiLU, and SiLU(gate) * up as kernels that multiply compute it behind their sums."""

from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit
def silu(x):
    """float32 -> x / (1 + exp(-x))."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_mul(gate, up, dtype: tl.constexpr):
    """Sums of gates and ups, float32 of one shape -> silu(gate) * up in float32, with the roundings of a kernel of its
    own (pointwise/activation.py) but the last: sums and SiLU are rounded to dtype."""
    return silu(gate.to(dtype).to(tl.float32)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
