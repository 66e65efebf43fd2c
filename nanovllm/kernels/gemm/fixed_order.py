"""Which kernels multiply where a row's bits must not depend on its step (EngineConfig.exact_bits).

Tensor cores add up products along K in one order, whatever the tile and the instruction (measured on compute
capability 9.0). So a kernel's bits follow from how it cuts K alone. For "batch" each layer has one number of parts of
K for all numbers of rows: two where the consumer adds them up, as most of the measured choices have, and K is long.
For "tp" the parts of a row-parallel layer are leaves of a tree over the whole K, of all ranks: sums are added in pairs,
and the sum of any two, like a leaf's, is rounded to the model's dtype. A rank has a power of two of the leaves, its sum
is a node of the tree, and ranks exchange no more than by default. FMA kernels, which have other orders, and cuBLAS's
own parts of K are left out.

On a CPU products are made in blocks of ROWS rows and COLUMNS columns of the result, in float32: all blocks are one
shape, so the library computes all alike, and an element's bits depend on its place in its block at most, of which
tests show that they do not.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.gemm import one_row
from nanovllm.kernels.gemm.choice import (
    DECODE_ROWS,
    LIBRARY,
    SUMMED,
    Gemm,
    GemmConfig,
    GemmTable,
    Ranges,
    misfit,
    ranges_of,
)

ROWS, COLUMNS = 16, 8
ANY_ROWS = 1 << 40
LEAVES, LEAF_MULTIPLE = 8, 16
"""Of K of a row-parallel layer, and what a leaf's columns are a multiple of."""


def leaves_of(width: int) -> int:
    """Leaves that the inputs of a row-parallel layer are cut into, a power of two up to LEAVES; 1: they cannot be."""
    return next(n for n in (8, 4, 2, 1) if n == 1 or width % (n * LEAF_MULTIPLE) == 0)


def ranges(gemm: Gemm, table: GemmTable, takes_parts: bool, leaves: int, on_cpu: bool) -> Ranges:
    """What multiplies, for all numbers of rows. takes_parts: the consumer adds up sums over parts of K. leaves: of this
    rank's K, in mode "tp"; 0: mode "batch"."""
    is_tree = leaves > 0 and gemm.kind in SUMMED
    if on_cpu:
        return ((ANY_ROWS, GemmConfig("blocks", split_k=leaves if is_tree else 1, nodes=is_tree)),)
    parts = leaves if is_tree else _parts_of(gemm.k) if gemm.kind in SUMMED and takes_parts else 1
    if gemm.k % 8:
        raise ValueError(f"exact_bits: {gemm.k} inputs of {gemm.kind}: must be a multiple of 8")
    many = GemmConfig("split", split_k=parts) if parts > 1 else LIBRARY
    measured, own = table.measured(gemm), _OWN if parts == 1 else _OWN_IN_PARTS
    ends = sorted({1} | {most for most, _ in (*measured, *own) if most <= DECODE_ROWS})
    by_rows = {rows: _for_rows(gemm, rows, measured, parts, many) for rows in ends}
    if gemm.fused and not leaves and gemm.kind != "head" and (alone := one_row.config_for(gemm.k, parts)):
        by_rows[1] = alone
    return ranges_of((most, replace(config, nodes=is_tree)) for most, config in [*by_rows.items(), (ANY_ROWS, many)])


def _parts_of(k: int) -> int:
    """Of a K that may be cut: two, or three where one row gains by it (one_row.py), of whole steps of all kernels."""
    wanted = 3 if k == 3 * one_row.COLUMNS else 2
    return wanted if k % (wanted * max(config.block_k for _, config in _OWN_IN_PARTS)) == 0 else 1


def without_library(by_rows: Ranges, k: int) -> Ranges:
    """The same with a kernel of our own where the library would multiply."""
    return tuple((most, replace(_cut(k, _ANY_TILES, config.parts), nodes=config.nodes)
                  if config.kernel in ("library", "split") else config) for most, config in by_rows)  # fmt: skip


def _for_rows(gemm: Gemm, rows: int, measured: Ranges, parts: int, otherwise: GemmConfig) -> GemmConfig:
    """What was measured for so many rows, if it cuts K into so many parts, or two for more; else what we have for few
    rows. A part is of whole steps."""
    config = next((config for most, config in measured if rows <= most), None)
    kinds = ("library", "split", "decode") if rows > 1 else ("split", "decode")  # the library's for a vector differs
    if config is not None and config.kernel in kinds and config.parts == min(parts, 2):
        return _cut(gemm.k, config, parts)
    own = next((config for most, config in (_OWN if parts == 1 else _OWN_IN_PARTS) if rows <= most), otherwise)
    if gemm.kind == "gate_up" and own is not otherwise and rows <= 32:
        own = _GATED
    own = _cut(gemm.k, own, parts)
    return otherwise if misfit(gemm, own) else own


def _cut(k: int, config: GemmConfig, parts: int) -> GemmConfig:
    """The same over parts of K, in steps that a part has a whole number of."""
    block_k = config.block_k
    while parts > 1 and block_k > LEAF_MULTIPLE and k // parts % block_k:
        block_k //= 2
    return replace(config, split_k=parts, block_k=block_k)


_OWN: Ranges = (
    (16, GemmConfig("decode", 64, 16, 256, 5)),
    (32, GemmConfig("decode", 64, 32, 128, 5)),
    (64, GemmConfig("decode", 64, 64, 128, 4)),
)
"""What is launched for few rows, where the library leaves the memory idle."""
_OWN_IN_PARTS: Ranges = (
    (16, GemmConfig("decode", 64, 16, 256, 5)),
    (32, GemmConfig("decode", 64, 32, 256, 4)),
    (64, GemmConfig("decode", 64, 64, 128, 6)),
)
"""The same over parts of K."""
_GATED = GemmConfig("decode", 64, 32, 128, 5)
"""The same for gate and up, of which a program has a tile each."""
_ANY_TILES = GemmConfig("decode", 128, 128, 64, 4, num_warps=8)


_settings_lock = threading.Lock()
_users: list[tuple[Any, Any, Any]] = []
"""What the settings were before the first of those that are within library_without_parts; one entry for each."""


@contextmanager
def library_without_parts() -> Iterator[None]:
    """Within it torch multiplies bfloat16 and float16 by cuBLASLt, which then takes no algorithm that cuts K. These are
    settings of the process: they stay until the last thread has left, and other products take the same way meanwhile.
    """
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


def linear_in_blocks(x: Tensor, weight: Tensor, config: GemmConfig) -> Tensor:
    """x [M, K] @ weight [N, K]^T -> [M, N] in x's dtype; with config.split_k > 1 [split_k, M, N], sums over parts of K.
    """
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
    sums = torch.stack(parts).to(dtype)
    return sums if count > 1 else sums[0]
