import pytest
import torch

from nanovllm.kernels.pointwise.activation import KINDS, activation, activation_reference, silu_mul_reference


@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (5, 96), (2, 3000), (70, 160), (0, 64)])
def test_silu_mul_equals_its_twin(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(num_rows, 2 * size, dtype=dtype, device=device) * 4
    before = gate_up.clone()
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    got = activation(gate_up, "silu", True)
    torch.testing.assert_close(got, silu_mul_reference(gate_up), rtol=tolerance, atol=1e-6)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_every_kind_equals_its_twin(
    kind: str, gated: bool, biased: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, bias = (torch.randn(n, 1400, dtype=dtype, device=device) * 4 for n in (5, 1))
    args = (x, kind, gated, bias[0] if biased else None)
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(activation(*args), activation_reference(*args), rtol=tolerance, atol=1e-5)


def test_far_ends(dtype: torch.dtype, device: torch.device) -> None:
    gate = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4], dtype=dtype, device=device)
    out = activation(torch.cat((gate, torch.ones_like(gate)))[None], "silu", True)[0]
    assert torch.equal(out, gate.clamp(min=0))


def test_rows_are_separate(dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(3, 96, dtype=dtype, device=device)
    gate_up[1] = float("nan")
    out = activation(gate_up, "silu", True)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
