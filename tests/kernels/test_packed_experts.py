"""Products by experts of 4 and 8 bits against a definition of their own: any code and group, odd sizes, and rows whose
bits do not depend on others."""

import pytest
import torch
from interpreting import some_nightly
from packed_experts import E2M1_VALUES, e2m1, e4m3, packed_experts

from nanovllm.kernels.gemm.e2m1 import E2M1, MOST_EXPONENT, quantize, scales_of, words_of
from nanovllm.kernels.gemm.packed import GROUPS, INT8, PackedWeight
from nanovllm.kernels.moe.experts import (
    ExpertActivation,
    expert_down,
    expert_down_reference,
    expert_gate_up,
    expert_gate_up_reference,
)
from nanovllm.kernels.moe.routing import TopK, route_reference
from nanovllm.kernels.plan.config import INT4, GemmConfig

CODES = {
    "mxfp4": (E2M1, 32, False), "int4 of 128": (INT4, 128, False), "int4 of 32 with zeros": (INT4, 32, True),
    "int4 of 64": (INT4, 64, False), "int4 of rows with zeros": (INT4, 0, True), "nvfp4": (E2M1, 16, False),
    "int8 of 128": (INT8, 128, False), "int8 of rows": (INT8, 0, False),
}  # fmt: skip
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2} if torch.cuda.is_available() else {"rtol": 1e-5, "atol": 1e-5}
WIDE, NARROW = GemmConfig("tile", 128, 16, 128, 2), GemmConfig("tile", 64, 32, 128, 2)
CLAMPED = ExpertActivation(limit=0.7, alpha=1.7)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


@pytest.mark.parametrize("name", CODES)
def test_the_twins_weights_are_those_of_the_definition(name: str) -> None:
    weight, values = packed_experts(*CODES[name], 3, 40, 192, torch.float32, seed=5)
    for expert in range(3):
        torch.testing.assert_close(weight.widened(expert), values[expert], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "config", "rows"),
    some_nightly(
        [(name, config, rows) for name in CODES for config in (WIDE, NARROW) for rows in (1, 7, 40)],
        always=[(name, NARROW if "int4" in name else WIDE, 7) for name in CODES],
    ),
)
def test_products_are_those_of_the_twins(name: str, config: GemmConfig, rows: int) -> None:
    """Widths that no tile divides, with biases, sums of adapters and both activations."""
    experts, hidden, width, top_k = 5, 96, 160, 3
    logits = rand(1, rows, experts, seed=3).float()
    routing = route_reference(logits, TopK(experts, top_k), config.block_m)
    gate_up, wide = packed_experts(*CODES[name], experts, 2 * width, hidden, DTYPE, DEVICE)
    down, of_down = packed_experts(*CODES[name], experts, hidden, width, DTYPE, DEVICE, seed=1)
    x = rand(rows, hidden)
    for activation, biased in ((ExpertActivation(), False), (CLAMPED, True)):
        bias = (rand(experts, 2 * width, seed=4), rand(experts, hidden, seed=5)) if biased else (None, None)
        of_float32 = bias[0] if bias[0] is None else bias[0].float()
        more = [rand(rows * top_k, n, seed=6).float() if biased else None for n in (2 * width, hidden)]
        expected = expert_gate_up_reference(
            x.float(), wide, routing, config, activation, of_float32, more[0]
        ).to(DTYPE)  # fmt: skip
        twin = expert_gate_up_reference(x, gate_up, routing, config, activation, bias[0], more[0])
        torch.testing.assert_close(twin, expected, **TOLERANCE)
        h = expert_gate_up(x, gate_up, routing, config, activation, bias[0], more[0])
        torch.testing.assert_close(h, expected, **TOLERANCE)
        of_float32 = bias[1] if bias[1] is None else bias[1].float()
        expected = expert_down_reference(h.float(), of_down, routing, config, torch.float32, of_float32, more[1])
        for multiply in (expert_down_reference, expert_down):
            parts = multiply(h, down, routing, config, torch.float32, bias[1], more[1])
            torch.testing.assert_close(parts, expected, **TOLERANCE)


def test_no_code_is_a_type_to_triton() -> None:
    """Which would take it for one where it compiles kernels ahead."""
    tl = pytest.importorskip("triton.language")
    assert not any(map(tl.dtype.is_dtype, GROUPS)) and tl.dtype.is_dtype("int8")


def test_experts_without_gates_are_those_of_the_twin() -> None:
    """relu(up) ** 2."""
    routing = route_reference(rand(1, 7, 4, seed=3).float(), TopK(4, 2), 16)
    weight, wide = packed_experts(*CODES["int4 of 64"], 4, 160, 96, DTYPE, DEVICE)
    x, squared = rand(7, 96), ExpertActivation(gated=False)
    expected = expert_gate_up_reference(x, wide.to(DTYPE), routing, WIDE, squared)
    assert expected.shape == (14, 160)
    torch.testing.assert_close(expert_gate_up(x, weight, routing, WIDE, squared), expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4 of 32 with zeros", "int8 of 128"])
def test_a_row_has_the_same_bits_alone(name: str) -> None:
    experts, rows = 4, 20
    logits, x = rand(1, rows, experts, seed=3).float(), rand(rows, 160)
    weight, _ = packed_experts(*CODES[name], experts, 192, 160, DTYPE, DEVICE)
    of_many = route_reference(logits, TopK(experts, 1), 16)
    many = expert_down(x[of_many.order.long()], weight, of_many, WIDE, torch.float32)
    for row in (0, 7, 19):
        alone = route_reference(logits[:, row : row + 1], TopK(experts, 1), 16)
        got = expert_down(x[row : row + 1], weight, alone, WIDE, torch.float32)
        assert torch.equal(got[:, 0], many[:, row])


def test_every_number_of_e2m1_has_its_bits() -> None:
    """All numbers in every place of a word, by every power of two that is taken; sums of one product are exact."""
    numbers = torch.arange(256, dtype=torch.uint8).view(1, 8, 32).repeat(1, 1, 2)
    exponents = torch.arange(0, 4 * 8, dtype=torch.uint8).view(1, 8, 4) * 4
    exponents[0, 7, 3] = MOST_EXPONENT
    check_bits(PackedWeight(*in_memory(numbers, exponents, 32), E2M1, 32, False, 128))


@pytest.mark.parametrize("half", range(2))
def test_every_scale_of_e4m3_has_its_bits(half: int) -> None:
    """And the numbers below the normal ones."""
    numbers = torch.arange(256, dtype=torch.uint8).view(1, 8, 32).repeat(1, 1, 2)
    scales = torch.arange(64, dtype=torch.uint8).view(1, 8, 8) + 64 * half - half  # 127 is no number
    words, held = in_memory(numbers, scales, 16)
    weight = PackedWeight(words, held, E2M1, 16, False, 128, torch.full((1, 8), 256.0, device=DEVICE))
    of_group = torch.from_numpy(e4m3(scales.numpy())).float()[0].repeat_interleave(16, 1)
    values = torch.from_numpy(E2M1_VALUES)[torch.stack([numbers & 15, numbers >> 4], -1).flatten(2)[0].long()]
    assert torch.equal(weight.widened(0).cpu(), values * of_group)
    check_bits(weight)


def in_memory(numbers: torch.Tensor, scales: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    words, held = words_of(numbers, group), scales_of(scales, group)
    return words.transpose(1, 2).contiguous().to(DEVICE), held.transpose(1, 2).contiguous().to(DEVICE)


def check_bits(weight: PackedWeight) -> None:
    """The kernel's weights are the twin's, but for float32's numbers below the normal ones."""
    x = torch.eye(128, device=DEVICE, dtype=DTYPE)
    routing = route_reference(torch.zeros(1, 128, 1, device=DEVICE), TopK(1, 1), 16)
    got = expert_down(x, weight, routing, WIDE, torch.float32)[0].T
    torch.testing.assert_close(got, weight.widened(0).to(got.device), rtol=0, atol=2**-126)


def test_rounding_is_to_the_nearest_number_of_its_groups_power_of_two() -> None:
    line = torch.cat([torch.linspace(-7, 7, 31), torch.tensor([7.0])])
    wide = line * torch.tensor([[1.0], [0.125], [0]])
    wide = torch.cat([wide, torch.full((3, 32), 0.25)], 1)
    numbers, exponents = quantize(wide)
    assert exponents.tolist()[0] == [127, 123] and exponents.tolist()[1] == [124, 123]
    padded = torch.nn.functional.pad(exponents, (0, 2))
    made = PackedWeight(*in_memory(numbers[None], padded[None], 32), E2M1, 32, False, 64).widened(0).cpu()
    steps = torch.where(made.abs() < 2, 0.5, torch.where(made.abs() < 4, 1.0, 2.0)) / 2
    assert ((made - wide)[0].abs() <= steps[0]).all() and torch.equal(made[1, :32] * 8, made[0, :32])
    assert not made[2, :32].any() and (made[:, 32:] == 0.25).all()
    values = e2m1(32, 2, 3, 128)[2]
    found = PackedWeight(*in_memory(*quantize(values), 32), E2M1, 32, False, 128)
    for expert in range(2):  # what a group can hold it holds, whatever its power of two
        torch.testing.assert_close(found.widened(expert).cpu(), values[expert], rtol=0, atol=0)
