"""float32 as int32 of the same order (-0.0 just below 0.0), and back."""

from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit
def to_ordered(x):
    """float32 -> int32."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def from_ordered(key):
    """int32 -> float32."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    """float32 -> the bits of |x| as int32, in the order of |x| with NaN the largest: a maximum of floats leaves NaN
    out on a GPU."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
