"""What multiplies 2 to 16 rows, the steps of a handful of requests: read off whole steps on an H200.

Qwen3 0.6B and 8B on one device and 8B over two, at 2, 4, 8 and 16 rows (scripts/tune_steps.py), and a rank's share of
32B over four, at 4, 8 and 16 rows on two devices; each projection in turn took every contender, in steps with
attention, norms and sums, and kept what made the step shortest. A step so chosen takes 5 to 13 % less than with the
rule for other shapes on 0.6B, 2 to 6 % on 8B, 8 to 11 % on 8B over two, 6 to 9 % on 32B over four.
"""

from nanovllm.kernels.mid_gemm import MidConfig
from nanovllm.kernels.small_gemm import GemmConfig

Choice = GemmConfig | MidConfig | None


def _stream(depth: int, split_k: int = 1) -> GemmConfig:
    return GemmConfig("stream", 64, 128, depth, split_k)


_WIDE, _WIDER, _NARROW = (GemmConfig("fma", *cut) for cut in ((16, 512, 1), (16, 1024, 1), (8, 1024, 3)))
_TILE = GemmConfig("tile", 16, 1024, 2)
_TILES = MidConfig(64, 32, 256, 4)
_GATED_8, _GATED_16 = MidConfig(64, 32, 64, 5), MidConfig(64, 32, 128, 5)

# Projection and weight [n, k]: (most rows, choice) ascending; the first that holds the rows is taken.
_MEASURED: dict[tuple[str, int, int], list[tuple[int, Choice]]] = {
    # 0.6B
    ("qkv", 4096, 1024): [(2, _WIDER), (16, _TILE)],
    ("o", 1024, 2048): [(2, _NARROW), (16, _TILE)],
    ("gate_up", 6144, 1024): [(4, _WIDE), (16, None)],
    ("down", 1024, 3072): [(2, _NARROW), (4, _stream(4, 4)), (16, _stream(3, 8))],
    ("head", 151936, 1024): [(2, _WIDE), (8, _stream(4)), (16, None)],
    # 8B
    ("qkv", 6144, 4096): [(8, None), (16, _TILES)],
    ("o", 4096, 4096): [(2, _WIDER), (4, _stream(4, 4)), (8, None), (16, _TILES)],
    ("gate_up", 24576, 4096): [(4, None), (8, _GATED_8), (16, _GATED_16)],
    ("down", 4096, 12288): [(4, _stream(3, 4)), (16, _TILES.split(2))],
    ("head", 151936, 4096): [(2, _stream(3)), (16, _stream(4))],
    # 8B over two
    ("qkv", 3072, 4096): [(2, _NARROW), (16, _stream(4, 4))],
    ("o", 4096, 2048): [(2, _WIDER), (8, _TILE), (16, _stream(4, 2))],
    ("gate_up", 12288, 4096): [(2, _WIDE), (16, _stream(4))],
    ("down", 4096, 6144): [(2, _WIDER), (16, _stream(4, 4))],
    ("head", 75968, 4096): [(2, _stream(3)), (16, _stream(4))],
    # 32B over four
    ("qkv", 2560, 5120): [(4, _stream(4, 4)), (8, _TILES), (16, _stream(4, 4))],
    ("o", 5120, 2048): [(4, _stream(3, 4)), (8, _stream(4, 2)), (16, _TILES)],
    ("gate_up", 12800, 5120): [(16, _stream(4))],
    ("down", 5120, 6400): [(4, _stream(4, 2)), (8, None), (16, _TILES)],
    ("head", 37984, 5120): [(16, _stream(4))],
}


def knows(projection: str, n: int, k: int) -> bool:
    """Whether steps with this weight [n, k] were timed."""
    return (projection, n, k) in _MEASURED


def choice(projection: str, rows: int, n: int, k: int, tma: bool) -> Choice:
    """For `rows` <= 16 of x and a weight that it `knows`; None: cuBLAS. tma: the device has what MidConfig asks for."""
    config = next(config for most, config in _MEASURED[projection, n, k] if rows <= most)
    return config if tma or not isinstance(config, MidConfig) else None
