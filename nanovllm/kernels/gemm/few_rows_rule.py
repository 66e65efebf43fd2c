"""What multiplies 1 to 16 rows, the steps of a handful of requests: read off whole steps on an H200.

One row goes by skinny_rule.py; for more there are shapes that were timed, and a rule for all others. Timed were
Qwen3 0.6B and 8B on one device and 8B over two, at 2, 4, 8 and 16 rows (scripts/tune_steps.py), and a rank's share of
32B over four, at 4, 8 and 16 rows on two devices; each projection in turn took every contender, in steps with
attention, norms and sums, and kept what made the step shortest. A step so chosen takes 5 to 13 % less than with the
rule for other shapes on 0.6B, 2 to 6 % on 8B, 8 to 11 % on 8B over two, 6 to 9 % on 32B over four.
"""

from nanovllm.kernels.gemm import skinny_rule as small_gemm_rule
from nanovllm.kernels.gemm.decode import MidConfig
from nanovllm.kernels.gemm.skinny import GemmConfig, candidate_configs
from nanovllm.kernels.gemm.tile import MAX_ROWS

Choice = GemmConfig | MidConfig | None

_SMALL_WEIGHT_BYTES = 16 << 20
_MOST_FUSED_GATED_ROWS = 4


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


def choice(projection: str, rows: int, n: int, k: int, item_size: int, tma: bool, fused: bool) -> Choice:
    """For 1 to 16 `rows` of x [rows, k] and the weight [n, k] of qkv, o, gate_up, down or head; None: cuBLAS.

    item_size: bytes of one of its elements. tma: the device has what MidConfig asks for. fused: alone on its device, so
    with norm, activation and residual around the product.
    """
    if rows == 1:
        return small_gemm_rule.one_row(projection, k, fused)
    measured = _MEASURED.get((projection, n, k)) if item_size == 2 else None
    if measured is not None:
        config = next(config for most, config in measured if rows <= most)
        return config if tma or not isinstance(config, MidConfig) else None
    # Any other weight: our kernels where it is so small that the library cannot keep the memory busy, but not where two
    # of our own outputs share a program and the norm is worth a kernel of its own.
    most = _MOST_FUSED_GATED_ROWS if fused and projection == "gate_up" else MAX_ROWS
    is_small = n * k * item_size <= _SMALL_WEIGHT_BYTES
    return candidate_configs(rows, n, k)[0] if is_small and rows <= most else None
