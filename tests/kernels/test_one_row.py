"""One row's product with what is before it inside: what it computes, and on a GPU that it has the bits of the kernels
for many rows."""

import pytest
import torch
from gemm_checks import TOLERANCE, check_dependent_launch, relative_error

from nanovllm.kernels.gemm import decode
from nanovllm.kernels.gemm.choice import GemmConfig
from nanovllm.kernels.gemm.one_row import Gated, Row, Unnormed, config_for, linear, row_reference
from nanovllm.kernels.pointwise.activation import activation
from nanovllm.kernels.pointwise.norm import Norm, add_norms, add_up

SHAPES = [(1, 200, 1024), (1, 72, 904), (2, 64, 128), (3, 136, 3072)]
"""Parts of K, N, K."""


def weight_of(n: int, k: int, like: torch.Tensor) -> torch.Tensor:
    return (torch.randn(n, k) / k**0.5).to(like)


def rows(k: int, dtype: torch.dtype, device: torch.device) -> list[Row]:
    """One of each kind, and a row that an earlier kernel completed."""

    def draw(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape).to(device, of)

    norm = Norm(draw(k), 1e-6)
    partials = (draw(1, k), draw(2, 1, k, of=torch.float32), draw(3, 1, k, of=torch.float32))
    unnormed = [Unnormed(partial, 30 * draw(1, k), norm, draw(1, k)) for partial in partials]
    return [draw(1, k), Gated(draw(1, 2 * k)), *unnormed]


def by_other_kernels(x: Row) -> torch.Tensor:
    """The row that is multiplied, one of three that are alike, as kernels for many rows compute it."""
    if isinstance(x, Unnormed):
        partial, residual = (each.repeat_interleave(3, -2) for each in (x.partial, x.residual))
        return add_norms(partial, residual, x.norm)[0][1:2]
    return activation(x.gates_and_ups.repeat(3, 1), "silu", True)[1:2] if isinstance(x, Gated) else x


@pytest.mark.parametrize(("parts", "n", "k"), SHAPES)
def test_it_computes_what_its_twin_says(parts: int, n: int, k: int, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # whose tiles no multiprocessor holds
    config = config_for(k, parts)
    assert config is not None
    for x in rows(k, dtype, device) if parts == 1 else rows(k, dtype, device)[:2]:
        weight = weight_of(n, k, x if isinstance(x, torch.Tensor) else x[0].to(dtype))
        y = linear(x, weight, config)
        total = x.total.clone() if isinstance(x, Unnormed) else None
        row = row_reference(x)
        assert y.shape == ((parts, 1, n) if parts > 1 else (1, n))
        assert relative_error(add_up(y, dtype) if parts > 1 else y, row.double() @ weight.double().T) < TOLERANCE[dtype]
        assert total is None or torch.equal(total, x.total)


@pytest.mark.gpu
@pytest.mark.parametrize(("parts", "n", "k"), [*SHAPES, (1, 4096, 1024), (1, 6144, 896), (2, 1024, 2048)])
def test_it_has_the_bits_of_the_kernels_for_many_rows(parts: int, n: int, k: int) -> None:
    config = config_for(k, parts)
    assert config is not None
    for x in rows(k, torch.bfloat16, torch.device("cuda"))[: None if parts == 1 else 2]:
        row = by_other_kernels(x)
        weight = weight_of(n, k, row)
        tiles = GemmConfig("decode", 64, 32, min(k // parts, 128), 4, parts)
        assert torch.equal(linear(x, weight, config), decode.linear(row, weight, tiles))


@pytest.mark.gpu
def test_dependent_launches_wait() -> None:
    norm = Norm(torch.ones(1024, device="cuda", dtype=torch.bfloat16), 1e-6)
    up, down = weight_of(6144, 1024, norm.weight), weight_of(1024, 3072, norm.weight)

    def layer(hidden: torch.Tensor, residual: torch.Tensor, pdl: bool) -> None:
        x = Unnormed(hidden, residual, norm, torch.empty_like(residual))
        parts = linear(Gated(linear(x, up, config_for(1024, 1), pdl=pdl)), down, config_for(3072, 3), pdl=pdl)
        hidden.copy_(add_norms(parts, x.total, norm)[0])
        residual.copy_(x.total)

    check_dependent_launch(layer, torch.randn(1, 1024).to("cuda", torch.bfloat16))


def test_shapes_that_do_not_fit_are_refused() -> None:
    assert config_for(1032, 1) is None and config_for(3072, 2) is None  # too long
    assert config_for(1200, 2) is None  # a tile would reach into the next part
    with pytest.raises(ValueError, match="one row of 1 x 64 columns"):
        linear(torch.zeros(2, 64), torch.zeros(64, 64), config_for(64, 1))
