"""The kernels of mixtures of experts compiled, which takes no GPU: they fit; and for compute capability 9.0 they keep
to registers, and multiply by matrix instructions of Hopper where tiles are large enough for them."""

from typing import Any

import pytest
import torch
from compiling import SHARED_BYTES, compile_only, run_alone

pytest.importorskip("triton")

from nanovllm.kernels.moe.combine import combine
from nanovllm.kernels.moe.experts import ExpertActivation, expert_down, expert_gate_up
from nanovllm.kernels.moe.few_rows import add_experts, sum_experts
from nanovllm.kernels.moe.routing import TopK, route
from nanovllm.kernels.plan.device import Device
from nanovllm.kernels.plan.rules import FEW_TOKENS, expert_configs
from nanovllm.kernels.pointwise.norm import Norm

Shape = tuple[int, int, int, int, bool]


def compile_mixture(shape: Shape, rows: int, capability: int = 90, dtype_name: str = "bfloat16") -> None:
    """shape: hidden, width, number of experts, experts of a token, and whether gates are clamped, with biases."""
    hidden, width, num_experts, top_k, is_clamped = shape
    dtype = getattr(torch, dtype_name)

    def check(ptx: str, options: dict[str, Any]) -> None:
        if options.get("GATED") is False and capability >= 90:
            # What routing wrote is read before the kernel ahead has ended: past L1.
            early = ptx[: ptx.index("griddepcontrol.wait")]
            assert early.count("ld.global.cg") == 3 == early.count("ld.global"), early
        if options.get("BLOCK_N", 0) >= 64 and capability == 90:
            assert "wgmma" in ptx and "cp.async.bulk.tensor" in ptx, options

    def made(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    Device.of = lambda _: Device("", divmod(capability, 10))
    compile_only(check, most_spilled=0 if capability == 90 else None, capability=capability)
    x, logits, options = made(rows, hidden), torch.empty(1, rows, num_experts), TopK(num_experts, top_k)
    gate_up, down = made(num_experts, 2 * width, hidden), made(num_experts, hidden, width)
    configs = expert_configs(rows * top_k, num_experts, dtype.itemsize, SHARED_BYTES[capability])
    routing = route(logits, options, configs.down.block_m)
    biases = (made(num_experts, 2 * width), made(num_experts, hidden)) if is_clamped else (None, None)
    activation = ExpertActivation(7.0, 1.702) if is_clamped else ExpertActivation()
    h = expert_gate_up(x, gate_up, routing, configs.gate_up, activation, biases[0])
    combine(expert_down(h, down, routing, configs.down, torch.float32, biases[1]), dtype)
    if rows <= FEW_TOKENS:
        add_experts(x, Norm(made(hidden), 1e-6), logits, options, gate_up, down)
        sum_experts(x, logits, options, gate_up, down)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "rows"),
    [((2048, 768, 128, 8, False), rows) for rows in (1, 16, 256, 768, 4096)]
    + [((2048, 384, 128, 8, False), 1), ((2880, 2880, 32, 4, True), 64)],
)
def test_kernels_fit_a_multiprocessor(shape: Shape, rows: int) -> None:
    run_alone(compile_mixture, shape, rows)
