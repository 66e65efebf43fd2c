"""Gates on the result of attention: each head, or each of its elements, times an activation of its gate."""

import torch

from nanovllm.kernels.base.triton_import import tl, triton

GATES = ("sigmoid", "softplus")


@triton.jit
def _gate_kernel(
    X, GATE, gate_stride, WIDTH: tl.constexpr, EACH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """X [rows, WIDTH] is multiplied in place by the activation of GATE [rows, gate_stride], whose elements are for EACH
    neighbours. A program has columns `program_id(1)` * BLOCK and on of row `program_id(0)`."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    gate = tl.load(GATE + row * gate_stride + cols // EACH, mask=mask, other=0.0).to(tl.float32)
    if KIND == "sigmoid":
        weight = 1.0 / (1.0 + tl.exp(-gate))
    else:
        weight = tl.maximum(gate, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(gate)))
    x = tl.load(X + row * WIDTH + cols, mask=mask)
    y = x.to(tl.float32) * weight.to(x.dtype).to(tl.float32)
    tl.store(X + row * WIDTH + cols, y.to(x.dtype), mask=mask)


def gate_heads(x: torch.Tensor, gate: torch.Tensor, kind: str, each: int) -> torch.Tensor:
    """Multiplies x [T, n * each], contiguous, in place by activated(gate) and returns it; gate [T, n or more], of which
    one element is for `each` neighbours, is activated in float32 and rounded to x's dtype. kind: one of GATES."""
    rows, width = x.shape
    block = min(1024, triton.next_power_of_2(width))
    if rows:
        _gate_kernel[(rows, triton.cdiv(width, block))](
            x, gate, gate.stride(0), WIDTH=width, EACH=each, KIND=kind, BLOCK=block, num_warps=4
        )
    return x


def gate_heads_reference(x: torch.Tensor, gate: torch.Tensor, kind: str, each: int) -> torch.Tensor:
    """Plain twin of `gate_heads`. On a CPU torch's own sigmoid and softplus differ in their last bits between elements
    in the middle and at the end of a tensor, and so between numbers of rows; what stands here does not."""
    by_gate = x.unflatten(1, (-1, each))
    gate = gate[:, : by_gate.shape[1], None].float()
    if kind == "sigmoid":
        weight = 1 / (1 + (-gate).exp())
    else:
        weight = gate.clamp(min=0) + (-gate.abs()).exp().log1p()
    by_gate.mul_(weight.to(x.dtype))
    return x
