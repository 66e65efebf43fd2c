"""GEMMs of a layer and the head by rows: cuBLAS, the engine's choice, and what scripts/tune_steps.py would try.

A GEMM is timed with what its kernel may be fused with: on one rank with few rows a norm before it, activation or
residual after it; else the kernel that takes its result, which is the activation for gate and up, and for o and down
add + RMSNorm, which adds up parts of K. Under PDL a kernel helps or hinders its neighbours: whole steps decide.
"""

from collections.abc import Iterator
from functools import partial

import torch
from tune_steps import contenders

from bench_cases.harness import EPS, Line, Point, Setup, compare
from nanovllm.kernels import Kernels, select_kernels
from nanovllm.kernels.gemm import decode, skinny
from nanovllm.kernels.gemm.choice import KINDS, LIBRARY, SKINNY_ROWS, SUMMED, Gemm, GemmConfig, shipped_table
from nanovllm.kernels.gemm.dispatch import matmul
from nanovllm.kernels.pointwise.norm import Norm

ROWS = (1, 4, 16, 64, 128, 256)
DRY_SIZE = 128


class Projection:
    """x [rows, k] and the weights [n, k] of several layers."""

    def __init__(self, setup: Setup, kernels: Kernels, gemm: Gemm, rows: int) -> None:
        self.gemm, self.kernels, self.fused = gemm, kernels, gemm.fused and rows <= SKINNY_ROWS
        nbytes = gemm.n * gemm.k * setup.dtype.itemsize
        made = range(setup.sets(nbytes, most=64))
        self.weights = [setup.randn(gemm.n, gemm.k, scale=gemm.k**-0.5, seed=seed) for seed in made]
        self.x = setup.randn(rows, gemm.k, seed=1000)
        self.gain_in, self.gain_out = torch.ones_like(self.x[0]), self.x.new_ones(gemm.n)
        self.before = setup.randn(rows, gemm.n, seed=1001)
        self.residual = self.before.clone()
        self.limit_us = setup.limit_us(nbytes, 2.0 * rows * gemm.n * gemm.k)

    def reset(self) -> None:
        self.residual.copy_(self.before)

    def run(self, config: GemmConfig, index: int) -> torch.Tensor:
        weight, kind = self.weights[index], self.gemm.kind
        return self._fused(config, weight) if self.fused and kind != "head" else self._plain(config, weight)

    def _fused(self, config: GemmConfig, weight: torch.Tensor) -> torch.Tensor:
        """norm + GEMM (+ activation), or GEMM + residual."""
        kind = self.gemm.kind
        if kind in SUMMED:
            if config.is_skinny:
                return skinny.linear(self.x, weight, config, residual=self.residual)
            product = matmul(self.x, weight, config)
            return self.residual.add_(product.sum(0) if product.ndim == 3 else product)
        if config.is_skinny:
            return skinny.linear(self.x, weight, config, norm=Norm(self.gain_in, EPS), gated=kind == "gate_up")
        return self._activated(self.kernels.rms_norm(self.x, self.gain_in, EPS), config, weight)

    def _plain(self, config: GemmConfig, weight: torch.Tensor) -> torch.Tensor:
        """GEMM (+ activation), or GEMM + residual + norm."""
        if self.gemm.kind not in SUMMED:
            return self._activated(self.x, config, weight)
        return self.kernels.add_norms(matmul(self.x, weight, config), self.residual, Norm(self.gain_out, EPS))[0]

    def _activated(self, x: torch.Tensor, config: GemmConfig, weight: torch.Tensor) -> torch.Tensor:
        if self.gemm.kind != "gate_up":
            return matmul(x, weight, config)
        if config.kernel == "decode":
            return decode.linear(x, weight, config, gated=True)
        return self.kernels.silu_mul(matmul(x, weight, config))


def gemm(setup: Setup) -> Iterator[Line]:
    name = "" if setup.dry else torch.cuda.get_device_name(setup.device)
    chosen, kernels = shipped_table(name), select_kernels(setup.device, interpret=setup.dry)
    for one in gemms(setup):
        for rows in setup.rows(ROWS, (1, 3)):
            projection = Projection(setup, kernels, one, rows)
            engine = chosen.lookup(one, rows)
            configs = dict.fromkeys([LIBRARY, engine, *contenders(one, rows)])
            if setup.dry:  # the interpreter is slow: one of each kernel
                configs = dict.fromkeys({config.kernel: config for config in configs}.values())
            yield compare(
                setup,
                Point(
                    labels={"gemm": one.kind, "n": one.n, "k": one.k, "rows": rows},
                    contenders={name_of(config): partial(projection.run, config) for config in configs},
                    num_sets=len(projection.weights),
                    limit_us=projection.limit_us,
                    chosen=name_of(engine),
                    reset=projection.reset,
                ),
            )


def gemms(setup: Setup) -> list[Gemm]:
    """One rank's."""
    model, ranks = setup.model, setup.options.ranks
    hidden, heads = model.hidden_size, model.num_attention_heads // ranks * model.head_dim
    kv_heads = max(1, model.num_key_value_heads // ranks) * model.head_dim
    inner = model.intermediate_size // ranks
    sizes = {
        "qkv": (heads + 2 * kv_heads, hidden),
        "o": (hidden, heads),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (-(-model.vocab_size // ranks), hidden),
    }
    if setup.dry:
        sizes = {kind: (min(n, DRY_SIZE), min(k, DRY_SIZE)) for kind, (n, k) in sizes.items()}
    dtype = str(setup.dtype).removeprefix("torch.")
    return [Gemm(kind, *sizes[kind], dtype, ranks == 1) for kind in KINDS]


def name_of(config: GemmConfig) -> str:
    if config == LIBRARY:
        return "cuBLAS"
    sizes = (config.block_n, config.block_m, config.block_k, config.stages)
    return f"{config.kernel}-{'x'.join(str(size) for size in sizes if size)}/{config.split_k}w{config.num_warps}"
