"""Whatever a plan names compiles, for GPUs of every kind, and fits their shared memory; on Hopper, experts
hardly spill, and multiply by its matrix instructions where tiles are large enough for them. Takes no GPU."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from compiling import compile_only, empty, empty_fp8, run_alone
from test_recurrent import NUM_LINES, step_rows

pytest.importorskip("triton")

from nanovllm.config import EngineConfig
from nanovllm.kernels import select_kernels
from nanovllm.kernels.fp8 import gemm as fp8
from nanovllm.kernels.gemm import dense, packed_row, packed_tile
from nanovllm.kernels.gemm.packed import PackedWeight
from nanovllm.kernels.moe import linear as experts
from nanovllm.kernels.moe.combine import combine
from nanovllm.kernels.moe.experts import ExpertActivation
from nanovllm.kernels.moe.linear import Routed
from nanovllm.kernels.moe.routing import TopK, route
from nanovllm.kernels.plan.config import FP8, PACKED, Gemm
from nanovllm.kernels.plan.device import Device
from nanovllm.kernels.plan.plan import Launch, Planner, Rules
from nanovllm.kernels.plan.product import Product
from nanovllm.kernels.plan.rules import int4_config
from nanovllm.kernels.plan.table import shipped_table
from nanovllm.kernels.pointwise.norm import Norm
from nanovllm.kernels.recurrent.conv import causal_conv
from nanovllm.kernels.recurrent.delta import DeltaWeights, gated_delta_rule
from nanovllm.kernels.recurrent.delta_prompt import DeltaSizes
from nanovllm.kernels.recurrent.gated_norm import gated_mean_squares, gated_norm
from nanovllm.kernels.recurrent.mamba import MambaSizes, MambaWeights, mamba
from nanovllm.layers.packed import FORMATS
from nanovllm.layers.step import Call
from nanovllm.model_config import Quantization
from nanovllm.models.planned import layer_kinds
from nanovllm.models.registry import read_model_config

KERNELS = select_kernels("cuda")
GROUPS = {"int4": 128, "mxfp4": 32, "nvfp4": 16, "int8": 128}
OURS = {"fma", "tile", "roles", "int4", "int4_whole", "stream"}


def check_experts(ptx: str, options: dict[str, Any]) -> None:
    if "TOP_K" not in options or "X_LEFT" not in options or not options["TOP_K"]:
        return
    if not options["GATED"]:
        # What routing wrote is read before the kernel ahead has ended: past L1.
        early = ptx[: ptx.index("griddepcontrol.wait")]
        assert early.count("ld.global.cg") == 3 == early.count("ld.global"), early
    if options["BLOCK_N"] >= 64:
        assert "wgmma" in ptx and "cp.async.bulk.tensor" in ptx, options


def compile_for(device: Device, of_experts: bool = False, most_spilled: int | None = 12) -> None:
    from triton.runtime.jit import JITFunction

    Device.of = lambda _: device
    # 12 bytes are those of gpt-oss's widest tiles, which add a bias.
    checks: dict[str, Any] = {}
    if of_experts and device.has_roles:
        checks = {"check": check_experts, "most_spilled": most_spilled}
    compile_only(**{"most_spilled": None, **checks}, capability=10 * device.capability[0] + device.capability[1])
    compiled = JITFunction.run
    JITFunction.run = lambda self, *args, **options: compiled(  # what the interpreter does otherwise
        self, *args, **options | ({"PTX": True} if "PTX" in options else {})
    )


def multiply(one: Product, rows: int, launch: Launch) -> None:
    config, x = launch.config, empty(rows, one.k)
    around = Call(None, None, Norm(empty(one.k), 1e-6), empty(rows, one.n), bias=empty(one.n)).around(launch)
    if one.dtype == FP8:
        fp8.linear(x, empty_fp8(one.n, one.k, rows_each=one.scale_rows or 1), config, **around)
    elif one.dtype in PACKED:
        linear = (packed_row if config.is_skinny else packed_tile).linear
        linear(x, empty_packed(one.dtype, one.n, one.k), config, **around)
    else:
        dense.linear(x, empty(one.n, one.k), config, **around)


def empty_packed(method: str, *shape: int) -> PackedWeight:
    """A weight [..., n, k] in one of PACKED."""
    *stack, n, k = shape
    meta = torch.device("meta")
    return PackedWeight.empty(n, k, GROUPS[method], False, torch.bfloat16, meta, tuple(stack), FORMATS[method][0])


def choose(one: Product, rows: int, launch: Launch) -> None:
    """Launches a kernel of experts; where kernels for a few tokens do not take it gpt-oss's, with biases and a
    clamped activation."""
    assert one.choice is not None
    (count, top_k, dtype, for_few), gated = one.choice, launch.gate
    make = partial(empty_packed, dtype) if dtype in PACKED else empty_fp8 if dtype == FP8 else empty
    weight = make(count, one.n, one.k)
    logits, options = empty(1, rows, count, dtype=torch.float32), TopK(count, top_k)
    activation = ExpertActivation() if for_few else ExpertActivation(7.0, 1.702)
    biases = (None, None) if for_few else (empty(count, one.n), empty(count, one.n))
    routing = None if launch.config.is_skinny else route(logits, options, launch.config.block_m)
    routed = Routed(KERNELS, logits, options, routing, activation, biases)
    shape = (rows, top_k, one.k) if launch.config.is_skinny else (rows * top_k, one.k)
    x = empty(rows, one.k) if gated else empty(*shape)
    call = Call(None, None, Norm(empty(one.k), 1e-6), empty(rows, one.n), routed)
    y = experts.linear(x, weight, launch.config, routed, **call.around(launch))
    if routing is not None and not gated:
        combine(y, x.dtype)


def compile_plans(
    name: str, quantization: str | None, models: tuple[str, ...], all_rows: tuple[int, ...], world: int = 1
) -> None:
    """Compiles what the plans of models launch at these numbers of rows on a rank of so many, each kernel once."""
    device, done = Device.named(name), set()
    # Experts in 4 and 8 bits of few tokens have 128 registers and spill some: NVFP4 most but for integers of 8 bits.
    most_spilled = None if quantization == "int8" else 68 if quantization in GROUPS else 12
    compile_for(device, models == MIXTURES, most_spilled)
    for model in models if quantization is None or models == DENSE else models[:1]:
        made = quantization if quantization in ("fp8", "int4") else None
        config = read_model_config(EngineConfig(model, load_format="dummy", quantization=made))
        if quantization in GROUPS and made is None:
            how = Quantization(quantization, group=GROUPS[quantization])
            config = replace(config, layers=tuple(replace(layer, quantization=how) for layer in config.layers))
        rules = Rules(device, world, own_kernels=True, table=shipped_table(device.name))
        kinds, head = layer_kinds(config, rules, "bfloat16")
        planner = Planner(rules)
        for rows in all_rows:
            launches = [pair for kind in kinds
                        for pair in zip(kind.operations, planner.layer(kind.operations)[rows].launches, strict=True)]
            for one, launch in [*launches, (head, planner.launches(head)[rows])]:
                is_routed = one.choice is not None
                if launch.config.kernel not in OURS or (is_routed and not one.is_of_experts):
                    continue
                k = one.k if launch.config.is_skinny or is_routed else 0
                own_rows = rows if launch.config.kernel == "stream" else 0  # others take any number
                inside = launch.norm, launch.gate, launch.residual, launch.bias
                key = (one.dtype, launch.config, inside, k, own_rows, is_routed)
                if key not in done:
                    done.add(key)
                    (choose if is_routed else multiply)(one, rows, launch)
    assert done


DENSE = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Llama-3.1-8B",
         "Llama-3.2-1B", "Qwen2.5-7B", "Gemma-2-9B")  # fmt: skip
MIXTURES = ("Qwen3-30B-A3B", "gpt-oss-20b")
"""Mixtures of which the second is not plain, is in MXFP4, and not served in others."""
DEVICES = ["H200", "H100", "B200", "A100", "L40S", "5090"]


def compile_recurrent(name: str) -> None:
    """Compiles kernels of recurrent layers for decodes and prompts, at the sizes of published models."""
    compile_for(Device.named(name))
    rows = step_rows(2, [65, 3], torch.device("cpu"), {2: 16})
    tokens, lines = rows.num_tokens, NUM_LINES + 1

    def convolve(channels: int, width: int, **how: Any) -> None:
        x, last = empty(tokens, channels * (3 if "gated" in how else 1)), empty(lines, width - 1, channels)
        causal_conv(x, empty(channels, width), last, rows, **how)

    def floats(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.float32)

    for delta in (DeltaSizes(16, 48, 128, 128), DeltaSizes(30, 30, 96, 192)):  # Qwen3.6-27B, OLMo-Hybrid-7B
        heads, wide = delta.value_heads, delta.value_heads * delta.value_dim
        convolve(delta.channels, 4, unit=delta.unit)
        of_delta = DeltaWeights(floats(heads), floats(heads), empty(delta.value_dim), 1e-6)
        x, gates, z = empty(tokens, delta.channels), empty(tokens, heads), empty(tokens, wide)
        for dtype in (torch.float32, torch.bfloat16):
            states = empty(lines, heads, delta.key_dim, delta.value_dim, dtype=dtype)
            gated_delta_rule(x, gates, gates, z, of_delta, delta, states, rows)
    for sizes in (MambaSizes(64, 8, 64, 128), MambaSizes(48, 1, 64, 128)):  # Nemotron 3 Nano, Granite 4 H Tiny
        convolve(sizes.channels, 4, bias=empty(sizes.channels))
        of_mamba = MambaWeights(*(floats(sizes.heads) for _ in range(3)), 0.001)
        x, dt, z = (empty(tokens, size) for size in (sizes.channels, sizes.heads, sizes.inner))
        for dtype in (torch.float32, torch.bfloat16):
            states = empty(lines, sizes.heads, sizes.state, sizes.dim, dtype=dtype)
            mamba(x, dt, of_mamba, sizes, states, rows)
        gated_norm(z, z, empty(sizes.inner), 1e-5, sizes.groups)
        gated_norm(z, z, empty(sizes.inner), 1e-5, 1, gated_mean_squares(z, z, 1.0, 0, 1))
    convolve(2048, 3, gated=True)  # LFM2-1.2B


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_of_recurrent_layers_compile(device: str) -> None:
    run_alone(compile_recurrent, device)


@pytest.mark.parametrize("device", ["H200", "5090"])
def test_a_small_models_plan_compiles(device: str) -> None:
    run_alone(compile_plans, device, None, ("Qwen3-0.6B",), (1, 64))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "fp8", *GROUPS])
@pytest.mark.parametrize("device", DEVICES)
def test_every_dense_models_plan_compiles(device: str, quantization: str | None) -> None:
    if quantization == "fp8" and device not in ("H200", "H100", "B200"):
        pytest.skip("FP8 weights are widened there")
    run_alone(compile_plans, device, quantization, DENSE, (1, 2, 4, 8, 64, 256))


@pytest.mark.parametrize("kind", ["qkv", "o", "gate_up", "down"])
@pytest.mark.parametrize("dtype", PACKED)
def test_tiles_of_packed_weights_fit_in_small_shared_memory(dtype: str, kind: str) -> None:
    """Steps that are on their way: all but one. That these compile is for the nightly tests below."""
    for device in map(Device.named, ("L40S", "5090", "A100")):
        for rows in (2, 16, 32, 64, 128, 129, 256):
            one = int4_config(Gemm(kind, 24576, 4096, dtype, False), rows, device.processors, device.shared_bytes)
            step = 256 * one.block_m + (128 if dtype == "int8" else 64) * one.block_n
            assert (one.stages - 1) * step <= device.shared_bytes, (device, rows, one)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "fp8", *GROUPS])
@pytest.mark.parametrize("device", DEVICES)
def test_every_mixtures_plan_compiles(device: str, quantization: str | None) -> None:
    if quantization == "fp8" and device not in ("H200", "H100", "B200"):
        pytest.skip("FP8 experts are refused there")
    run_alone(compile_plans, device, quantization, MIXTURES, (1, 4, 16, 64, 256, 768, 4096))


@pytest.mark.slow
def test_a_mixtures_plan_for_a_few_tokens_on_two_ranks_compiles() -> None:
    run_alone(compile_plans, "H200", None, MIXTURES, (1,), 2)
