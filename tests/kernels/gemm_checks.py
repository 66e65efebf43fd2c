"""Helpers of the tests of GEMMs."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import pytest
import torch

from nanovllm.kernels.base.device import ordinary_launch
from nanovllm.kernels.base.graph_timing import captured

EPS = 1e-6
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Maximum of a relative_error to float64."""


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def check_rows_apart(
    multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, counts: Iterable[int] = (1,)
) -> None:
    """The first rows have the same bits by themselves, so many of them, and the first one beside others. multiply: x
    [rows, k] -> [rows, n]."""
    whole, others = multiply(x), x.clone()
    for rows in counts:
        assert torch.equal(multiply(x[:rows].clone()), whole[:rows])
    others[1:] = 1e4
    assert torch.equal(multiply(others)[0], whole[0])


def exact(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> torch.Tensor:
    """x @ weight^T in float64; gated: then silu(gate) * up, each rounded to x's dtype before it is multiplied."""
    y = x.double() @ weight.double().T
    if not gated:
        return y
    gate, up = y.to(x.dtype).double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).to(x.dtype).double() * up


def check_pdl(layer: Callable[[torch.Tensor, torch.Tensor], object], start: torch.Tensor) -> None:
    """A graph of 30 layers, each reading what the one before wrote: a missing wait would show as a difference.
    layer(hidden, residual) changes both in place; both begin as `start`. Not of the first replay: see cuda_graphs.py.
    """

    def chain(pdl: bool) -> torch.Tensor:
        hidden, residual = start.clone(), start.clone()

        def layers() -> None:
            for _ in range(30):
                layer(hidden, residual)

        with nullcontext() if pdl else ordinary_launch():
            graph = captured([layers])
        for _ in range(2):
            hidden.copy_(start)
            residual.copy_(start)
            graph.replay()
        return hidden.clone()

    plain = chain(pdl=False)
    assert plain.isfinite().all()
    for _ in range(3):
        assert torch.equal(chain(pdl=True), plain)
