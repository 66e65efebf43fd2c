"""Sums that adapters add to a product of the library: the kernels against their twin, alone and compiled."""

from typing import Any

import pytest
import torch
from compiling import compile_only, empty, launch_dependently, run_alone

pytest.importorskip("triton")

from nanovllm.kernels.gemm import adapters
from nanovllm.kernels.gemm.adapters import adapter_delta, adapter_delta_reference
from tests.kernels.conftest import poison

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXED = [2, -1, 0, 0, 2, -1, 1, 2]


def operands(
    rows: int, k: int, n: int, parts: int, rank: int = 16, slots: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows * k + n)
    x, a, b = torch.randn(rows, k), torch.randn(slots, parts * rank, k) / k**0.5, torch.randn(slots, n, rank)
    return tuple(one.to(DEVICE, dtype) for one in (x, a, b))


@pytest.mark.parametrize(
    ("k", "n", "starts"),
    [(72, 40, (0,)), (640, 200, (0, 100)), (96, 136, (0, 72, 104, 120)), (48, 88, (0, 20, 40, 60, 80, 84))],
)
def test_the_kernels_compute_what_their_twin_does(k: int, n: int, starts: tuple[int, ...]) -> None:
    slots = torch.tensor([*MIXED, *[1] * 15], dtype=torch.int32, device=DEVICE)
    x, a, b = operands(len(slots), k, n, len(starts))
    _ = [poison(size, dtype=torch.float32, device=x.device) for size in (23 * 16, 46 * 16, 69 * 16, 138 * 16)]
    del _  # what is not written is NaN
    found, expected = (made(x, slots, a, b, starts) for made in (adapter_delta, adapter_delta_reference))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[slots < 0].view(torch.int32), expected[slots < 0].view(torch.int32))
    y = torch.randn(n, device=DEVICE) * (torch.arange(n, device=DEVICE) % 3 - 1) * -1.0  # zeros of both signs
    assert torch.equal((y + found[1]).view(torch.int32), y.view(torch.int32))


def test_rows_may_be_those_of_some_tokens() -> None:
    x, a, b = operands(9, 640, 72, 2)
    tokens = torch.tensor([3, 3, 0, 8, 7, 7, 7, 1] * 4, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor(MIXED * 4, dtype=torch.int32, device=DEVICE)
    found = adapter_delta(x, slots, a, b, (0, 40), tokens=tokens)
    assert torch.equal(found.view(torch.int32), adapter_delta(x[tokens], slots, a, b, (0, 40)).view(torch.int32))
    expected = adapter_delta_reference(x, slots, a, b, (0, 40), tokens=tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_rows_bits_are_its_own() -> None:
    """Neither neighbours nor the slot change them."""
    x, a, b = operands(20, 600, 72, 2)
    slots = torch.tensor([1, 0] * 10, dtype=torch.int32, device=DEVICE)
    found = adapter_delta(x, slots, a, b, (0, 40))
    alone = adapter_delta(x[5:6], slots[:1] * 0, a, b, (0, 40))
    moved = adapter_delta(x[5:6], slots[:1] * 0 + 2, a.flip(0), b.flip(0), (0, 40))
    for other in (alone[0], moved[0]):
        assert torch.equal(found[5].view(torch.int32), other.view(torch.int32))


def test_nor_do_the_sums_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one program adds up."""
    x, a, b = operands(70, 1100, 136, 2)
    slots = torch.tensor([2] * 30 + [-1, 0] * 20, dtype=torch.int32, device=DEVICE)
    few = adapter_delta(x, slots, a, b, (0, 40))
    monkeypatch.setattr(adapters, "_PROGRAMS", 2)
    many = adapter_delta(x, slots, a, b, (0, 40))
    assert torch.equal(few.view(torch.int32), many.view(torch.int32))
    rounded = adapter_delta(x, slots, a, b, (0, 40), dtype=torch.float16)
    assert torch.equal(rounded.view(torch.int16), many.half().view(torch.int16))


def compile_all(rank: int, capability: int) -> None:
    def check(ptx: str, options: dict[str, Any]) -> None:
        assert "mma" in ptx

    if capability >= 90:
        launch_dependently(adapters)
    compile_only(check, most_spilled=64 if capability == 90 else None, capability=capability)
    for rows in (1, 16384):
        for starts in ((0,), (0, 4096, 5120)):
            slots = empty(rows, dtype=torch.int32)
            a, b = empty(8, len(starts) * rank, 4096), empty(8, 6144, rank)
            adapters.adapter_delta(empty(rows, 4096), slots, a, b, starts)


@pytest.mark.parametrize(("rank", "capability"), [
    (16, 90), (64, 90), (256, 90), (256, 89), (256, 120),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((16, 89), (16, 120), (64, 89), (64, 120))),
])  # fmt: skip
def test_compiled(rank: int, capability: int) -> None:
    """It fits into shared memory, tensor cores multiply, and on 9.0 next to nothing spills."""
    run_alone(compile_all, rank, capability)
