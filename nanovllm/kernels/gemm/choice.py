"""What multiplies x [rows, k] by a weight [n, k]^T: tables of what was measured, and a short rule for everything else.

A table is a JSON file for some devices: `tuned/*.json`, or the file that EngineConfig.kernel_choices names. It gives
for each GEMM of a model ranges of rows, each with the kernel that made whole steps shortest (scripts/tune_steps.py
writes one). Whole steps, because our kernels fetch weights while the kernel before them ends: the best GEMM by itself
is not the best one among attention, norms and all-reduces.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

Kernel = Literal[
    "library", "split", "fma", "decode", "specialized", "int4", "int4_whole", "quantized_row", "blocks", "one_row"
]

SKINNY_ROWS = 4
"""Most rows of the kernel "fma"."""
DECODE_ROWS = 256
"""Most rows of the kernel "decode"; more rows go to the library."""
KINDS = ("qkv", "o", "gate_up", "down", "head")
SUMMED = ("o", "down")
"""Kinds whose consumer, add + RMSNorm or the all-reduce, adds up sums over parts of K."""
SCRATCH_FLOATS = 1 << 21
"""Room for the partial sums of "int4_whole" with split_k > 1, in float32."""

FP8 = "float8_e4m3fn"
INT4 = "int4"
"""Dtype, in this table, of weights of 4 bits (int4.py)."""
INT4_ROWS = 512
"""Most rows of the kernel "int4"; for more rows weights are widened."""
_INT4_TILES = ((16, 6), (32, 5), (64, 4), (128, 3))
"""(rows of x, stages) of tiles of 64 weight rows."""
_ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Dtypes that our kernels take, and their bytes; FP8 has kernels of its own (kernels/fp8/)."""
_SHIPPED = Path(__file__).parent / "tuned"
_SMALL_WEIGHT_BYTES = 16 << 20
_SHARED_BYTES = 227 << 10
"""That a program has on an H100 or H200, or an A100 less some."""
PROCESSORS = 132
"""Multiprocessors of an H100 or H200; only the time that kernels take depends on it."""


class Gemm(NamedTuple):
    """One GEMM of a model on one rank: x [rows, k] @ weight [n, k]^T."""

    kind: str
    """What the layer is, one of KINDS; n of gate_up counts both."""
    n: int
    k: int
    dtype: str
    """Of the weight, by torch's name."""
    fused: bool
    """The model runs on one rank, so a skinny kernel computes norm, activation and residual too."""


@dataclass(frozen=True)
class GemmConfig:
    """What multiplies, and how it cuts the work. Plain data: it goes to other ranks and into files.

    kernel: "library": cuBLAS. "split": cuBLAS over split_k equal parts of K, whose float32 sums go to the consumer.
    "fma": skinny.py. "decode": decode.py; its consumer too gets split_k sums where there are several.
    "specialized": likewise, by weights in FP8 (fp8/specialized.py); num_warps are those that multiply. "int4": int4.py,
    for weights of 4 bits; "int4_whole" adds up the parts itself. "quantized_row": one row by weights in FP8
    (fp8/one_row.py) or of 4 bits (int4_row.py). "blocks": fixed_order.py, a CPU's way to bits that do not depend on the
    rows. "one_row": one_row.py, for the same.
    block_n: weight rows of a tile (for "decode" with the activation: gates, and as many ups). block_m: rows of x of a
    tile. block_k: columns of a step. stages: steps in flight. split_k: parts of K that are computed side by side.

    In which order "fma", "decode" and "specialized" sum along K follows from these numbers and K alone.
    Neither the number of rows nor the other rows change it.
    """

    kernel: Kernel = "library"
    block_n: int = 0
    block_m: int = 0
    block_k: int = 0
    stages: int = 0
    split_k: int = 1
    num_warps: int = 4
    nodes: bool = False
    """Sums over parts of K are rounded to x's dtype, for "split", "decode" and "blocks" (fixed_order.py)."""

    @property
    def is_skinny(self) -> bool:
        """It can compute norm, activation and residual too."""
        return self.kernel in ("fma", "quantized_row")

    @property
    def is_own(self) -> bool:
        """A kernel of our own, which lets the next kernel start before it ends (PDL)."""
        return self.is_skinny or self.kernel in ("decode", "specialized", "int4", "int4_whole")

    @property
    def parts(self) -> int:
        """Sums over parts of K that the consumer gets as [parts, rows, n], float32 but for `nodes`; 1: the result
        [rows, n]."""
        return 1 if self.is_skinny or self.kernel == "int4_whole" else self.split_k


LIBRARY = GemmConfig()
Ranges = tuple[tuple[int, GemmConfig], ...]
"""(most rows, config) ascending: the first that holds the rows is taken, past the last one the library."""
Choices = dict[Gemm, dict[int, GemmConfig]]
"""GEMM -> rows -> config, of which rank 0 informs all ranks. What is not there goes to the library."""


def misfit(gemm: Gemm, config: GemmConfig, tma: bool = True) -> str:
    """Why `config` cannot multiply by this weight; "" where it can. tma: the device has tensor copy engines."""
    k = gemm.k
    if config.kernel == "library":
        return ""
    takes = {"quantized_row": (INT4, FP8), "specialized": (FP8,), "int4": (INT4,), "int4_whole": (INT4,)}
    if gemm.dtype not in takes[config.kernel] if config.kernel in takes else gemm.dtype == INT4:
        return f"{config.kernel!r} does not multiply by weights of {gemm.dtype}"
    if gemm.dtype == FP8:
        reason = _fp8_misfit(gemm, config)
        if reason:
            return reason
    if config.parts > 1 and gemm.kind not in SUMMED:
        return f"the consumer of {gemm.kind} takes no parts of a sum"
    if config.kernel == "split":
        return "" if config.split_k > 1 and k % config.split_k == 0 else f"K={k} has no {config.split_k} equal parts"
    if gemm.dtype == INT4:
        if config.kernel == "quantized_row":
            return row_misfit(k, gemm.kind == "gate_up", config)
        left_out = config.split_k > -(-k // 128)
        return f"split_k={config.split_k} leaves a part without columns, K={k}" if left_out else ""
    if gemm.dtype != FP8 and (gemm.dtype not in _ITEM_SIZES or k % 8):
        return f"dtype {gemm.dtype} and K={k}: our kernels take {', '.join(_ITEM_SIZES)} and multiples of 8"
    if config.kernel in ("decode", "specialized"):
        if config.split_k > -(-k // config.block_k):
            return f"split_k={config.split_k} leaves a part without columns, K={k}"
        return "" if tma else "the device has no tensor copy engine"
    if config.kernel == "fma" and config.split_k > 1:
        return "it takes no parts of K"
    if config.kernel == "fma" and gemm.kind == "gate_up" and config.block_n < 2 * config.num_warps:
        return "a warp has one weight row; gate and up need two"
    return ""


def _fp8_misfit(gemm: Gemm, config: GemmConfig) -> str:
    kernels = ("decode", "specialized", "quantized_row")
    if config.kernel not in kernels or gemm.k % 16:
        return f"K={gemm.k} by {config.kernel!r}: FP8 has {kernels}, for multiples of 16"
    if config.block_k % 128 or 128 % config.block_n:
        return f"block_k={config.block_k}, block_n={config.block_n}: must be steps of 128, and of rows in a block"
    if config.kernel == "decode":
        return ""
    if config.kernel == "specialized":
        return _specialized_misfit(gemm.kind == "gate_up", config)
    fits = config.block_n == 16 and config.block_k == 128 * config.num_warps and config.split_k == 1
    return "" if fits else f"{config}: must have 16 weight rows, a warp for each 128 columns of a step, no parts of K"


def _specialized_misfit(paired: bool, config: GemmConfig) -> str:
    sums = config.block_m // (16 * max(1, config.num_warps)) * (2 if paired else 1) * config.block_n
    tiles = config.block_m in (64, 128, 256) and config.block_n in ((128,) if paired else (64, 128)) and sums <= 256
    if not tiles or config.block_k != 128 or config.num_warps != (4 if config.block_m == 64 else 8):
        return f"{config}: must have 64, 128 or 256 rows, 4 warps for 64 and 8 for more, and sums that registers hold"
    nbytes = config.stages * (128 * (config.block_m + config.block_n * (2 if paired else 1)) + 4 * config.block_m + 16)
    nbytes += 128 * 64 * config.num_warps // 4 if paired else 0  # results on their way to another order
    return "" if nbytes <= _SHARED_BYTES else f"{config} needs {nbytes} bytes of shared memory"


def row_misfit(k: int, paired: bool, config: GemmConfig) -> str:
    """Why "quantized_row" cannot multiply by weights of 4 bits; "" where it can. paired: with SiLU(gate) * up."""
    if config.block_n not in ((32, 64) if paired else (16, 32, 64)):
        return f"block_n={config.block_n}: must be 1, 2 or 4 tiles of 16 weight rows; gate and up need two"
    steps = -(-k // (128 * config.num_warps))
    if steps < 2 or config.block_k != 128 * config.num_warps:
        return f"K={k}: {config.num_warps} warps take steps of 128 columns each, and more than one"
    # x, words with scales of groups of 32 (the most), and the warps' sums
    nbytes = (2 * 128 << (steps - 1).bit_length()) + (config.stages + 1) * config.block_n * (64 + 16)
    nbytes = (nbytes + config.block_n * 32) * config.num_warps
    return "" if nbytes <= _SHARED_BYTES else f"K={k}: {config} needs {nbytes} bytes of shared memory"


# By projection for one row, where it is fused with what surrounds it.
_ONE_ROW = {
    "qkv": GemmConfig("fma", 16, block_k=512, stages=3),
    "o": GemmConfig("fma", 16, block_k=1024, stages=2, num_warps=8),
    "gate_up": GemmConfig("fma", 4, block_k=1024, stages=3, num_warps=2),
}
_ONE_ROW_ALONE = {"qkv": GemmConfig("fma", 4, block_k=1024, stages=3, num_warps=2)}
_ONE_ROW_DEFAULT = GemmConfig("fma", 8, block_k=1024, stages=3)


def fallback(gemm: Gemm, rows: int) -> GemmConfig:
    """For what no table has: our skinny kernel for one row, and up to 16 kernels of our own where the weight is so
    small that the library cannot keep the memory busy."""
    if gemm.dtype == FP8:
        return _fp8_fallback(gemm, rows)
    if gemm.dtype == INT4:
        return int4_row_config(gemm) if rows == 1 else int4_config(gemm, rows)
    item_size = _ITEM_SIZES.get(gemm.dtype)
    if item_size is None or gemm.k % 8:
        return LIBRARY
    if rows == 1:
        return (_ONE_ROW if gemm.fused else _ONE_ROW_ALONE).get(gemm.kind, _ONE_ROW_DEFAULT)
    if rows > 16 or gemm.n * gemm.k * item_size > _SMALL_WEIGHT_BYTES:
        return LIBRARY
    if rows == 2 or item_size > 2:
        return GemmConfig("fma", 16, block_k=512, stages=1) if rows <= SKINNY_ROWS else LIBRARY
    if gemm.kind == "gate_up":
        return GemmConfig("decode", 64, 32, 128, 5)
    return GemmConfig("decode", 64, 16, 256, 5, _parts(gemm, -(-gemm.n // 64), 3 * PROCESSORS))


def _parts(gemm: Gemm, programs: int, room: int) -> int:
    """Of K: as many, where the consumer adds them up, as keep so many programs resident with work for each."""
    return max(1, min(4, room // programs, gemm.k // 256)) if gemm.kind in SUMMED else 1


_FP8_TILES: dict[str, tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...]] = {
    "qkv": ((128, ((64, 64, 6),)),),
    "gate_up": ((64, ((128, 64, 4),)), (128, ((128, 128, 4),))),
    "o": ((64, ((64, 64, 6),)), (128, ((64, 128, 8), (128, 128, 6))), (DECODE_ROWS, ((64, 256, 5), (128, 256, 4)))),
}
"""(most rows, tiles (weight rows, rows, stages) of "specialized") for more than 16 rows; what is not there: the
library. "o" is for all whose consumers add up parts of K."""


def _fp8_fallback(gemm: Gemm, rows: int) -> GemmConfig:
    """Kernels of their own for one row and for more than 16; where the consumer adds up parts of K, as many of them as
    keep all programs resident, by the tile that makes most. So it was best for the four layers of 8B on an H200."""
    if gemm.k % 16:
        return LIBRARY
    summed = gemm.kind in SUMMED
    if rows == 1:
        long = gemm.k > 4096
        warps, stages = (8 if long else 4, 3 if long else 8) if summed else (4, 3 if long else 4)
        if not gemm.fused and (warps == 4 or gemm.k % 1024):  # the best for 32B over two GPUs
            warps, stages = 4, {"qkv": 8, "o": 6}.get(gemm.kind, 4)
        return GemmConfig("quantized_row", 16, block_k=128 * warps, stages=stages, num_warps=warps)
    by_rows = _FP8_TILES.get("o" if summed else gemm.kind, ())
    if rows <= 16 and by_rows:
        parts = _parts(gemm, -(-gemm.n // 64), 3 * PROCESSORS)
        return GemmConfig("decode", 64, 16, 256, 3 if gemm.kind == "gate_up" else 4, parts)
    found = []
    for block_n, block_m, stages in next((tiles for most, tiles in by_rows if rows <= most), ()):
        programs, room = -(-gemm.n // block_n) * -(-rows // block_m), PROCESSORS * (2 if block_m == 64 else 1)
        parts = _parts(gemm, programs, room)
        config = GemmConfig("specialized", block_n, block_m, 128, stages, parts, 4 if block_m == 64 else 8)
        found.append((programs * parts, config))
    return max(found, key=lambda one: one[0])[1] if found else LIBRARY


def int4_row_config(gemm: Gemm) -> GemmConfig:
    """For one row and 4-bit weights, as it was best for 8B on an H200."""
    block_n, stages, warps = {"gate_up": (64, 2, 4), "o": (16, 4, 8), "down": (16, 3, 8)}.get(gemm.kind, (16, 2, 8))
    warps = warps if gemm.k > 1024 else 4
    return GemmConfig("quantized_row", block_n, block_k=128 * warps, stages=stages, num_warps=warps)


def int4_config(gemm: Gemm, rows: int) -> GemmConfig:
    """For 4-bit weights: tiles that hold all rows, up to 128, and as many parts of K as keep two or more programs on
    each processor; more than four pay where the sums are short.

    Parts that the kernel adds up itself are long: those of 1,024 columns save 5 to 8 % of 8B's steps of 2 to 32 rows,
    those of 256 cost 3 to 11 % of 0.6B's, where programs would wait for each other longer than they multiply.
    """
    if rows > INT4_ROWS:
        return LIBRARY
    block_m, stages = next(tile for tile in _INT4_TILES if rows <= tile[0] or tile is _INT4_TILES[-1])
    block_n = 64
    if block_m == 16 and gemm.n >= 1 << 14:
        block_n, stages = 128, 5
    programs, parts = -(-gemm.n // block_n) * -(-rows // block_m), 1
    most = 8 if block_m == 16 else 4
    shortest = 256 if gemm.kind in SUMMED else 1024
    while parts < most and programs * parts < 2 * PROCESSORS and gemm.k >= 2 * shortest * parts:
        parts *= 2
    if gemm.kind in SUMMED or parts == 1:
        return GemmConfig("int4", block_n, block_m, 128, stages, parts)
    fits = parts * programs * block_n * block_m <= SCRATCH_FLOATS
    return GemmConfig("int4_whole", block_n, block_m, 128, stages, parts if fits else 1)


def merges_before(rows: int, o_weight_bytes: int) -> bool:
    """Whether attention's splits are to be merged before the output projection starts to fetch its weight.

    Launched as soon as the merge is, a large projection fills the chip with programs that wait: one row of 8B (33 MB)
    takes 4,131 us then and 3,905 without, of 4B (21 MB) 2,276 and 2,287; of 0.6B (4 MB), with the kernels before these,
    613 and 650. With more rows it was best to launch everything early.
    """
    return rows == 1 and o_weight_bytes > 24 << 20


@dataclass(frozen=True)
class GemmTable:
    """What was measured on some devices."""

    devices: tuple[str, ...]
    """Beginnings of their names, as torch.cuda.get_device_name gives them."""
    entries: Mapping[Gemm, Ranges]

    def is_tuned(self, gemm: Gemm) -> bool:
        return bool(self.measured(gemm))

    def measured(self, gemm: Gemm) -> Ranges:
        """The entry of this very GEMM, for float16 that of bfloat16; empty where there is none."""
        return self.entries.get(gemm._replace(dtype="bfloat16") if gemm.dtype == "float16" else gemm, ())

    def lookup(self, gemm: Gemm, rows: int, tma: bool = True) -> GemmConfig:
        """What multiplies `rows` rows: the entry of this very GEMM, else `fallback`; only what the device (`tma`) and
        the weight allow."""
        ranges = self.measured(gemm)
        if not ranges:
            config = fallback(gemm, rows)
        else:
            config = next((config for most, config in ranges if rows <= most), LIBRARY)
        return config if not misfit(gemm, config, tma) else LIBRARY


def shipped_table(device_name: str) -> GemmTable:
    """The table of the package for this device; an empty one where there is none."""
    for path in sorted(_SHIPPED.glob("*.json")):
        table = load(path)
        if device_name.startswith(table.devices):
            return table
    return GemmTable((device_name,), {})


def load(path: str | os.PathLike[str]) -> GemmTable:
    """The table of a file that `save` wrote. Raises ValueError with the path where the file is missing or spoilt."""
    try:
        return _parse(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ValueError(f"kernel_choices={str(path)!r}: no table of GEMM choices ({reason})") from error


def save(path: str | os.PathLike[str], table: GemmTable) -> None:
    """Writes the file whole or not at all, so that a process that reads it meanwhile gets the old one or the new."""
    gemms = []
    for gemm, ranges in sorted(table.entries.items()):
        lines = ",\n   ".join(json.dumps([most, _plain(config)]) for most, config in ranges)
        gemms.append(json.dumps(gemm._asdict())[:-1] + f', "rows": [\n   {lines}\n  ]}}')
    text = f'{{\n "devices": {json.dumps(table.devices)},\n "gemms": [\n  ' + ",\n  ".join(gemms) + "\n ]\n}\n"
    target = Path(path)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=target.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, target)


def _plain(config: GemmConfig) -> dict[str, Any]:
    """The fields that differ from their defaults, and the kernel."""
    return {
        name: value for name, value in asdict(config).items() if name == "kernel" or value != getattr(LIBRARY, name)
    }


def _parse(raw: dict[str, Any]) -> GemmTable:
    entries: dict[Gemm, Ranges] = {}
    for item in raw["gemms"]:
        gemm = Gemm(*(item[name] for name in Gemm._fields))
        if gemm.kind not in KINDS or not all(type(size) is int and size > 0 for size in (gemm.n, gemm.k)):
            raise ValueError(f"{gemm}: a kind of {KINDS} and positive sizes expected")
        entries[gemm] = tuple((most, _checked(gemm, most, GemmConfig(**config))) for most, config in item["rows"])
        ends = [most for most, _ in entries[gemm]]
        if not ends or any(type(end) is not int for end in ends) or ends != sorted(set(ends)) or ends[0] < 1:
            raise ValueError(f"{gemm}: rows {ends} do not ascend")
    return GemmTable(tuple(str(device) for device in raw["devices"]), entries)


def _checked(gemm: Gemm, most: int, config: GemmConfig) -> GemmConfig:
    """`config`; ValueError where it cannot multiply `most` rows by this weight."""
    kernels = [kernel for kernel in get_args(Kernel) if kernel not in ("blocks", "one_row")]
    if config.kernel not in kernels or config.nodes:
        raise ValueError(f"{gemm}: {config}: must have one of the kernels {kernels}, and no nodes")
    numbers = [getattr(config, field.name) for field in fields(config) if field.name not in ("kernel", "nodes")]
    bounds = {"fma": SKINNY_ROWS, "quantized_row": 1, "decode": DECODE_ROWS}
    bounds |= {"int4": INT4_ROWS, "int4_whole": INT4_ROWS}
    sizes = [config.block_n, config.block_k, config.stages] if config.is_own else []
    sizes += [config.block_m] if sizes and not config.is_skinny else []
    sizes += [config.split_k, config.num_warps]
    if any(type(number) is not int or number < 0 for number in numbers) or not all(sizes):
        raise ValueError(f"{gemm}: {config} has sizes that are no positive integers")
    if most > bounds.get(config.kernel, most):
        raise ValueError(f"{gemm}: {config.kernel!r} takes at most {bounds[config.kernel]} rows, not {most}")
    reason = misfit(gemm, config)
    if reason:
        raise ValueError(f"{gemm}: {config.kernel!r}: {reason}")
    return config


def ranges_of(by_rows: Iterable[tuple[int, GemmConfig]]) -> Ranges:
    """(rows, config), ascending, as the fewest ranges: equal neighbours become one."""
    ranges: list[tuple[int, GemmConfig]] = []
    for rows, config in by_rows:
        if ranges and ranges[-1][1] == config:
            ranges.pop()
        ranges.append((rows, config))
    return tuple(ranges)
