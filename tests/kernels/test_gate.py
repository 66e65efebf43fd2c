import pytest
import torch

from nanovllm.kernels.pointwise.gate import GATES, gate_heads, gate_heads_reference


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(("rows", "gates", "each"), [(1, 6, 128), (5, 3, 24), (70, 8, 16), (3, 2056, 1), (0, 4, 16)])
def test_every_kind_equals_its_twin(
    kind: str, rows: int, gates: int, each: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Gates of padding are beside those of the heads."""
    x = torch.randn(rows, gates * each, dtype=dtype, device=device)
    gate = torch.randn(rows, -(-gates // 8) * 8, dtype=dtype, device=device) * 4
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    wanted = gate_heads_reference(x.clone(), gate, kind, each)
    torch.testing.assert_close(gate_heads(x, gate, kind, each), wanted, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("kind", GATES)
def test_the_twin_is_torchs_activation(kind: str) -> None:
    gate = torch.linspace(-30, 30, 999, dtype=torch.float64)[:, None]
    activated = gate.sigmoid() if kind == "sigmoid" else torch.nn.functional.softplus(gate)
    found = gate_heads_reference(torch.ones(999, 1), gate.float(), kind, 1)
    torch.testing.assert_close(found, activated.float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("gates", [1, 5, 8, 24])
def test_no_bit_depends_on_the_other_rows(kind: str, gates: int, device: torch.device) -> None:
    """Of a row alone, and at every place of a tensor, which vector instructions cut at their own width."""
    x, gate = torch.randn(37, gates * 4, device=device), torch.randn(37, gates, device=device)
    for compute in (gate_heads, gate_heads_reference):
        together = compute(x.clone(), gate, kind, 4)
        alone = [compute(x[row : row + 1].clone(), gate[row : row + 1], kind, 4) for row in range(37)]
        assert torch.equal(together, torch.cat(alone))
