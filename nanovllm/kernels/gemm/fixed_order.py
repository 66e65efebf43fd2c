"""Products in one order of sums, whatever their rows (EngineConfig.exact_bits). plan/order.py says by which kernels.

On a CPU products are made in blocks of ROWS rows and COLUMNS columns of the result, in float32: all blocks are one
shape, so the library computes all alike, and an element's bits depend on its place in its block at most, of which
tests show that they do not.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.plan.config import GemmConfig

ROWS, COLUMNS = 16, 8


_settings_lock = threading.Lock()
_users: list[tuple[Any, Any, Any]] = []
"""Settings from before library_without_parts was entered, an entry for each thread that is within it."""


@contextmanager
def library_without_parts() -> Iterator[None]:
    """Context in which torch multiplies bfloat16 and float16 by cuBLASLt, without algorithms that cut K. These are
    settings of the process: they stay until the last thread has left, and other products take the same way
    meanwhile."""
    with _settings_lock:
        before = _users[0] if _users else _settings()
        _set("cublaslt", (False, False), (False, False))
        _users.append(before)
    try:
        yield
    finally:
        with _settings_lock:
            _users.pop()
            if not _users:
                _set(*before)


def _settings() -> tuple[Any, Any, Any]:
    return (torch.backends.cuda.preferred_blas_library(), torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
            torch._C._get_cublas_allow_fp16_reduced_precision_reduction())  # fmt: skip


def _set(library: Any, bfloat16: Any, float16: Any) -> None:
    """The library, and for each type whether it may add up in that type and whether it may cut K."""
    torch.backends.cuda.preferred_blas_library(library)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = bfloat16
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = float16


def linear_in_blocks(x: Tensor, weight: Tensor, config: GemmConfig, delta: Tensor | None = None) -> Tensor:
    """x [M, K] @ weight [N, K]^T -> [M, N] in x's dtype; with config.split_k > 1 [split_k, M, N], sums over parts of K.
    delta float32 [M, N]: added to the first sum before it is rounded."""
    rows, n, dtype, count = x.shape[0], weight.shape[0], x.dtype, config.split_k
    more = -x.shape[1] % 8  # zeros: the library sums rows that begin at odd places in orders of their own
    x = torch.nn.functional.pad(x.float(), (0, more, 0, ROWS if rows == 0 else -rows % ROWS))
    weight = torch.nn.functional.pad(weight.float(), (0, more, 0, -n % COLUMNS))
    k = x.shape[1]
    parts = []
    for x_part, weight_part in zip(x.chunk(count, 1), weight.chunk(count, 1), strict=True):
        columns = weight_part.reshape(-1, COLUMNS, k // count).transpose(1, 2)
        blocks = [torch.bmm(own.expand(len(columns), -1, -1), columns)
                  for own in x_part.contiguous().view(-1, ROWS, k // count)]  # fmt: skip
        parts.append(torch.stack(blocks).transpose(1, 2).reshape(x.shape[0], -1)[:rows, :n])
    if delta is not None:
        parts[0] = parts[0] + delta
    sums = torch.stack(parts).to(dtype)
    return sums if count > 1 else sums[0]
