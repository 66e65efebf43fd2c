"""The kernels of mixtures of experts compiled for compute capability 9.0, which takes no GPU: they fit, keep to
registers, and multiply by matrix instructions of Hopper where tiles are large enough for them."""

import pytest
from compiling import run_alone

pytest.importorskip("triton")

COMPILE = """
import sys
import torch
from compiling import compile_only
from nanovllm.kernels.base import device
from nanovllm.kernels.moe import experts
from nanovllm.kernels.plan.rules import expert_configs
from nanovllm.kernels.moe.combine import combine
from nanovllm.kernels.moe.experts import ExpertActivation, expert_down, expert_gate_up
from nanovllm.kernels.moe.few_rows import MOST_ROWS, add_experts, sum_experts
from nanovllm.kernels.moe.routing import TopK, route
from nanovllm.kernels.pointwise.norm import Norm

device.supports_pdl = experts.supports_tma = lambda device: True

def check(ptx, options):
    if options.get("GATED") is False:  # what routing wrote is read before the kernel ahead has ended: past L1
        early = ptx[: ptx.index("griddepcontrol.wait")]
        assert early.count("ld.global.cg") == 3 == early.count("ld.global"), early
    if options.get("BLOCK_N", 0) >= 64:
        assert "wgmma" in ptx and "cp.async.bulk.tensor" in ptx, options

compile_only(check)
hidden, width, num_experts, top_k, is_clamped, rows = eval(sys.argv[1])
def bf16(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)
x, configs = bf16(rows, hidden), expert_configs(rows * top_k, num_experts)
logits, options = torch.empty(1, rows, num_experts), TopK(num_experts, top_k)
routing = route(logits, options, configs.block_m)
biases = (bf16(num_experts, 2 * width), bf16(num_experts, hidden)) if is_clamped else (None, None)
activation = ExpertActivation(7.0, 1.702) if is_clamped else ExpertActivation()
h = expert_gate_up(x, bf16(num_experts, 2 * width, hidden), routing, configs.gate_up, activation, biases[0])
parts = expert_down(h, bf16(num_experts, hidden, width), routing, configs.down, torch.float32, biases[1])
combine(parts, torch.bfloat16)
if rows <= MOST_ROWS:
    weights = bf16(num_experts, 2 * width, hidden), bf16(num_experts, hidden, width)
    add_experts(x, Norm(bf16(hidden), 1e-6), logits, options, *weights)
    sum_experts(x, logits, options, *weights)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "rows"),
    [((2048, 768, 128, 8, False), rows) for rows in (1, 16, 256, 768, 4096)]
    + [((2048, 384, 128, 8, False), 1), ((2880, 2880, 32, 4, True), 64)],
)
def test_kernels_fit_a_multiprocessor(shape: tuple[object, ...], rows: int) -> None:
    run_alone(COMPILE, repr((*shape, rows)))
