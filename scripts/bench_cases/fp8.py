"""GEMMs of a layer with FP8 weights by rows: cuBLAS with bfloat16 weights, cuBLAS with FP8 ones, and our kernels, each
with the kernel that rounds its activations. Gate and up come with the activation."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from tune_steps import contenders

from bench_cases.gemm import gemms, name_of
from bench_cases.harness import Line, Point, Setup, compare
from nanovllm.kernels.fp8 import gemm as fp8
from nanovllm.kernels.fp8.operands import FP8Weight
from nanovllm.kernels.fp8.reference import quantize_blocks
from nanovllm.kernels.gemm.choice import FP8, LIBRARY, Gemm, GemmConfig
from nanovllm.kernels.pointwise.activation import silu_mul

ROWS = (1, 4, 16, 64, 256, 4096)


class Projection:
    """x [rows, k] and the weights [n, k] of several layers, with scales of blocks; and their wide values."""

    def __init__(self, setup: Setup, gemm: Gemm, rows: int) -> None:
        self.gemm = gemm
        made = range(setup.sets(gemm.n * gemm.k, most=16))
        wide = [setup.randn(gemm.n, gemm.k, scale=gemm.k**-0.5, seed=seed) for seed in made]
        self.weights = [FP8Weight(*quantize_blocks(weight), 128) for weight in wide]
        self.wide = [self._widened(weight).to(setup.dtype) for weight in self.weights]
        self.x = setup.randn(rows, gemm.k, seed=1000)
        # Arithmetic in e4m3 is twice as fast.
        self.limit_us = setup.limit_us(gemm.n * gemm.k, 1.0 * rows * gemm.n * gemm.k)

    def _widened(self, weight: FP8Weight) -> torch.Tensor:
        n, k = weight.values.shape
        scale = weight.scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        return weight.values.float() * scale

    def bf16(self, index: int) -> torch.Tensor:
        product = F.linear(self.x, self.wide[index])
        return silu_mul(product) if self.gemm.kind == "gate_up" else product

    def run(self, config: GemmConfig, index: int) -> torch.Tensor:
        weight = self.weights[index]
        if self.gemm.kind == "gate_up":
            if config == LIBRARY:
                return silu_mul(fp8.linear(self.x, weight, config))
            return fp8.linear(self.x, weight, config, gated=True)
        product = fp8.linear(self.x, weight, config)
        return product.sum(0).to(self.x.dtype) if config.parts > 1 else product


def fp8_gemm(setup: Setup) -> Iterator[Line]:
    for gemm in gemms(setup):
        if gemm.kind == "head":
            continue
        for rows in setup.rows(ROWS, (3,)):
            projection = Projection(setup, gemm, rows)
            configs = contenders(gemm._replace(dtype=FP8), rows) if rows <= 256 else [LIBRARY]
            if setup.dry:  # the interpreter is slow, and rounds to e4m3 otherwise than a GPU
                configs = [config for config in configs if config.kernel == "decode" and config.parts == 1][:1]
            calls: dict[str, Callable[[int], torch.Tensor]] = {"bf16": projection.bf16}
            calls |= {name_of(config): partial(projection.run, config) for config in configs}
            labels: Line = {"gemm": gemm.kind, "n": gemm.n, "k": gemm.k, "rows": rows}
            sets = len(projection.weights)
            # What rounding activations to e4m3 costs is the larger part of it.
            tolerance = 0.3 if setup.dry else 0.06
            yield compare(setup, Point(labels, calls, sets, projection.limit_us, tolerance=tolerance))
