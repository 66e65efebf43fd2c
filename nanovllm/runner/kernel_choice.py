"""Kernels of one rank's steps (kernels/plan/plan.py decides), and the settings of the device for them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from nanovllm.config import EngineConfig
from nanovllm.kernels.base.memory_split import equal_memory_split
from nanovllm.kernels.gemm.fixed_order import library_without_parts
from nanovllm.kernels.plan.device import Device
from nanovllm.kernels.plan.plan import Rules
from nanovllm.kernels.plan.table import load, shipped_table
from nanovllm.layers.linear import ParallelLinear
from nanovllm.model_config import ModelConfig
from nanovllm.wire.shapes import StepShape

_SHARED_PERCENT = 75
"""Percent of L1 that is shared memory, in all kernels of a step of one row that is a chain. Such a step takes, on an
H200 and in us, with one division (with each kernel's own): 0.6B 568 (637), 8B with 4-bit weights 1,640 (1,784). In FP8
it would take 2,541 (2,448): there attention leaves L1 to the other kernels instead."""


def rules_of(config: EngineConfig, model: ModelConfig, device: Device, is_fused: bool) -> Rules:
    """Rules that choose kernels, for an engine of these options on this device. is_fused: see Rules."""
    ours = device.is_cuda and is_fused and config.exact_bits is None and config.uses("gemm_kernels")
    ours = ours and model.implementation == "native"
    table = shipped_table(device.name) if config.kernel_choices is None else load(config.kernel_choices)
    return Rules(device, config.tensor_parallel_size, config.exact_bits, ours, is_fused, table)


def describe(model: nn.Module, rules: Rules) -> str:
    """Says how many of a model's different GEMMs tables have; those of the nearest shapes serve the others."""
    if not rules.own_kernels:
        return "library" if rules.exact_bits is None else "one order of sums for all numbers of rows"
    linears = (part for part in model.modules() if isinstance(part, ParallelLinear))
    found = {linear.product.gemm(rules.world) for linear in linears}
    return rules.table.describe(found)


def library_settings(rules: Rules) -> AbstractContextManager[None]:
    """The settings that the library multiplies with."""
    return library_without_parts() if rules.exact_bits is not None and rules.device.is_cuda else nullcontext()


@contextmanager
def before_capture(model: Any, shape: StepShape) -> Iterator[None]:
    """Context for a run of `shape` that loads the kernels of its graph; few layers suffice, as all launch the same
    kernels."""
    is_chain = sum(shape) == 1 and all(plan.is_chain for plan in model.plans(1))
    with model.few_layers(), equal_memory_split(_SHARED_PERCENT) if is_chain else nullcontext():
        yield
