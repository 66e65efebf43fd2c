"""GEMMs of a layer and the head by rows, with weights of 16 bits, in FP8 or of 4 bits: cuBLAS with 16-bit weights, the
engine's choice, and what scripts/tune_steps.py would try.

A GEMM is timed with what its kernel may be fused with: for 16 bits, on one rank with few rows, a norm before it,
activation or residual after it; else the kernel that takes its result, which is the activation for gate and up, and for
o and down add + RMSNorm, which adds up parts of K. FP8 comes with the kernel that rounds its activations. Under PDL a
kernel helps or hinders its neighbours: whole steps decide.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tune_steps import contenders, int4_contenders

from bench_cases.harness import EPS, Line, Point, Setup, compare
from nanovllm.kernels import Kernels, select_kernels
from nanovllm.kernels.fp8 import gemm as fp8
from nanovllm.kernels.fp8.operands import FP8Weight
from nanovllm.kernels.fp8.reference import quantize_blocks
from nanovllm.kernels.gemm import dense, packed, packed_row, packed_tile
from nanovllm.kernels.gemm.packed import PackedWeight
from nanovllm.kernels.plan.config import FP8, INT4, KINDS, LIBRARY, SKINNY_ROWS, SUMMED, Gemm, GemmConfig
from nanovllm.kernels.plan.device import Device
from nanovllm.kernels.plan.plan import Rules, choose
from nanovllm.kernels.plan.product import Around, Product
from nanovllm.kernels.plan.table import shipped_table
from nanovllm.kernels.pointwise.norm import Norm

ROWS, FP8_ROWS, INT4_ROWS = (1, 4, 16, 64, 128, 256), (1, 4, 16, 64, 256, 4096), (1, 2, 4, 8, 16, 32)
DRY_SIZE = 128


def as_it_is(wide: torch.Tensor) -> tuple[Any, torch.Tensor]:
    return wide, wide


def in_fp8(wide: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """An FP8 weight with scales of blocks, and its values."""
    weight, (n, k) = FP8Weight(*quantize_blocks(wide), 128), wide.shape
    scale = weight.scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return weight, (weight.values.float() * scale).to(wide.dtype)


def in_int4(wide: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """A 4-bit weight with groups of 128 columns, and its values."""
    (n, k), group = wide.shape, min(128, wide.shape[1])
    codes, scales = packed.quantize(wide, group, wide.dtype)
    weight = PackedWeight.empty(n, k, group, False, wide.dtype, wide.device)
    weight.words.copy_(packed.pack(codes))
    weight.scales[..., 0] = scales.T
    return weight, weight.widened().to(wide.dtype)


class Projection:
    """x [rows, k] and the weights [n, k] of several layers, with their values in 16 bits."""

    def __init__(
        self, setup: Setup, kernels: Kernels, gemm: Gemm, rows: int, make: Callable[..., Any], nbytes: float
    ) -> None:
        """nbytes: of a weight."""
        self.gemm, self.kernels = gemm, kernels
        self.fused = gemm.fused and rows <= SKINNY_ROWS and make is as_it_is and gemm.kind != "head"
        made = range(setup.sets(int(gemm.n * gemm.k * nbytes), most=64 if make is as_it_is else 16))
        wide = (setup.randn(gemm.n, gemm.k, scale=gemm.k**-0.5, seed=seed) for seed in made)
        self.weights, self.wide = zip(*map(make, wide), strict=True)
        self.x = setup.randn(rows, gemm.k, seed=1000)
        self.gain_in, self.gain_out = torch.ones_like(self.x[0]), self.x.new_ones(gemm.n)
        self.before = setup.randn(rows, gemm.n, seed=1001)
        self.residual = self.before.clone()
        flops = 2.0 * rows * gemm.n * gemm.k / (2 if gemm.dtype == FP8 else 1)  # arithmetic in e4m3 is twice as fast
        self.limit_us = setup.limit_us(gemm.n * gemm.k * nbytes, flops)

    def reset(self) -> None:
        self.residual.copy_(self.before)

    def library(self, index: int) -> torch.Tensor:
        return self._followed(F.linear(self.x, self.wide[index]))

    def widened(self, index: int) -> torch.Tensor:
        return self._followed(packed_tile.linear_widened(self.x, self.weights[index]))

    def run(self, config: GemmConfig, index: int) -> torch.Tensor:
        weight, gated = self.weights[index], self.gemm.kind == "gate_up"
        if self.fused:
            return self._fused(config, weight)
        if config == LIBRARY and not isinstance(weight, torch.Tensor):
            config = GemmConfig("scaled" if isinstance(weight, FP8Weight) else "widened")
        if isinstance(weight, FP8Weight):
            call: Callable[..., torch.Tensor] = fp8.linear
        elif isinstance(weight, PackedWeight):
            call = packed_row.linear if config.kernel == "stream" else packed_tile.linear
        else:
            call = dense.linear
        if gated and config.is_our_kernel:
            return call(self.x, weight, config, gated=True)
        return self._followed(call(self.x, weight, config))

    def _fused(self, config: GemmConfig, weight: torch.Tensor) -> torch.Tensor:
        """norm + GEMM (+ activation), or GEMM + residual."""
        kind = self.gemm.kind
        if config.is_skinny and kind in SUMMED:
            return dense.linear(self.x, weight, config, residual=self.residual)
        if config.is_skinny:
            return dense.linear(self.x, weight, config, norm=Norm(self.gain_in, EPS), gated=kind == "gate_up")
        if kind in SUMMED:
            product = dense.linear(self.x, weight, config)
            return self.residual.add_(product.sum(0) if product.ndim == 3 else product)
        x, _ = self.kernels.add_norms(self.x, None, Norm(self.gain_in, EPS))
        if kind == "gate_up" and config.kernel == "tile":
            return dense.linear(x, weight, config, gated=True)
        return self._followed(dense.linear(x, weight, config))

    def _followed(self, product: torch.Tensor) -> torch.Tensor:
        """The product after the kernel that takes its result."""
        if self.gemm.kind == "gate_up":
            return self.kernels.activation(product, "silu", True)
        if self.gemm.kind in SUMMED:
            return self.kernels.add_norms(product, self.residual, Norm(self.gain_out, EPS))[0]
        return product


def gemm(setup: Setup) -> Iterator[Line]:
    device = Device.of(setup.device)
    rules = Rules(device, own_kernels=True, table=shipped_table(device.name))
    for one in gemms(setup):
        for rows in setup.rows(ROWS, (1, 3)):
            engine, _ = choose(Product(*one[:4], around=Around(adds_parts=one.kind in SUMMED)), rows, rules)
            configs = dict.fromkeys([LIBRARY, engine, *contenders(one, rows)])
            if setup.dry:  # the interpreter is slow: one of each kernel
                configs = dict.fromkeys({config.kernel: config for config in configs}.values())
            yield line(setup, one, rows, as_it_is, setup.dtype.itemsize, list(configs), chosen=name_of(engine))


def fp8_gemm(setup: Setup) -> Iterator[Line]:
    for one in gemms(setup)[:-1]:
        for rows in setup.rows(FP8_ROWS, (3,)):
            one = one._replace(dtype=FP8)
            configs = contenders(one, rows) if rows <= 256 else [LIBRARY]
            if setup.dry:  # the interpreter is slow, and rounds to e4m3 otherwise than a GPU
                configs = [config for config in configs if config.kernel == "tile" and config.parts == 1][:1]
            # What rounding activations to e4m3 costs is the larger part of it.
            yield line(setup, one, rows, in_fp8, 1, configs, tolerance=0.3 if setup.dry else 0.06)


def int4_gemm(setup: Setup) -> Iterator[Line]:
    for one in gemms(setup)[:-1]:
        for rows in setup.rows(INT4_ROWS, (1, 3)):
            one = one._replace(dtype=INT4)
            configs = [config for config in int4_contenders(one, rows) if config.is_our_kernel]
            if setup.dry:  # the interpreter is slow, and knows no Gluon
                configs = [config for config in configs if config.kernel != "stream"][:1]
            yield line(setup, one, rows, in_int4, 17 / 32, configs)


def line(
    setup: Setup, gemm: Gemm, rows: int, make: Callable[..., Any], nbytes: float, configs: list[GemmConfig],
    **point: Any,
) -> Line:  # fmt: skip
    projection = Projection(setup, select_kernels(setup.device, interpret=setup.dry), gemm, rows, make, nbytes)
    calls = {} if make is as_it_is else {"16 bits": projection.library}
    calls |= {"widened": projection.widened} if make is in_int4 else {}
    calls |= {name_of(config): partial(projection.run, config) for config in configs}
    labels: Line = {"gemm": gemm.kind, "n": gemm.n, "k": gemm.k, "rows": rows}
    sets = len(projection.weights)
    return compare(setup, Point(labels, calls, sets, projection.limit_us, reset=projection.reset, **point))


def gemms(setup: Setup) -> list[Gemm]:
    """One rank's; the head last."""
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
