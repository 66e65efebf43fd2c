"""Whether products have one order of sums on this device, whatever their rows (EngineConfig.exact_bits)."""

import logging
from dataclasses import replace

import torch
from torch import nn

from nanovllm.kernels.gemm import dense
from nanovllm.kernels.plan.config import Gemm, GemmConfig, Ranges
from nanovllm.kernels.plan.plan import Planner, fixed_order
from nanovllm.kernels.pointwise.norm import add_up
from nanovllm.layers.linear import ParallelLinear

logger = logging.getLogger(__name__)

_ROWS_CHECKED, _HEAD_ROWS_CHECKED = 4096, 512


def check_order(model: nn.Module, planner: Planner, most_rows: int) -> None:
    """Makes sure, for the weights of every shape, that all choices give all rows the same bits on this device, in steps
    of up to `most_rows` rows. Where the library has another order our own tiles take its place, with a warning. A rank
    decides for itself: no order depends on what else was chosen."""
    found: dict[Gemm, ParallelLinear] = {}
    for module in model.modules():
        if isinstance(module, ParallelLinear):
            found.setdefault(module.product.gemm(planner.rules.world), module)
    for gemm, linear in found.items():
        by_rows = fixed_order(linear.product, planner.rules)
        most = min(_HEAD_ROWS_CHECKED if gemm.kind == "head" else _ROWS_CHECKED, most_rows)
        if differing := rows_that_differ(linear.weight, by_rows, most):
            logger.warning("%s: the library's order of sums varies (rows %s); our tiles multiply", gemm, differing)
            planner.adopt(replace(planner.rules, unordered=planner.rules.unordered | {gemm}))


def rows_that_differ(weight: torch.Tensor, by_rows: Ranges, most_rows: int) -> list[int]:
    """Numbers of rows up to `most_rows`, of those around the ends of ranges and some between, for which `by_rows` gives
    some row of a random x [rows, K], by weight [N, K], other bits than its first configuration for several."""
    make = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(most_rows, weight.shape[1], generator=make, device=weight.device).to(weight.dtype)
    tried = {rows for most, _ in by_rows for rows in (most, most + 1)} | {3, 100, 257, 300, 512, 1000, 2048, most_rows}
    expected = _whole(x, weight, by_rows[0][1])
    return [
        rows for rows in sorted(tried) if rows <= most_rows and not torch.equal(
            _whole(x[:rows], weight, next(config for most, config in by_rows if rows <= most)), expected[:rows])
    ]  # fmt: skip


def _whole(x: torch.Tensor, weight: torch.Tensor, config: GemmConfig) -> torch.Tensor:
    y = dense.linear(x, weight, config)
    return y if y.dim() == 2 else add_up(y, x.dtype)
