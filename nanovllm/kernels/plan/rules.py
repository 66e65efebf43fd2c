"""Rules for what no table has: one row in e4m3, weights of 4 bits, experts. Short, each the best for some model on an
H200. No torch."""

from dataclasses import replace
from math import inf

from nanovllm.kernels.plan.config import (
    FP8,
    INT4,
    INT4_ROWS,
    INT8,
    ITEM_SIZES,
    LIBRARY,
    MXFP4,
    NVFP4,
    PACKED,
    SCRATCH_FLOATS,
    SHARED_BYTES,
    SUMMED,
    TILE_ROWS,
    Gemm,
    GemmConfig,
    streaming,
)
from nanovllm.kernels.plan.device import Device

RULES_END_AT = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048)
"""Rows at which rules may change, but for those of experts."""
REGISTERS = 1 << 16
"""Registers of a multiprocessor."""
_INT4_TILES = ((16, 64, 6, 4), (32, 64, 5, 4), (64, 64, 4, 4), (128, 64, 3, 4))
"""(rows of x, weight rows, stages, warps) of tiles."""


def fp8_row_config(gemm: Gemm, processors: int) -> GemmConfig:
    """Kernel for one row and weights in e4m3: the best for the four products of 8B, and of 32B over two GPUs, on an
    H200."""
    if gemm.k % 16:
        return LIBRARY
    summed, long = gemm.kind in SUMMED, gemm.k > 4096
    warps, stages = (8 if long else 4, 3 if long else 8) if summed else (4, 3 if long else 4)
    if not gemm.fused and (warps == 4 or gemm.k % 1024):
        warps, stages = 4, {"qkv": 8, "o": 6}.get(gemm.kind, 4)
    return streaming(warps, stages, max_registers=_fp8_row_registers(gemm, warps, processors))


def _fp8_row_registers(gemm: Gemm, warps: int, processors: int) -> int:
    """Limit of registers for one row: so few that all programs, or two of eight warps, share the multiprocessors."""
    if gemm.kind == "gate_up":
        return 0
    steps, programs = -(-gemm.k // (128 * warps)), -(-gemm.n // 16)
    if warps == 8:
        return 128 if steps <= 16 else 0  # one that holds more of x needs more
    return 168 if steps > 16 and 2 * processors < programs <= 3 * processors else 0


def sharing(config: GemmConfig, gemm: Gemm, processors: int) -> GemmConfig:
    """A kernel for few rows that adds what adapters do, and so would take more registers, with so few that all its
    programs run at once, as they do without. As it is where it has a limit, or that would leave fewer than 128."""
    if config.max_registers or not config.is_skinny:
        return config
    outputs = gemm.n // 2 if gemm.kind == "gate_up" and config.kernel == "stream" else gemm.n
    at_once = -(-outputs // (config.block_n * processors)) * config.num_warps
    most = REGISTERS // (32 * at_once) // 8 * 8
    return replace(config, max_registers=most) if 128 <= most < 255 else config


FP8_MANY_ROWS = GemmConfig("tile", 128, 128, 128, 4, num_warps=8)
"""Kernel for e4m3 where the library cannot multiply it."""


def packed_row_config(gemm: Gemm) -> GemmConfig:
    """Kernel for one row and weights of 4 and 8 bits, the best for 8B on an H200."""
    block_n, stages, warps = {"gate_up": (64, 2, 4), "o": (16, 4, 8), "down": (16, 3, 8)}.get(gemm.kind, (16, 2, 8))
    if gemm.dtype == INT8:  # twice the bytes: all programs still share the multiprocessors at a time
        stages = 1 if gemm.kind == "gate_up" else 2
    elif gemm.dtype == NVFP4:
        block_n, stages, warps = {"qkv": (32, 3, 4), "down": (16, 4, 8)}.get(gemm.kind, (block_n, stages, warps))
    return streaming(warps if gemm.k > 1024 else 4, stages, block_n)


_SHARED_OF_TALL_TILES = 160 << 10
"""Bytes of shared memory that tiles of 256 rows need, some compilers' copies of x included."""


def _packed_tile(gemm: Gemm, rows: int) -> tuple[int, int, int, int]:
    """Rows of x, weight rows, stages and warps of a tile: the best for the four products of 8B on an H200. Eight warps
    unpack a tile twice as large, of which a processor holds one."""
    is_summed, is_wide, is_float = gemm.kind in SUMMED, gemm.n >= 1 << 14, gemm.dtype in (NVFP4, MXFP4)
    if rows > 128 and (is_summed or (is_wide and gemm.dtype == INT8)):
        return 256 if is_float else 128, 128, 3, 8
    if 32 < rows <= 64 and not is_summed and not (is_wide and gemm.dtype == INT4):
        return 64, 128, 4, 8
    if rows <= 16 and is_wide and gemm.dtype == INT4:
        return 16, 128, 5, 4
    return next(tile for tile in _INT4_TILES if rows <= tile[0] or tile is _INT4_TILES[-1])


def int4_config(gemm: Gemm, rows: int, processors: int, most_shared: int = SHARED_BYTES) -> GemmConfig:
    """Kernel for weights of 4 and 8 bits: tiles, and as many parts of K as keep two or more programs, or one of eight
    warps, on each processor; more than four pay where the sums are short. most_shared: bytes of shared memory that a
    program may have.

    Parts that the kernel adds up itself are long: those of 1,024 columns save 5 to 8 % of 8B's steps of 2 to 32 rows,
    those of 256 cost 3 to 11 % of 0.6B's, where programs would wait for each other longer than they multiply.
    """
    if rows > INT4_ROWS:
        return LIBRARY
    block_m, block_n, stages, warps = _packed_tile(gemm, rows)
    if most_shared < _SHARED_OF_TALL_TILES:
        block_m = min(block_m, 128)
    stages = _stages_that_fit(stages, 256 * block_m + (128 if gemm.dtype == INT8 else 64) * block_n, most_shared)
    enough = processors * 9 // 10 if warps == 8 else 2 * processors
    programs, parts = -(-gemm.n // block_n) * -(-rows // block_m), 1
    most = 8 if block_m == 16 else 4
    shortest = 256 if gemm.kind in SUMMED else 1024
    while parts < most and programs * parts < enough and gemm.k >= 2 * shortest * parts:
        parts *= 2
    if gemm.kind in SUMMED or parts == 1:
        return GemmConfig("int4", block_n, block_m, 128, stages, parts, warps)
    fits = parts * programs * block_n * block_m <= SCRATCH_FLOATS
    return GemmConfig("int4_whole", block_n, block_m, 128, stages, parts if fits else 1, warps)


def norm_starts_early(rows: int, hidden: int) -> bool:
    """Whether a norm is launched before the kernel ahead of it has ended (PDL). A compromise over 8B and 0.6B: it saves
    time after a GEMM of our own. After one of cuBLAS, which lets nothing start early, it costs 0.5 us. On 0.6B nearly
    all GEMMs are our own."""
    return rows <= (128 if hidden > 2048 else TILE_ROWS)


def merges_before(rows: int, o_weight_bytes: int) -> bool:
    """Whether attention's splits are to be merged before the output projection starts to fetch its weight.

    Launched as soon as the merge is, a large projection fills the chip with programs that wait: one row of 8B (33 MB)
    takes 4,131 us then and 3,905 without, of 4B (21 MB) 2,276 and 2,287; of 0.6B (4 MB), with the kernels before these,
    613 and 650. With more rows it was best to launch everything early.
    """
    return rows == 1 and o_weight_bytes > 24 << 20


ExpertTiles = tuple[GemmConfig, GemmConfig]
"""Tiles of experts' gate and up, and of down, of the kernel "tile"; they share one block_m."""


def _tiles_of(
    rows: int, gate_up: tuple[int, int, int], down: tuple[int, int, int], warps: int = 4
) -> ExpertTiles:  # fmt: skip
    """Tiles of so many rows by (weight rows, columns, stages) of each GEMM."""
    first, second = (GemmConfig("tile", n, rows, k, stages, num_warps=warps) for n, k, stages in (gate_up, down))
    return first, second


_ALONE = 16, _tiles_of(16, (32, 128, 4), (64, 128, 4))
_FP8_ALONE = 64, _tiles_of(16, (64, 128, 4), (128, 128, 4))
_PACKED_ALONE = 16, _tiles_of(16, (64, 128, 4), (64, 128, 4))
"""Tiles for so few choices that narrow ones are needed to occupy all processors."""
_EXPERT_TILES = (
    (6.0, _tiles_of(16, (64, 128, 3), (64, 128, 3))),
    (24.0, _tiles_of(32, (128, 128, 3), (64, 128, 3))),
    (64.0, _tiles_of(64, (64, 64, 4), (128, 64, 4))),
    (inf, _tiles_of(128, (128, 64, 3), (256, 64, 4), 8)),
)
_FP8_EXPERT_TILES = (
    (14.0, _tiles_of(16, (128, 128, 3), (128, 128, 4))),
    (24.0, _tiles_of(32, (128, 128, 3), (128, 128, 4))),
    (64.0, _tiles_of(64, (64, 128, 4), (128, 128, 4))),
    (inf, _tiles_of(128, (128, 128, 3), (128, 128, 3), 8)),
)
_PACKED_EXPERT_TILES = (
    (6.0, _tiles_of(16, (128, 128, 4), (128, 128, 4))),
    (24.0, _tiles_of(32, (128, 128, 4), (128, 128, 4))),
    (inf, _tiles_of(64, (64, 128, 3), (64, 128, 3))),
)
"""(most choices of an expert on the average, tiles)"""


def choice_ends(num_experts: int) -> set[int]:
    """Numbers of choices (tokens x experts of each) at which expert_tiles changes."""
    tables = (_EXPERT_TILES, _FP8_EXPERT_TILES, _PACKED_EXPERT_TILES)
    ends = {int(most * num_experts) for tiles in tables for most, _ in tiles[:-1]}
    return ends | {most for most, _ in (_ALONE, _FP8_ALONE, _PACKED_ALONE)}


def expert_tiles(
    num_choices: int, num_experts: int, dtype: str = "bfloat16", most_shared: int = SHARED_BYTES
) -> ExpertTiles:
    """Tiles for `num_choices` (tokens x experts of each) over so many experts. dtype: of the weights. most_shared:
    bytes of shared memory that a program may have."""
    tables = {FP8: (_FP8_EXPERT_TILES, _FP8_ALONE), **dict.fromkeys(PACKED, (_PACKED_EXPERT_TILES, _PACKED_ALONE))}
    tiles, (most_alone, alone) = tables.get(dtype, (_EXPERT_TILES, _ALONE))
    found = next(both for most, both in tiles if num_choices / num_experts <= most)
    gate_up, down = alone if num_choices <= most_alone else found
    if dtype not in (*ITEM_SIZES, INT8):
        return gate_up, down
    item_size = ITEM_SIZES.get(dtype, 1)
    if item_size > 2:  # tiles of these bytes would not fit in shared memory
        gate_up, down = _narrower(gate_up), _narrower(down)
    if most_shared < SHARED_BYTES:
        gate_up, down = _shortened(gate_up, 2, item_size, most_shared), _shortened(down, 1, item_size, most_shared)
    return gate_up, down


def _shortened(config: GemmConfig, weights: int, item_size: int, most_shared: int) -> GemmConfig:
    """The tiles with as many stages as fit, on a GPU without tensor copy engines.
    weights: tiles of them in a step; item_size: bytes of their numbers; those of x have 2 at least."""
    step = config.block_k * (max(2, item_size) * config.block_m + item_size * weights * config.block_n)
    return replace(config, stages=_stages_that_fit(config.stages, step, most_shared))


def _stages_that_fit(most: int, step: int, most_shared: int) -> int:
    """Stages, at most so many, of steps of so many bytes, of which a ring in shared memory holds one less."""
    return min(most, most_shared // step + 1)


def _narrower(config: GemmConfig) -> GemmConfig:
    return replace(config, block_n=min(config.block_n, 64), block_k=32, stages=3)


FEW_TOKENS = 4
"""Maximum tokens whose experts are read token by token. With more, two tokens choose the same expert more often, and
tiles of an expert's rows read less."""
FEW_TOKENS_OF = {FP8: 2, MXFP4: 2}
"""Such tokens of weights that take long to widen, which tiles do once for all rows."""
FEW_ROUTER = GemmConfig("fma", 8, block_k=1024, stages=2)
FEW_EXPERTS = GemmConfig("fma", 32, block_k=512, stages=1), GemmConfig("fma", 8, block_k=256, stages=8)
FP8_FEW_EXPERTS = streaming(4, 2), streaming(4, 6)
PACKED_FEW_EXPERTS = streaming(4, 3, max_registers=128), streaming(8, 4, max_registers=128)
"""Kernels for a few tokens: the router's, and experts' gate and up, and down."""
_ROUTER_ROWS = 2048
_ROUTER_TILES = ((16, 16, 16), (32, 16, 32), (1024, 16, 64), (inf, 64, 128))
"""Maximum rows; weight rows and rows of a tile."""


def router_config(rows: int, hidden: int, item_size: int, device: Device, one_order: bool) -> GemmConfig:
    """Kernel for the router: ours in several parts, up to where the library was faster for 30B-A3B, whose few weight
    rows would keep a handful of processors busy. one_order: of sums, for all numbers of rows."""
    if one_order and not device.is_cuda:
        return GemmConfig("blocks")
    fits = device.has_tma and item_size == 2 and hidden % 8 == 0 and hidden >= 512
    if not one_order and (rows > _ROUTER_ROWS or not fits):
        return LIBRARY
    block_n, block_m = next((n, m) for most, n, m in _ROUTER_TILES if rows <= most)
    return GemmConfig("tile", block_n, block_m, 128 if hidden >= 512 else 16, 4, split_k=4)
