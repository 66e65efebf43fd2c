"""Products of decode steps of 17 to 256 rows: cuBLAS, cuBLAS over parts of K, and our kernel. Needs one GPU.

    python scripts/bench_mid_gemm.py                # each product by itself, then all layers of a model
    python scripts/bench_mid_gemm.py --rows 32 64 --models 0.6B

Times are microseconds of CUDA-graph replays over the weights of as many layers as defeat the L2 cache. A product is
timed together with the kernel that takes its result where that depends on the choice: o and down with add + RMSNorm,
gate and up with the activation. What the engine takes (cublas_lt_rule.py, mid_gemm_rule.py) is marked with a star.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nanovllm.kernels.gemm import cublas_lt_rule
from nanovllm.kernels.gemm import decode as mid_gemm
from nanovllm.kernels.gemm import decode_rule as mid_gemm_rule
from nanovllm.kernels.gemm.decode import MidConfig, SplitConfig
from nanovllm.kernels.gemm.lt_config import LtConfig
from nanovllm.kernels.gemm.skinny_tune import EPS, graph_us, rotation
from nanovllm.kernels.pointwise.activation import silu_mul
from nanovllm.kernels.pointwise.norm import add_rms_norm
from nanovllm.layers.few_rows import linear

READ_BYTES_PER_US = 4.55e6  # what reads reach on an H200
FLOPS_PER_US = 790e6
LAYERS = {"0.6B": 28, "1.7B": 28, "4B": 36, "8B": 36, "14B": 40}
PARTS = ("qkv", "o", "gate_up", "down")
# Weight shapes [N, K] of one layer.
MODELS = {
    "0.6B": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
    "1.7B": {"qkv": (4096, 2048), "o": (2048, 2048), "gate_up": (12288, 2048), "down": (2048, 6144)},
    "4B": {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)},
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "14B": {"qkv": (7168, 5120), "o": (5120, 5120), "gate_up": (34816, 5120), "down": (5120, 17408)},
}
TILES = [(64, 32, 256, 4), (64, 64, 128, 6), (32, 64, 256, 4), (64, 128, 128, 4)]
GATED_TILES = [(64, 32, 128, 5), (32, 64, 128, 6), (64, 64, 128, 4), (128, 64, 64, 5, 1, 8), (64, 128, 64, 6, 1, 8)]
Config = MidConfig | SplitConfig | LtConfig | None


def candidates(part: str, rows: int, k: int) -> list[Config]:
    if part == "gate_up":
        return [None, *(MidConfig(*tile) for tile in GATED_TILES)]
    own = [MidConfig(*tile) for tile in TILES if tile[1] < 2 * rows]
    if part == "qkv":
        return [None, *own]
    split = [SplitConfig(parts) for parts in (2, 4) if k % (parts * 64) == 0]
    return [None, *split, *(replace(c, splits=s) for c in own for s in (1, 2, 4) if k >= 2 * s * c.block_k)]


def chosen(part: str, rows: int, n: int, k: int) -> Config:
    algorithm = cublas_lt_rule.algorithms(part, n, k).get(rows)
    if algorithm is not None:
        return algorithm
    if part == "gate_up":
        return mid_gemm_rule.gated_product(rows, n, k, own=True)
    return mid_gemm_rule.product(rows, n, k, part in ("o", "down"), own=True)


def short(config: Config) -> str:
    if config is None:
        return "cuBLAS"
    if isinstance(config, SplitConfig):
        return f"cuBLAS/{config.splits}"
    if isinstance(config, LtConfig):
        return f"Lt{config}"
    return f"{config.block_n}x{config.block_m}x{config.block_k}t{config.stages}/{config.splits}"


def product(x: Tensor, weight: Tensor, config: Config) -> Tensor:
    return F.linear(x, weight) if config is None else linear(x, weight, config)


def activated(x: Tensor, weight: Tensor, config: Config) -> Tensor:
    if isinstance(config, MidConfig):
        return mid_gemm.linear_silu_mul(x, weight, config)
    return silu_mul(product(x, weight, config))


def call(part: str, x: Tensor, config: Config, n: int) -> Callable[[Tensor], object]:
    if part == "qkv":
        return lambda w: product(x, w, config)
    if part == "gate_up":
        return lambda w: activated(x, w, config)
    residual, gain = x.new_zeros(x.shape[0], n), x.new_ones(n)
    return lambda w: add_rms_norm(product(x, w, config), residual, gain, EPS)


def table(model: str, part: str, row_counts: Sequence[int], most: int) -> None:
    n, k = MODELS[model][part]
    layer = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5 for _ in range(LAYERS[model])]
    weights = rotation(layer)
    weights = list(weights) * max(1, 12 // len(weights))
    for rows in row_counts:
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        timed = []
        for config in dict.fromkeys([*candidates(part, rows, k), chosen(part, rows, n, k)]):
            run = call(part, x, config, n)
            timed.append((graph_us([lambda w=w, run=run: run(w) for w in weights]), config))
        library, pick = timed[0][0], chosen(part, rows, n, k)
        floor = max(n * k * 2 / READ_BYTES_PER_US, 2 * rows * n * k / FLOPS_PER_US)
        timed.sort(key=lambda pair: pair[0])
        names = "  ".join(f"{us:.1f} {short(config)}{'*' * (config == pick)}" for us, config in timed)
        print(f"{model:5s}{part:8s}{rows:4d} rows, limit {floor:5.1f}, cuBLAS {library:5.1f} | {names[: most * 24]}")


class LayerChain:
    """The products of all layers with norms and activations, without attention: o reads a part of qkv's output."""

    def __init__(self, model: str, rows: int) -> None:
        self.shapes = MODELS[model]
        self.weights = [
            {
                p: torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * (0.5 / k**0.5)
                for p, (n, k) in self.shapes.items()
            }
            for _ in range(LAYERS[model])
        ]
        self.start = torch.randn(rows, self.shapes["qkv"][1], device="cuda").bfloat16()
        self.gain = torch.ones_like(self.start[0])
        self.residual = self.start.clone()
        self.hidden = self.start.clone()

    def run(self, configs: dict[str, Config]) -> None:
        x, rows, width = self.start, self.start.shape[0], self.shapes["o"][1]
        for w in self.weights:
            qkv = product(x, w["qkv"], configs["qkv"])
            attended = qkv.view(-1)[: rows * width].view(rows, width)
            x, _ = add_rms_norm(product(attended, w["o"], configs["o"]), self.residual, self.gain, EPS)
            act = activated(x, w["gate_up"], configs["gate_up"])
            x, _ = add_rms_norm(product(act, w["down"], configs["down"]), self.residual, self.gain, EPS)
        self.hidden.copy_(x)

    def time(self, *contenders: dict[str, Config]) -> list[float]:
        """Microseconds of all layers with each of `contenders`, best of turns: a chip that grows hot grows slow."""
        turns = [[graph_us([lambda c=c: self.run(c)]) for c in contenders] for _ in range(3)]
        return [min(turn[i] for turn in turns) for i in range(len(contenders))]

    def result(self, configs: dict[str, Config]) -> Tensor:
        """The hidden state after one pass."""
        self.residual.copy_(self.start)
        self.run(configs)
        return self.hidden.double()


def chain(model: str, rows: int) -> None:
    layers = LayerChain(model, rows)
    plain: dict[str, Config] = dict.fromkeys(PARTS)
    rule = {part: chosen(part, rows, *layers.shapes[part]) for part in PARTS}
    library, ours = layers.time(plain, rule)
    want, got = layers.result(plain), layers.result(rule)
    error = ((got - want).norm() / want.norm()).item()
    size = sum(n * k for n, k in layers.shapes.values()) * LAYERS[model]
    floor = max(size * 2 / READ_BYTES_PER_US, 2 * rows * size / FLOPS_PER_US)
    print(
        f"chain {model:5s}{rows:4d} rows: limit {floor:5.0f}, cuBLAS {library:5.0f}, by the rule {ours:5.0f} "
        f"({1 - ours / library:4.0%} less), difference {error:.1e};",
        " ".join(f"{part} {short(config)}" for part, config in rule.items()),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.6B", "8B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[32, 64, 96, 128, 160, 192, 256])
    parser.add_argument("--most", type=int, default=6, help="configurations shown in a line")
    parser.add_argument("--chains", action="store_true", help="only all layers of a model")
    args = parser.parse_args()
    torch.manual_seed(0)
    if not args.chains:
        for model in args.models:
            for part in PARTS:
                table(model, part, args.rows, args.most)
    for model in args.models:
        for rows in args.rows:
            chain(model, rows)


if __name__ == "__main__":
    main()
