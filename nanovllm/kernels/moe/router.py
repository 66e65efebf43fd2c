"""The router's GEMM: logits in float32, since two experts that tie in bfloat16 would be chosen by their number."""

import torch

from nanovllm.kernels.base.device import supports_tma
from nanovllm.kernels.gemm import decode, fixed_order
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.plan.order import ANY_ROWS

_OWN_ROWS = 2048
_TILES = ((16, 16, 16), (32, 16, 32), (1024, 16, 64), (ANY_ROWS, 64, 128))
"""Most rows; weight rows and rows of a tile."""


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H] @ weight [W, H]^T: float32 [parts, T, W], sums over parts of H.

    A kernel of our own does it in several parts, up to where the library was faster for 30B-A3B: W is so small that the
    library would keep a handful of processors busy.
    """
    rows, hidden = x.shape
    if rows <= _OWN_ROWS and supports_tma(x.device) and x.element_size() == 2 and hidden % 8 == 0 and hidden >= 512:
        return router_logits_in_one_order(x, weight)
    if x.is_cuda and x.element_size() == 2:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)[None]
    return (x.float() @ weight.float().t())[None]


def router_logits_in_one_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same by one order of sums for all numbers of rows (fixed_order.py)."""
    rows, hidden = x.shape
    if not x.is_cuda:
        return fixed_order.linear_in_blocks(x.float(), weight.float(), GemmConfig("blocks"))[None]
    block_n, block_m = next((n, m) for most, n, m in _TILES if rows <= most)
    block_k = 128 if hidden >= 512 else 16
    return decode.linear(x, weight, GemmConfig("decode", block_n, block_m, block_k, 4, split_k=4))
