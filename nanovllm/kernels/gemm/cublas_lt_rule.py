"""Which of cuBLASLt's algorithms are taken in place of cuBLAS' own choice: read off timings on an H200.

scripts/bench_cublas_lt.py, cuBLASLt 13.1: what beat everything there was before by 1.5 % or more. Shapes are those of
Qwen3 0.6B and 8B on one device, of a rank's share of 8B over two and of 32B over four. Where our own kernels multiply,
next to nothing was gained, so those rows are left out. Of 8B stands what whole steps gained by, attention included,
which is not always what a product alone gains by.
"""

from functools import cache

from nanovllm.kernels.gemm.lt_config import LtConfig

MANY_ROWS = 1024
"""From here on the steps are prompts, whose numbers of rows are any. The algorithm is that of 4,096 rows."""
_PROCESSORS = 132
_LEAST_FILLED = 0.93

# Projection and weight [n, k]: number of rows -> algorithm. An algorithm is for the very rows that it was timed at:
# tiles that end past the last row are slow, 26.8 us in place of 18.4 for 144 rows by the best algorithm for 192.
_FEW_ROWS: dict[tuple[str, int, int], dict[int, str]] = {
    # 8B
    ("qkv", 6144, 4096): {
        160: "66:128x80 s64xA c1x2 k1 o3",
        176: "66:144x64 s64xA c1x1 k1 o0",
        192: "66:144x64 s64xA c1x1 k1 o0",
        208: "66:128x104 s64xA c4x1 k1 o1",
        224: "66:128x112 s64xA c1x2 k1 o3",
        240: "66:96x128 s64xA c1x1 k1 o0",
        256: "66:96x128 s64xA c1x1 k1 o0",
    },
    ("o", 4096, 4096): {
        160: "66:128x40 s64xA c2x1 k1 o1",
        192: "66:96x64 s64xA c1x1 k1 o0",
        208: "66:64x104 s64xA c1x2 k1 o3",
        224: "66:64x112 s64xA c1x2 k1 o3",
        240: "66:64x120 s64xA c1x2 k1 o3",
        256: "66:64x128 s64xA c1x1 k1 o0",
    },
    ("gate_up", 24576, 4096): {
        224: "66:192x112 s64xA c2x1 k1 o1",
    },
    ("down", 4096, 12288): {
        80: "66:64x40 s64xA c1x2 k1 o3",
    },
    ("head", 151936, 4096): {
        24: "66:128x24 s64xA c2x1 k1 o1",
        40: "66:128x48 s64xA c2x1 k1 o1",
        64: "66:192x64 s64xA c2x1 k1 o4",
        96: "66:128x96 s64xA c2x1 k1 o5",
        128: "66:128x128 s64xA c2x1 k1 o0",
        144: "66:256x80 s64xA c1x2 k1 o3",
        224: "66:192x224 s64xA c2x1 k1 o5",
        240: "66:256x128 s64xA c1x2 k1 o7",
    },
    # 0.6B
    ("qkv", 4096, 1024): {
        192: "66:96x64 s64xA c1x1 k1 o0",
    },
    ("head", 151936, 1024): {
        64: "66:64x64 s64xA c2x1 k1 o1",
        128: "66:112x64 s64xA c1x2 k1 o6",
        192: "66:128x192 s64xA c2x1 k1 o4",
        256: "66:144x128 s64xA c1x2 k1 o2",
    },
    # 8B over two
    ("qkv", 3072, 4096): {
        144: "66:64x72 s64xA c4x2 k1 o3",
        160: "66:128x32 s64xA c1x1 k1 o1",
        176: "66:96x64 s64xA c1x1 k1 o0",
        192: "66:80x64 s64xA c1x1 k1 o0",
        208: "66:64x104 s64xA c4x2 k1 o3",
    },
    ("o", 4096, 2048): {
        144: "66:64x72 s64xA c1x1 k1 o1",
        160: "66:64x80 s64xA c1x1 k1 o1",
        176: "66:64x88 s64xA c1x1 k1 o1",
        192: "66:96x64 s64xA c1x1 k1 o0",
        208: "66:64x104 s64xA c1x1 k1 o1",
        224: "66:64x112 s64xA c1x1 k1 o1",
        240: "66:64x120 s64xA c1x1 k1 o1",
        256: "66:128x64 s64xA c2x1 k1 o0",
    },
    ("gate_up", 12288, 4096): {
        24: "66:192x32 s64xA c4x1 k1 o1",
        32: "66:192x32 s64xA c4x1 k1 o1",
        144: "66:192x72 s64xA c1x2 k1 o3",
        160: "66:192x80 s64xA c1x2 k1 o3",
        176: "66:192x88 s64xA c1x2 k1 o3",
        192: "66:112x192 s64xA c2x1 k1 o0",
        208: "66:192x104 s64xA c1x2 k1 o3",
        224: "66:192x112 s64xA c1x2 k1 o7",
        240: "66:192x128 s64xA c1x2 k1 o6",
        256: "66:192x128 s64xA c1x2 k1 o6",
    },
    ("down", 4096, 6144): {
        144: "66:64x80 s64xA c1x2 k1 o1",
        176: "66:96x64 s64xA c1x1 k1 o0",
        192: "66:96x64 s64xA c1x1 k1 o0",
        208: "66:64x104 s64xA c1x2 k1 o3",
        224: "66:64x112 s64xA c1x2 k1 o3",
        240: "66:64x120 s64xA c1x2 k1 o3",
    },
    ("head", 75968, 4096): {
        40: "66:192x48 s64xA c2x1 k1 o1",
        240: "66:128x120 s64xA c1x2 k1 o7",
        256: "66:144x128 s64xA c1x2 k1 o2",
    },
    # 32B over four
    ("qkv", 2560, 5120): {
        208: "66:96x64 s64xA c2x4 k1 o2",
        224: "66:88x64 s64xA c2x4 k1 o2",
        240: "66:64x80 s64xA c1x1 k1 o1",
        256: "66:88x64 s64xA c2x4 k1 o2",
    },
    ("o", 5120, 2048): {
        96: "66:64x96 s64xA c4x1 k1 o1",
        144: "66:128x48 s64xA c1x1 k1 o1",
        160: "66:128x80 s64xA c1x2 k1 o3",
        176: "66:128x64 s64xA c1x1 k1 o1",
        192: "66:128x64 s64xA c1x1 k1 o1",
        208: "66:176x64 s64xA c2x4 k1 o2",
        224: "66:128x80 s64xA c1x1 k1 o1",
        240: "66:128x80 s64xA c1x1 k1 o1",
        256: "66:80x128 s64xA c1x1 k1 o0",
    },
    ("gate_up", 12800, 5120): {
        64: "66:112x64 s64xA c4x1 k1 o0",
        96: "66:128x96 s64xA c4x1 k1 o1",
        192: "66:112x192 s64xA c4x1 k1 o4",
        224: "66:128x224 s64xA c1x1 k1 o5",
        256: "66:112x128 s64xA c4x1 k1 o0",
    },
    ("down", 5120, 6400): {
        128: "66:88x64 s64xA c4x2 k1 o2",
        144: "66:128x48 s64xA c1x1 k1 o1",
        176: "66:128x64 s64xA c1x1 k1 o1",
        192: "66:128x64 s64xA c1x1 k1 o1",
        224: "66:128x80 s64xA c1x1 k1 o1",
        240: "66:128x80 s64xA c1x1 k1 o1",
        256: "66:80x128 s64xA c1x2 k1 o0",
    },
    ("head", 37984, 5120): {
        64: "66:144x64 s64xA c2x1 k1 o0",
        128: "66:144x128 s64xA c1x1 k1 o0",
        144: "66:128x80 s64xA c1x2 k1 o3",
        160: "66:192x80 s64xA c1x2 k1 o3",
        176: "66:192x88 s64xA c1x2 k1 o3",
        208: "66:192x104 s64xA c1x2 k1 o3",
    },
}
# By the weight [n, k]: at 4,096 rows, under a load that goes on.
_MANY_ROWS: dict[tuple[int, int], str] = {
    (6144, 4096): "66:168x128 s64xA c1x2 k1 o2",  # 8B: qkv, o, gate and up, down
    (4096, 4096): "66:112x128 s64xA c1x2 k1 o2",
    (24576, 4096): "66:176x128 s64xA c1x2 k1 o2",
    (4096, 12288): "66:112x128 s64xA c1x2 k1 o2",
    (4096, 1024): "66:112x128 s64xA c1x2 k1 o2",  # 0.6B
    (1024, 2048): "66:128x128 s64xA c1x1 k1 o1",
    (6144, 1024): "66:168x128 s64xA c1x2 k1 o2",
    (1024, 3072): "66:128x128 s64xA c1x1 k1 o1",
    (3072, 4096): "66:128x128 s64xA c2x1 k1 o1",  # 8B over two
    (4096, 2048): "66:112x128 s64xA c1x2 k1 o2",
    (12288, 4096): "66:176x128 s64xA c1x2 k1 o2",
    (4096, 6144): "66:112x128 s64xA c1x2 k1 o2",
    (5120, 2048): "66:128x160 s64xA c2x1 k1 o1",  # 32B over four; its qkv gained too little
    (12800, 5120): "66:176x128 s64xA c1x1 k1 o2",
    (5120, 6400): "66:128x160 s64xA c2x1 k1 o1",
}


def algorithms(projection: str, n: int, k: int) -> dict[int, LtConfig]:
    """By the number of rows, for x [rows, k] and a weight [n, k]. Elsewhere remains what is taken without."""
    return {rows: _parsed(text) for rows, text in _FEW_ROWS.get((projection, n, k), {}).items()}


def many_rows_algorithm(n: int, k: int) -> LtConfig | None:
    """For MANY_ROWS and more of x and a weight [n, k], where `fills` says so."""
    text = _MANY_ROWS.get((n, k))
    return _parsed(text) if text else None


def fills(config: LtConfig, rows: int, n: int) -> bool:
    """Whether the tiles of `config` come out even: not much of the last row of tiles and of the last round over the
    processors is idle. So it was at the 4,096 rows that the algorithms are from; elsewhere cuBLAS may know better."""
    if config.tile_size is None:
        return True
    tile_n, tile_m = config.tile_size
    rounds = -(-(-(-n // tile_n) * -(-rows // tile_m)) // _PROCESSORS)
    return rows * n >= _LEAST_FILLED * rounds * _PROCESSORS * tile_n * tile_m


@cache
def _parsed(text: str) -> LtConfig:
    """Once: the choice is made for the compiler first and again for the engine."""
    return LtConfig.parse(text)
