from itertools import product

import pytest
import torch

from nanovllm.kernels.pointwise.activation import ACTIVATIONS, activation, activation_reference


@pytest.mark.parametrize(
    ("kind", "gated", "biased", "rows", "width"),
    [
        *product(ACTIVATIONS, (True, False), (True, False), [5], [1400]),
        *(("silu", True, False, *shape) for shape in ((1, 128), (5, 192), (2, 6000), (70, 320), (0, 128))),
    ],
)
def test_every_kind_equals_its_twin(
    kind: str, gated: bool, biased: bool, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, bias = (torch.randn(n, width, dtype=dtype, device=device) * 4 for n in (rows, 1))
    args, before = (x, kind, gated, bias[0] if biased else None), x.clone()
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(activation(*args), activation_reference(*args), rtol=tolerance, atol=1e-5)
    assert torch.equal(x, before)


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
