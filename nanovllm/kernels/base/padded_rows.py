"""Matrices with room for more rows after their last one.

A tensor descriptor that reaches past the end of a matrix reads zeros there, and does so slowly: a GEMM of 96 rows
in tiles of 64 took longer than one of 128 (H200). Where the memory after the last row is the matrix's own, a
descriptor may as well read it, since a row's result does not depend on the other rows.
"""

import torch


def padded_rows(rows: int, tile: int = 64) -> int:
    """`rows` up to a whole `tile` of a GEMM kernel (by default of kernels/gemm/tile.py)."""
    return rows if rows > 256 else -(-rows // tile) * tile


def empty_rows(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised contiguous [rows, columns] at the start of memory for padded_rows(rows)."""
    return torch.empty(padded_rows(rows), columns, dtype=dtype, device=device)[:rows]


def empty_product(
    rows: int, columns: int, parts: int, gated: bool, dtype: torch.dtype, device: torch.device,
    part_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # fmt: skip
    """Empty result of a GEMM: [rows, columns], or of part_dtype [parts, rows, columns], sums over several parts of K.
    gated: the activation's result, which the next GEMM reads, with the room of empty_rows."""
    if gated:
        return empty_rows(rows, columns, dtype, device)
    shape, dtype = ((parts, rows, columns), part_dtype) if parts > 1 else ((rows, columns), dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def rows_in_memory(x: torch.Tensor) -> int:
    """Rows that may be read from the start of x [rows, columns], contiguous: its own and those that follow."""
    elements = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return int(elements // x.shape[1])
