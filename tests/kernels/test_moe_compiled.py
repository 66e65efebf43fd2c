"""The kernels of mixtures of experts compiled, which takes no GPU: they fit; and for compute capability 9.0 they keep
to registers, and multiply by matrix instructions of Hopper where tiles are large enough for them."""

import pytest
from compiling import run_alone

pytest.importorskip("triton")

COMPILE = """
import sys
import torch
from compiling import SHARED_BYTES, compile_only
from nanovllm.kernels.base import device
from nanovllm.kernels.moe import experts
from nanovllm.kernels.plan.rules import FEW_TOKENS, expert_configs
from nanovllm.kernels.moe.combine import combine
from nanovllm.kernels.moe.experts import ExpertActivation, expert_down, expert_gate_up
from nanovllm.kernels.moe.few_rows import add_experts, sum_experts
from nanovllm.kernels.moe.routing import TopK, route
from nanovllm.kernels.pointwise.norm import Norm

capability, dtype = int(sys.argv[2]), getattr(torch, sys.argv[3])
device.supports_pdl = lambda device: capability >= 90
experts.supports_tma = lambda device: capability // 10 in (9, 10)

def check(ptx, options):
    if options.get("GATED") is False and capability >= 90:
        # What routing wrote is read before the kernel ahead has ended: past L1.
        early = ptx[: ptx.index("griddepcontrol.wait")]
        assert early.count("ld.global.cg") == 3 == early.count("ld.global"), early
    if options.get("BLOCK_N", 0) >= 64 and capability == 90:
        assert "wgmma" in ptx and "cp.async.bulk.tensor" in ptx, options

compile_only(check, most_spilled=0 if capability == 90 else None, capability=capability)
hidden, width, num_experts, top_k, is_clamped, rows = eval(sys.argv[1])
def bf16(*shape):
    return torch.empty(shape, dtype=dtype)
x = bf16(rows, hidden)
configs = expert_configs(rows * top_k, num_experts, dtype.itemsize, SHARED_BYTES[capability])
logits, options = torch.empty(1, rows, num_experts), TopK(num_experts, top_k)
routing = route(logits, options, configs.block_m)
biases = (bf16(num_experts, 2 * width), bf16(num_experts, hidden)) if is_clamped else (None, None)
activation = ExpertActivation(7.0, 1.702) if is_clamped else ExpertActivation()
h = expert_gate_up(x, bf16(num_experts, 2 * width, hidden), routing, configs.gate_up, activation, biases[0])
parts = expert_down(h, bf16(num_experts, hidden, width), routing, configs.down, torch.float32, biases[1])
combine(parts, dtype)
if rows <= FEW_TOKENS:
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
    run_alone(COMPILE, repr((*shape, rows)), "90", "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 120])
def test_many_tokens_fit_a_multiprocessor_of_every_kind(capability: int) -> None:
    for dtype in ("bfloat16", "float32"):
        run_alone(COMPILE, repr((2048, 768, 128, 8, False, 16384)), str(capability), dtype)
