"""GEMM kernels for EngineConfig.exact_bits, where a row's bits must not depend on its step.

Tensor cores add up products along K in one order, whatever the tile and the instruction (measured on compute
capability 9.0). So a kernel's bits follow from how it cuts K alone. For "batch" each layer has one number of parts of
K for all numbers of rows: two where the consumer adds them up, as most of the measured choices have, and K is long.
For "tp" the parts of a row-parallel layer are leaves of a tree over the whole K, of all ranks: sums are added in pairs,
and the sum of any two, like a leaf's, is rounded to the model's dtype. A rank has a power of two of the leaves, its sum
is a node of the tree, and ranks exchange no more than by default. FMA kernels, which have other orders, and cuBLAS's
own parts of K are left out.
"""

from dataclasses import replace

from nanovllm.kernels.plan.config import ANY_ROWS, LIBRARY, SUMMED, TILE_ROWS, Gemm, GemmConfig, Ranges
from nanovllm.kernels.plan.fits import why_not
from nanovllm.kernels.plan.table import GemmTable, ranges_of

LEAVES, LEAF_MULTIPLE = 8, 16
"""Leaves that K of a row-parallel layer is cut into, and the multiple that a leaf's columns must be."""


def leaves_of(width: int) -> int:
    """Leaves that the inputs of a row-parallel layer are cut into, a power of two up to LEAVES; 1: they cannot be."""
    return next(n for n in (8, 4, 2, 1) if n == 1 or width % (n * LEAF_MULTIPLE) == 0)


def fixed_ranges(gemm: Gemm, table: GemmTable, takes_parts: bool, leaves: int, on_cpu: bool) -> Ranges:
    """Kernels for all numbers of rows. takes_parts: the consumer adds up sums over parts of K. leaves: of this rank's
    K, in mode "tp"; 0: mode "batch"."""
    is_tree = leaves > 0 and gemm.kind in SUMMED
    if on_cpu:
        return ((ANY_ROWS, GemmConfig("blocks", split_k=leaves if is_tree else 1, round_sums=is_tree)),)
    parts = leaves if is_tree else _parts_of(gemm.k) if gemm.kind in SUMMED and takes_parts else 1
    if gemm.k % 8:
        raise ValueError(f"exact_bits: {gemm.k} inputs of {gemm.kind}: must be a multiple of 8")
    many = GemmConfig("split", split_k=parts) if parts > 1 else LIBRARY
    measured, own = table.measured(gemm), _OWN if parts == 1 else _OWN_IN_PARTS
    ends = sorted({1} | {most for most, _ in (*measured, *own) if most <= TILE_ROWS})
    by_rows = {rows: _for_rows(gemm, rows, measured, parts, many) for rows in ends}
    all_rows = [*by_rows.items(), (ANY_ROWS, many)]
    return ranges_of((most, replace(config, round_sums=is_tree)) for most, config in all_rows)


def _parts_of(k: int) -> int:
    """Number of parts of a K that may be cut: two, if both have whole steps of all kernels."""
    return 2 if k % (2 * max(config.block_k for _, config in _OWN_IN_PARTS)) == 0 else 1


def without_library(by_rows: Ranges, k: int) -> Ranges:
    """Replaces the library by a kernel of our own in these ranges."""
    return tuple((most, replace(_cut(k, _ANY_TILES, config.parts), round_sums=config.round_sums)
                  if config.kernel in ("library", "split") else config) for most, config in by_rows)  # fmt: skip


def _for_rows(gemm: Gemm, rows: int, measured: Ranges, parts: int, otherwise: GemmConfig) -> GemmConfig:
    """Measured kernel for so many rows, if it cuts K into so many parts, or two for more; else our default for few
    rows. A part has whole steps."""
    config = next((config for most, config in measured if rows <= most and config.kernel != "stream"), None)
    kinds = ("library", "split", "tile") if rows > 1 else ("split", "tile")  # the library's for a vector differs
    if config is not None and config.kernel in kinds and config.parts == min(parts, 2):
        return _cut(gemm.k, config, parts)
    own = next((config for most, config in (_OWN if parts == 1 else _OWN_IN_PARTS) if rows <= most), otherwise)
    if gemm.kind == "gate_up" and own is not otherwise and rows <= 32:
        own = _GATED
    own = _cut(gemm.k, own, parts)
    return otherwise if why_not(gemm, own) else own


def _cut(k: int, config: GemmConfig, parts: int) -> GemmConfig:
    """The kernel cut into parts of K, in steps that a part has a whole number of."""
    block_k = config.block_k
    while parts > 1 and block_k > LEAF_MULTIPLE and k // parts % block_k:
        block_k //= 2
    return replace(config, split_k=parts, block_k=block_k)


_OWN: Ranges = (
    (16, GemmConfig("tile", 64, 16, 256, 5)),
    (32, GemmConfig("tile", 64, 32, 128, 5)),
    (64, GemmConfig("tile", 64, 64, 128, 4)),
)
"""Kernels for few rows, where the library leaves the memory idle."""
_OWN_IN_PARTS: Ranges = (
    (16, GemmConfig("tile", 64, 16, 256, 5)),
    (32, GemmConfig("tile", 64, 32, 256, 4)),
    (64, GemmConfig("tile", 64, 64, 128, 6)),
)
"""Kernels for few rows over parts of K."""
_GATED = GemmConfig("tile", 64, 32, 128, 5)
"""Kernel for few rows of gate and up, of which a program has a tile each."""
_ANY_TILES = GemmConfig("tile", 128, 128, 64, 4, num_warps=8)
