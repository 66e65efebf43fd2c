"""Which kernel multiplies by which weight: decided on rank 0 for all ranks.

Ranks must take the same kernels, or their sums would differ in rounding, and repeated runs are equal to the last bit
only with the same choices. The decisions are data (kernels/plan/rules.py); nothing is timed when an engine starts.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from nanovllm.kernels.base.device import supports_tma
from nanovllm.kernels.base.memory_split import equal_memory_split
from nanovllm.kernels.fp8.reference import GROUP
from nanovllm.kernels.gemm.dispatch import matmul
from nanovllm.kernels.plan.config import LIBRARY, Choices, Gemm, GemmConfig, Ranges
from nanovllm.kernels.plan.order import leaves_of, ranges, without_library
from nanovllm.kernels.plan.rules import merges_before
from nanovllm.kernels.plan.table import GemmTable, load, shipped_table
from nanovllm.kernels.pointwise.norm import add_up
from nanovllm.layers.linear import ParallelLinear
from nanovllm.layers.quantized import FP8Matrix
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.parallel.group import TensorParallelGroup
from nanovllm.wire.shapes import StepShape, decode_buckets

logger = logging.getLogger(__name__)

_ROWS_CHECKED, _HEAD_ROWS_CHECKED = 4096, 512
_SHARED_PERCENT = 75
"""A step of one row on an H200, us, so and where each kernel has a division of its own: 0.6B 568 of 637, 8B with 4-bit
weights 1,640 of 1,784; in FP8 2,541 of 2,448."""


def table_for(device: torch.device, path: str | None) -> GemmTable:
    """The table of the file `path` (EngineConfig.kernel_choices), or the one that the package has for this device.
    Raises ValueError with the path where the file is missing or spoilt."""
    if path is not None:
        return load(path)
    return shipped_table(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")


def linears(model: nn.Module) -> Iterator[ParallelLinear]:
    """All linear layers of a model."""
    return (module for module in model.modules() if isinstance(module, ParallelLinear))


def gemms(model: nn.Module, fused: bool) -> dict[Gemm, ParallelLinear]:
    """The different GEMMs of a model, each with one of the layers that do it. fused: see Gemm."""
    found: dict[Gemm, ParallelLinear] = {}
    for linear in linears(model):
        found.setdefault(linear.gemm(fused), linear)
    return found


def chosen(model: nn.Module, table: GemmTable, fused: bool, max_rows: int) -> Choices:
    """What the table says for the captured decode steps of up to `max_rows` rows."""
    choices: Choices = {}
    for gemm, linear in gemms(model, fused).items():
        tma = supports_tma(next(linear.parameters()).device)
        by_rows = {rows: table.lookup(gemm, rows, tma) for rows in decode_buckets(max_rows)}
        choices[gemm] = {rows: config for rows, config in by_rows.items() if config != LIBRARY}
    return choices


def report(model: nn.Module, table: GemmTable, fused: bool) -> str:
    """How many of the model's different GEMMs the table has; the fallback rule serves the others."""
    found = gemms(model, fused)
    return f"{sum(map(table.is_tuned, found))} of {len(found)} tuned"


def apply(model: DecoderForCausalLM, choices: Choices, fused: bool) -> None:
    """Gives every linear layer its choices. `fused`: steps of the rows that skinny kernels take use forward_fused,
    where norm, activation and residual are inside the GEMMs."""
    fused_rows: set[int] = set()
    for linear in linears(model):
        linear.use(choices.get(linear.gemm(fused), {}))
        if linear.kind != "head":
            fused_rows |= {rows for rows in linear.configs if linear.fuses(rows)}
    model.fused_rows = fused_rows if fused and model.can_fuse else set()
    for attention in model.attention_layers():
        o_proj = attention.o_proj
        attention.backend.merge_first_rows = _merge_first_rows(o_proj)
        in_registers = isinstance(o_proj.quantized, FP8Matrix) and o_proj.choice(1).is_skinny
        attention.rounds_row = in_registers and o_proj.takes_rounded and attention.spec.head_dim == GROUP
        attention.backend.leave_l1(in_registers)  # what goes into registers comes through L1


def _merge_first_rows(o_proj: ParallelLinear) -> frozenset[int]:
    """What AttentionBackend.merge_first_rows is: where a skinny kernel multiplies next and fetches its weight early."""
    num_bytes = sum(parameter.nbytes for parameter in o_proj.parameters())
    rows_of_skinny = (rows for rows, config in o_proj.configs.items() if config.is_skinny)
    return frozenset(rows for rows in rows_of_skinny if merges_before(rows, num_bytes))


@contextmanager
def before_capture(model: DecoderForCausalLM, shape: StepShape) -> Iterator[None]:
    """For a run of `shape` that readies what its graph will launch: fewer layers launch the same kernels. In a chain of
    kernels for one row, none of which waits for all of the one before it, each asks for the same division of memory;
    with weights in FP8 attention leaves L1 to the others instead.
    """
    attention = model.attention_layers()[0]
    is_chain = 1 in model.fused_rows and 1 not in attention.backend.merge_first_rows
    is_chain &= not isinstance(attention.o_proj.quantized, FP8Matrix)
    with model.few_layers(), equal_memory_split(_SHARED_PERCENT) if is_chain and sum(shape) == 1 else nullcontext():
        yield


def fix_order(model: DecoderForCausalLM, table: GemmTable, group: TensorParallelGroup) -> None:
    """Gives every linear layer choices for all numbers of rows that give a row the same bits (EngineConfig.exact_bits).
    A rank decides for itself: no order depends on what else was chosen."""
    for linear in linears(model):
        gemm = linear.gemm(group.size == 1)
        leaves = leaves_of(gemm.k * group.size) // group.size if group.exact_bits == "tp" else 0
        linear.ranges = ranges(gemm, table, linear.takes_parts, leaves, group.device.type == "cpu")


def check_order(model: nn.Module, most_rows: int) -> None:
    """Makes sure, for the weights of every shape, that all choices of `fix_order` give all rows the same bits on this
    device, in steps of up to `most_rows` rows. Where the library has another order our own tiles take its place, with
    a warning."""
    found: dict[Gemm, list[ParallelLinear]] = {}
    for linear in linears(model):
        found.setdefault(linear.gemm(True), []).append(linear)
    for gemm, alike in found.items():
        by_rows, most = alike[0].ranges, min(_HEAD_ROWS_CHECKED if gemm.kind == "head" else _ROWS_CHECKED, most_rows)
        if differing := rows_that_differ(alike[0].weight, by_rows, most):
            logger.warning("%s: the library's order of sums varies (rows %s); our tiles multiply", gemm, differing)
            for linear in alike:
                linear.ranges = without_library(by_rows, gemm.k)


def rows_that_differ(weight: torch.Tensor, by_rows: Ranges, most_rows: int) -> list[int]:
    """Numbers of rows up to `most_rows`, of those around the ends of ranges and some between, for which `by_rows` gives
    some row of a random x other bits than its first configuration for several."""
    make = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(most_rows, weight.shape[1], generator=make, device=weight.device).to(weight.dtype)
    tried = {rows for most, _ in by_rows for rows in (most, most + 1)} | {3, 100, 257, 300, 512, 1000, 2048, most_rows}
    expected = _whole(x, weight, by_rows[0][1])
    return [
        rows for rows in sorted(tried) if rows <= most_rows and not torch.equal(
            _whole(x[:rows], weight, next(config for most, config in by_rows if rows <= most)), expected[:rows])
    ]  # fmt: skip


def _whole(x: torch.Tensor, weight: torch.Tensor, config: GemmConfig) -> torch.Tensor:
    y = matmul(x, weight, config)
    return y if y.dim() == 2 else add_up(y, x.dtype)
