"""Names of matrix products and of the kernels for them: plain data, which goes to other ranks and into files. No
torch."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kernel = Literal[
    "library", "split", "fma", "tile", "roles", "int4", "int4_whole", "stream", "blocks", "scaled",
    "widened", "twin",
]  # fmt: skip

KINDS = ("qkv", "o", "gate_up", "down", "head")
SUMMED = ("o", "down")
"""Kinds whose consumer, add + RMSNorm or the all-reduce, adds up sums over parts of K."""
SCRATCH_FLOATS = 1 << 21
"""Room for the partial sums of "int4_whole" with split_k > 1, in float32."""
SHARED_BYTES = 227 << 10
"""Bytes of shared memory that a program has on an H100 or H200; an A100 has fewer."""

ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Dtypes that are not quantised, by torch's names, and their bytes."""
WIDE = tuple(ITEM_SIZES)
FP8 = "float8_e4m3fn"
INT4, MXFP4, NVFP4, INT8 = "int4", "mxfp4", "nvfp4", "int8"
PACKED = (INT4, MXFP4, NVFP4, INT8)
"""Dtypes, in this table, of weights of 4 and 8 bits that are widened in registers: gemm/packed.py, of experts
moe/packed.py."""

ANY_ROWS = 1 << 40
SKINNY_ROWS, STREAM_ROWS, TILE_ROWS, INT4_ROWS = 4, 8, 256, 512
"""Maximum rows of the kernels "fma", "stream", "tile", "int4": more go to the library, by weights that were widened."""


class Traits(NamedTuple):
    """Bounds of a kernel, whatever its numbers: the weights that it multiplies by, and the most rows of x."""

    dtypes: tuple[str, ...] = WIDE
    most_rows: int = ANY_ROWS


KERNELS: dict[Kernel, Traits] = {
    "library": Traits((*WIDE, FP8, *PACKED)),  # cuBLAS, or what stands for it with such weights
    "split": Traits(),  # cuBLAS over split_k equal parts of K, whose float32 sums go to the consumer
    "fma": Traits(WIDE, SKINNY_ROWS),  # gemm/fma.py
    "stream": Traits(("bfloat16", "float16", FP8, *PACKED), STREAM_ROWS),  # gemm/stream.py; PACKED: packed_row.py
    "tile": Traits((*WIDE, FP8), TILE_ROWS),  # gemm/tile.py; its consumer too gets split_k sums where there are several
    "roles": Traits((FP8,)),  # gemm/roles.py; it hands on sums over parts too
    "int4": Traits(PACKED, INT4_ROWS),  # gemm/packed_tile.py; it hands on sums over parts too
    "int4_whole": Traits(PACKED, INT4_ROWS),  # packed_tile.py, with the parts added up inside
}
"""Kernels that a table may name. Plans have others for "library" where it cannot multiply. "scaled": cuBLAS over groups
of e4m3 with their scales. "widened": the library, once weights in fewer bits are made wide. "twin": plain PyTorch, of
e4m3 on a CPU. With exact_bits a CPU has "blocks": fixed_order.py, whose bits do not depend on the rows."""


class Gemm(NamedTuple):
    """One GEMM of a model on one rank: x [rows, k] @ weight [n, k]^T."""

    kind: str
    """Kind of the layer, one of KINDS; n of gate_up counts both."""
    n: int
    k: int
    dtype: str
    """Dtype of the weight, by torch's name."""
    fused: bool
    """The model runs on one rank, so a skinny kernel computes norm, activation and residual too."""


@dataclass(frozen=True)
class GemmConfig:
    """Kernel that multiplies, and how it cuts the work. Plain data: it goes to other ranks and into files.

    block_n: weight rows of a tile (for "tile" with the activation: gates, and as many ups). block_m: rows of x of a
    tile. block_k: columns of a step. stages: steps in flight. split_k: parts of K that are computed side by side, or
    experts of a token. num_warps: of a program; for "roles" those that multiply.

    In which order "fma", "tile" and "roles" sum along K follows from these numbers and K alone.
    Neither the number of rows nor the other rows change it.
    """

    kernel: Kernel = "library"
    block_n: int = 0
    block_m: int = 0
    block_k: int = 0
    stages: int = 0
    split_k: int = 1
    num_warps: int = 4
    max_registers: int = 0
    """Maximum registers of a thread, of "fma" and "stream"; 0: as many as the compiler likes. Where it has a limit the
    compiler keeps more loads in flight, and with fewer registers the next kernel's programs start earlier."""
    round_sums: bool = False
    """Sums over parts of K are rounded to x's dtype, for "split", "tile" and "blocks" (fixed_order.py)."""

    def __str__(self) -> str:
        """Kernel, and the numbers that it takes."""
        sizes = "x".join(str(size) for size in (self.block_n, self.block_m, self.block_k) if size)
        stages, parts = f" {self.stages} stages" * bool(self.stages), f" {self.split_k} parts" * (self.split_k > 1)
        warps = f" {self.num_warps} warps" * (self.num_warps != 4)
        registers = f" {self.max_registers} registers" * bool(self.max_registers)
        return f"{self.kernel} {sizes}{stages}{parts}{warps}{registers}".replace("  ", " ").strip()

    @property
    def is_skinny(self) -> bool:
        """Whether it can compute norm, activation and residual too."""
        return self.kernel in ("fma", "stream")

    @property
    def is_our_kernel(self) -> bool:
        """Whether it is a kernel of this package, which lets the next kernel start before it ends (PDL)."""
        return self.kernel in KERNELS and self.kernel not in ("library", "split")

    @property
    def parts(self) -> int:
        """Sums over parts of K that the consumer gets as [parts, rows, n], float32 but for `round_sums`; 1: the result
        [rows, n]."""
        return 1 if self.is_skinny or self.kernel == "int4_whole" else self.split_k


LIBRARY = GemmConfig()


def streaming(warps: int, stages: int, block_n: int = 16, columns: int = 128, max_registers: int = 0) -> GemmConfig:
    """The kernel "stream", `columns` of a step for each warp: 128 by weights of 4 bits, 64 or 128 of 16, 128 or 256 of
    8. In half as many steps of twice the columns it compiles twice as fast, and half the stages keep as much in flight.
    """
    return GemmConfig(
        "stream", block_n, block_k=columns * warps, stages=stages, num_warps=warps, max_registers=max_registers
    )


def with_roles(block_n: int, block_m: int, stages: int, parts: int = 1) -> GemmConfig:
    """The kernel "roles", with the warps that its rows ask for."""
    return GemmConfig("roles", block_n, block_m, 128, stages, parts, 4 if block_m == 64 else 8)


Ranges = tuple[tuple[int, GemmConfig], ...]
"""(most rows, config) ascending: the first that holds the rows is taken, past the last one the library."""
Choices = dict[Gemm, dict[int, GemmConfig]]
"""GEMM -> rows -> config, of which rank 0 informs all ranks. What is not there goes to the library."""
