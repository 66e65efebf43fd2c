"""SwiGLU's pointwise half (Shazeer, arXiv 2002.05202)."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit
def _silu_mul_kernel(GATE_UP, OUT, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Columns `program_id(1)` * BLOCK and on of row `program_id(0)`."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < SIZE
    gate = tl.load(GATE_UP + row * (2 * SIZE) + cols, mask=mask, other=0.0)
    up = tl.load(GATE_UP + row * (2 * SIZE) + SIZE + cols, mask=mask, other=0.0)
    gate32 = gate.to(tl.float32)
    silu = (gate32 / (1.0 + tl.exp(-gate32))).to(gate.dtype)
    tl.store(OUT + row * SIZE + cols, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Triton version of silu_mul_reference; gate_up is contiguous."""
    num_rows, width = gate_up.shape
    size = width // 2
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    if num_rows:
        _silu_mul_kernel[(num_rows, triton.cdiv(size, block))](gate_up, out, SIZE=size, BLOCK=block, num_warps=4)
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gates first -> silu(gate) * up, [T, I]; silu(gate) is rounded to the dtype before that."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
