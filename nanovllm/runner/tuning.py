"""Which kernel multiplies by which weight: decided on rank 0 for all ranks.

Ranks must take the same kernels, or their sums would differ in rounding, and repeated runs are equal to the last bit
only with the same choices. The decisions are data (kernels/gemm/choice.py); nothing is timed when an engine starts.
"""

from collections.abc import Iterator

import torch
from torch import nn

from nanovllm.kernels.base.device import supports_tma
from nanovllm.kernels.gemm import fixed_order
from nanovllm.kernels.gemm.choice import LIBRARY, Choices, Gemm, GemmTable, load, merges_before, shipped_table
from nanovllm.layers.linear import ParallelLinear
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.parallel.group import TensorParallelGroup
from nanovllm.wire.shapes import decode_buckets


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
    model.fused_rows = fused_rows if fused else set()
    for attention in model.attention_layers():
        attention.backend.merge_first_rows = _merge_first_rows(attention.o_proj)


def _merge_first_rows(o_proj: ParallelLinear) -> frozenset[int]:
    """What AttentionBackend.merge_first_rows is: where a skinny kernel multiplies next and fetches its weight early."""
    num_bytes = sum(parameter.nbytes for parameter in o_proj.parameters())
    rows_of_skinny = (rows for rows, config in o_proj.configs.items() if config.is_skinny)
    return frozenset(rows for rows in rows_of_skinny if merges_before(rows, num_bytes))


def fix_order(model: nn.Module, table: GemmTable, group: TensorParallelGroup) -> None:
    """Gives every linear layer choices for all numbers of rows that give a row the same bits (EngineConfig.exact_bits).
    A rank decides for itself: no order depends on what else was chosen."""
    for linear in linears(model):
        gemm = linear.gemm(group.size == 1)
        leaves = fixed_order.leaves_of(gemm.k * group.size) // group.size if group.exact_bits == "tp" else 0
        linear.ranges = fixed_order.ranges(gemm, table, linear.takes_parts, leaves, group.device.type == "cpu")
