"""What multiplies in decode steps of 17 to 256 rows: read off timings of whole layers on an H200.

Whole layers (scripts/bench_mid_gemm.py), because kernels that start while the one before them runs do better among
their like: 0.6B at 256 rows gains next to nothing from any one of them, and a fifth from all. Shapes are those of Qwen3
0.6B, 1.7B, 4B and 8B on one device, and of a rank's share of 0.6B and 8B over two and of 32B over four
(scripts/bench_tp_chain.py), those of 8B again inside whole steps. No shape stands for two rank counts, whose consumers
would differ. Others go to cuBLAS as it is.
"""

from nanovllm.kernels.gemm.decode import MidConfig, SplitConfig

FEWEST_ROWS = 17

# The compiled variants. Sizes and the number of splits are not compiled in.
_A = MidConfig(64, 32, 256, 4)
_B = MidConfig(32, 64, 256, 4)
_C = MidConfig(64, 64, 128, 6)
_D = MidConfig(64, 128, 128, 4)
_GATED_A = MidConfig(64, 32, 128, 5)
_GATED_B = MidConfig(32, 64, 128, 6)
_GATED_C = MidConfig(64, 64, 128, 4)
_GATED_D = MidConfig(128, 64, 64, 5, num_warps=8)
_GATED_E = MidConfig(64, 128, 64, 6, num_warps=8)
_GATED_F = MidConfig(64, 32, 64, 5)
_HALVES = SplitConfig(2)
VARIANTS = (_A, _B, _C, _D)
GATED_VARIANTS = (_GATED_A, _GATED_B, _GATED_C, _GATED_D, _GATED_E, _GATED_F)
"""Those of gate and up with the activation, where block_n counts gates."""

Choice = MidConfig | SplitConfig | None
# By shape of the weight, (most rows, choice) ascending: the first that holds the rows is taken, past the last cuBLAS.
_WHOLE: dict[tuple[int, int], list[tuple[int, Choice]]] = {
    (4096, 1024): [(32, _A), (64, _B), (128, _C), (192, None), (256, _D)],
    (4096, 2048): [(32, _A), (64, _B), (128, _C), (192, None), (256, _D)],
    (6144, 2560): [(32, _A), (64, _C)],
    (6144, 4096): [(32, _A), (64, _C), (96, None), (112, _D)],
    (2048, 1024): [(32, _A), (128, _B), (256, _C)],
    (3072, 4096): [(32, _A), (64, _B), (112, _C), (208, None), (240, _D)],
    (2560, 5120): [(32, _A), (56, _C), (64, _B), (96, _A), (192, _C)],
}
_GATED: dict[tuple[int, int], list[tuple[int, MidConfig | None]]] = {
    (6144, 1024): [(32, _GATED_A), (64, _GATED_B), (128, _GATED_C), (256, _GATED_D)],
    (12288, 2048): [(32, _GATED_F), (64, _GATED_C), (128, _GATED_E)],
    (19456, 2560): [(32, _GATED_A), (64, _GATED_D)],
    (24576, 4096): [(32, _GATED_A)],
    (3072, 1024): [(64, _GATED_A), (128, _GATED_B), (256, _GATED_C)],
    (12288, 4096): [(32, _GATED_A), (64, _GATED_C), (128, _GATED_E)],
    (12800, 5120): [(32, _GATED_A), (64, None), (96, _GATED_E)],
}
_PARTS: dict[tuple[int, int], list[tuple[int, Choice]]] = {
    (1024, 2048): [(32, _A.split(4)), (64, _B.split(2)), (96, _A.split(2)), (128, _B.split(2)), (256, _C.split(2))],
    (1024, 3072): [(32, _A.split(4)), (64, _B.split(2)), (96, _A.split(2)), (128, _B.split(2)), (256, _C.split(2))],
    (2048, 2048): [(32, _A.split(2)), (64, _B.split(2)), (128, _C.split(2)), (208, _HALVES), (256, _C)],
    (2048, 6144): [(32, _A.split(2)), (64, _B.split(2)), (128, _C.split(2)), (208, _HALVES), (256, _C)],
    (2560, 4096): [(32, _A.split(2)), (64, _C.split(2)), (256, _HALVES)],
    (2560, 9728): [(256, _HALVES)],
    (4096, 4096): [(32, _A.split(2)), (64, _B), (128, _D.split(2)), (256, _HALVES)],
    (4096, 12288): [
        (32, _A.split(2)), (56, _C.split(2)), (64, _A), (112, _HALVES), (128, _D.split(2)), (256, _HALVES),
    ],
    (1024, 1024): [(64, _A.split(2)), (128, _C.split(2)), (192, _B), (256, _C.split(2))],
    (1024, 1536): [(64, _A.split(2)), (128, _C.split(2)), (192, _B), (256, _C.split(2))],
    (4096, 2048): [(32, _A), (64, _B), (128, _C), (192, None), (256, _D)],
    (5120, 2048): [(32, _A), (64, _C)],
    (5120, 6400): [(32, None), (64, _C), (144, None), (208, _HALVES)],
    (4096, 6144): [(24, _A.split(2)), (32, _A), (64, _B), (80, _C), (96, _HALVES), (128, _C), (256, _HALVES)],
}


def product(rows: int, n: int, k: int, parts: bool, own: bool) -> Choice:
    """For x [rows, k] and a weight [n, k]; None: cuBLAS. parts: the consumer takes sums over parts of K. own: our
    kernel can run here."""
    choice = _first((_PARTS if parts else _WHOLE).get((n, k), []), rows)
    if isinstance(choice, MidConfig) and not own:
        return _HALVES if parts else None
    return choice


def gated_product(rows: int, n: int, k: int, own: bool) -> MidConfig | None:
    """For gate and up, a weight [n, k], with the activation; None: cuBLAS and the activation kernel."""
    choice = _first(_GATED.get((n, k), []), rows)
    return choice if own and isinstance(choice, MidConfig) else None


def _first(ranges: "list[tuple[int, Choice]] | list[tuple[int, MidConfig | None]]", rows: int) -> Choice:
    if rows < FEWEST_ROWS:
        return None
    return next((choice for most, choice in ranges if rows <= most), None)
