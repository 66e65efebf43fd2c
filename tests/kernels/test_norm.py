from itertools import product

import pytest
import torch

from nanovllm.kernels.pointwise.norm import Norm, add_norms, add_norms_reference, norm_reference

EPS = 1e-6


def assert_within_one_rounding(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to float32 accuracy, or to one step of bfloat16 where a statistic's last bit decided a rounding."""
    tolerance = 2e-6 if actual.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance / 4)
    if actual.dtype != torch.float32 and actual.numel():
        assert (actual != expected).float().mean() < 0.01


def random_norm(kind: str, hidden: int, dtype: torch.dtype, device: torch.device) -> Norm:
    weight, bias = (torch.randn(hidden, dtype=dtype, device=device) for _ in range(2))
    return Norm(weight.float() + 1 if kind == "rms_float32" else weight, EPS, kind, bias if kind == "layer" else None)


@pytest.mark.parametrize(
    ("kind", "place", "parts", "shape"),
    [
        *product(("rms", "rms_float32", "layer"), ("first", "pre", "post", "sandwich"), (1, 3, 8), [(5, 100)]),
        *product(["rms"], ["pre"], [1], [(1, 64), (5, 96), (3, 1000), (2, 5120), (7, 1024), (0, 64)]),
    ],
)
def test_add_norms_equals_its_twin(
    kind: str, place: str, parts: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(shape, dtype=dtype, device=device)
    if parts > 1 and place != "first":
        x = torch.randn(parts, *shape, device=device, dtype=dtype if parts == 8 else torch.float32)
    residual = None if place == "first" else torch.randn(shape, dtype=dtype, device=device)
    norm = None if place == "post" else random_norm(kind, shape[1], dtype, device)
    after = random_norm(kind, shape[1], dtype, device) if place in ("post", "sandwich") else None
    multiplier = 0.22 if place == "sandwich" else 1.0
    scalar = torch.full((1,), 0.7, dtype=dtype, device=device) if place in ("post", "sandwich") else None
    x_before, twin = x.clone(), None if residual is None else residual.clone()
    expected, expected_sum = add_norms_reference(x, twin, norm, after, multiplier, scalar=scalar)
    normed, new_residual = add_norms(x, residual, norm, after, multiplier, scalar=scalar)
    assert torch.equal(x, x_before)
    assert new_residual is (x if residual is None else residual)
    assert_within_one_rounding(new_residual, expected_sum)
    assert_within_one_rounding(normed, expected)
    assert place != "pre" or parts > 1 or torch.equal(new_residual, expected_sum)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return add_norms(x, None, Norm(weight, EPS))[0]


def test_rows_may_be_strided(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(6, 128, dtype=dtype, device=device)
    weight = torch.randn(128, dtype=dtype, device=device)
    assert torch.equal(normed(x[::2], weight), normed(x[::2].contiguous(), weight))


def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(33, 256, dtype=dtype, device=device)
    weight = torch.randn(256, dtype=dtype, device=device)
    together = normed(x, weight)
    x[1:] = float("nan")
    assert torch.equal(normed(x, weight)[0], together[0])
    assert torch.equal(normed(x[:1], weight)[0], together[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twins_round_as_hugging_face(dtype: torch.dtype) -> None:
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    olmo2 = pytest.importorskip("transformers.models.olmo2.modeling_olmo2")
    gemma2 = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    cohere2 = pytest.importorskip("transformers.models.cohere2.modeling_cohere2")
    x, weight = torch.randn(4, 96, dtype=dtype), torch.randn(96, dtype=dtype)
    theirs = (
        (qwen3.Qwen3RMSNorm, "rms", 0), (olmo2.Olmo2RMSNorm, "rms_float32", 0),
        (gemma2.Gemma2RMSNorm, "rms_float32", 1), (cohere2.Cohere2LayerNorm, "layer", 0),
    )  # fmt: skip
    with torch.no_grad():
        for made, kind, offset in theirs:
            norm = made(96, eps=EPS)
            norm.weight.data = weight
            ours = Norm(weight.float() + offset if offset else weight, EPS, kind)
            assert torch.equal(norm_reference(x, ours), norm(x)), norm
        bias = torch.randn(96, dtype=dtype)
        expected = torch.nn.functional.layer_norm(x, (96,), weight, bias, EPS)
        ours = norm_reference(x, Norm(weight, EPS, "layer", bias))
        torch.testing.assert_close(ours, expected, rtol=2e-6 if dtype == torch.float32 else 2**-7, atol=2e-6)
