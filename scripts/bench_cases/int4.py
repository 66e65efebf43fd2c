"""GEMMs of a layer with 4-bit weights by rows: cuBLAS with bfloat16 weights, the choices of our kernel, and cuBLAS
after widening. Gate and up come with the activation, o and down with the add + RMSNorm that adds up parts of K."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from tune_steps import int4_contenders

from bench_cases.gemm import gemms
from bench_cases.harness import EPS, Line, Point, Setup, compare
from nanovllm.kernels import Kernels, select_kernels
from nanovllm.kernels.gemm import int4, int4_row
from nanovllm.kernels.gemm.choice import INT4, SUMMED, Gemm, GemmConfig
from nanovllm.kernels.gemm.int4 import Int4Weight
from nanovllm.kernels.pointwise.norm import Norm

ROWS = (1, 2, 4, 8, 16, 32)
class Projection:
    """x [rows, k] and the weights [n, k] of several layers, 4-bit with groups of 128 columns, and widened."""

    def __init__(self, setup: Setup, kernels: Kernels, gemm: Gemm, rows: int) -> None:
        self.gemm, self.kernels = gemm, kernels
        nbytes = gemm.n * gemm.k * 17 // 32
        self.weights = [self._random(setup, seed) for seed in range(setup.sets(nbytes, most=32))]
        self.wide = [int4.widen(w, 0, w.n, w.groups.new_empty(w.n, w.k)) for w in self.weights]
        self.x = setup.randn(rows, gemm.k, seed=1000)
        self.gain = self.x.new_ones(gemm.n)
        self.before = setup.randn(rows, gemm.n, seed=1001)
        self.residual = self.before.clone()
        self.limit_us = setup.limit_us(nbytes, 2.0 * rows * gemm.n * gemm.k)

    def _random(self, setup: Setup, seed: int) -> Int4Weight:
        n, k = self.gemm.n, self.gemm.k
        weight = Int4Weight.empty(n, k, min(128, k), False, setup.dtype, setup.device)
        make = torch.Generator(setup.device).manual_seed(seed)
        weight.words.random_(-(1 << 15), 1 << 15, generator=make)
        weight.groups[..., 0].uniform_(0.1 * k**-0.5, 0.3 * k**-0.5, generator=make)
        return weight

    def reset(self) -> None:
        self.residual.copy_(self.before)

    def library(self, index: int) -> torch.Tensor:
        return self._followed(F.linear(self.x, self.wide[index]))

    def widened(self, index: int) -> torch.Tensor:
        return self._followed(int4.linear_widened(self.x, self.weights[index]))

    def run(self, config: GemmConfig, index: int) -> torch.Tensor:
        weight = self.weights[index]
        call = int4_row.linear if config.kernel == "quantized_row" else int4.linear
        if self.gemm.kind == "gate_up":
            return call(self.x, weight, config, gated=True)
        return self._followed(call(self.x, weight, config))

    def _followed(self, product: torch.Tensor) -> torch.Tensor:
        if self.gemm.kind == "gate_up":
            return self.kernels.silu_mul(product)
        if self.gemm.kind in SUMMED:
            return self.kernels.add_norms(product, self.residual, Norm(self.gain, EPS))[0]
        return product


def name_of(config: GemmConfig) -> str:
    whole = {"int4_whole": "whole-", "quantized_row": "row-"}.get(config.kernel, "")
    return f"{whole}{config.block_n}x{config.block_m}/{config.stages}s{config.split_k}k{config.num_warps}w"


def int4_gemm(setup: Setup) -> Iterator[Line]:
    kernels = select_kernels(setup.device, interpret=setup.dry)
    for gemm in gemms(setup):
        if gemm.kind == "head":
            continue
        for rows in setup.rows(ROWS, (1, 3)):
            projection = Projection(setup, kernels, gemm, rows)
            calls: dict[str, Callable[[int], torch.Tensor]] = {
                "bf16": projection.library,
                "widened": projection.widened,
            }
            configs = [c for c in int4_contenders(gemm._replace(dtype=INT4), rows) if c.is_own]
            if setup.dry:  # the interpreter is slow, and knows no Gluon
                configs = [config for config in configs if config.kernel != "quantized_row"][:1]
            calls |= {name_of(config): partial(projection.run, config) for config in configs}
            labels: Line = {"gemm": gemm.kind, "n": gemm.n, "k": gemm.k, "rows": rows}
            sets = len(projection.weights)
            yield compare(
                setup, Point(labels, calls, num_sets=sets, limit_us=projection.limit_us, reset=projection.reset)
            )
