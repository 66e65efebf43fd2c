"""Features that not every GPU has: programmatic dependent launch (PDL), tensor descriptors (TMA), prefetches into L2.
kernels/plan/device.py says which GPUs have them.

PDL lets a kernel start before the one ahead of it has ended. A kernel launched so must call `gdc_wait` in every program
before it touches anything that an earlier kernel writes; then such kernels and ordinary ones may follow each other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.plan.device import Device

_pdl_allowed: ContextVar[bool] = ContextVar("pdl_allowed", default=True)


def pdl_options(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """Launch options of a kernel that takes PDL as a constant: that constant, and Triton's own option where it is
    on."""
    dependent = wanted and _pdl_allowed.get() and Device.of(device).has_pdl
    return {"PDL": True, "launch_pdl": True} if dependent else {"PDL": False}


@contextmanager
def ordinary_launch() -> Iterator[None]:
    """Context in which this thread launches nothing with PDL; what a graph captures there stays so."""
    token = _pdl_allowed.set(False)
    try:
        yield
    finally:
        _pdl_allowed.reset(token)


def paged_descriptor(cache: torch.Tensor, block_n: int) -> Any:
    """A tensor descriptor over cache [num_blocks, num_kv_heads, block_size, head_dim], one layer's paged keys or
    values, or [num_blocks, num_kv_heads, block_size]: it loads block_n tokens of one head."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, 1, block_n, *cache.shape[3:]])


@triton.jit
def start_early(PDL: tl.constexpr):
    """Lets the next kernel start, and waits for the end of those before; nothing without PDL."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_lines(pointers):
    """Has the L2 cache fetch the 128-byte line of each of a tensor of pointers. Nothing waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


def prefetched_columns(num_bytes: int, rows: int, item_size: int, k: int) -> int:
    """prefetch_tile's COLUMNS for `num_bytes` of `rows` weight rows: a power of two, a line at least, as K has them."""
    return max(128 // item_size, min(num_bytes // (rows * item_size), triton.next_power_of_2(k)))


@triton.jit
def prefetch_tile(w_ptr, first_row, end_row, first_col, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Has the L2 cache fetch [ROWS, COLUMNS] of weights [rows, k] from (first_row, first_col) on; past end_row and k,
    the last line again."""
    LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    row = tl.minimum(first_row + tl.arange(0, ROWS), end_row - 1).to(tl.int64)
    col = tl.minimum(first_col + tl.arange(0, COLUMNS // LINE) * LINE, k - 1)
    prefetch_lines(w_ptr + row[:, None] * k + col[None, :])
