"""Helpers of the tests of GEMMs."""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from nanovllm.kernels.base.device import ordinary_launch
from nanovllm.kernels.base.graph_timing import captured

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Maximum of a relative_error to float64."""


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def exact(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> torch.Tensor:
    """x @ weight^T in float64; gated: then silu(gate) * up, each rounded to x's dtype before it is multiplied."""
    y = x.double() @ weight.double().T
    if not gated:
        return y
    gate, up = y.to(x.dtype).double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).to(x.dtype).double() * up


def check_dependent_launch(layer: Callable[[torch.Tensor, torch.Tensor], object], start: torch.Tensor) -> None:
    """A graph of 30 layers, each reading what the one before wrote: a missing wait would show as a difference.
    layer(hidden, residual) changes both in place; both begin as `start`."""

    def chain(pdl: bool) -> torch.Tensor:
        hidden, residual = start.clone(), start.clone()

        def layers() -> None:
            for _ in range(30):
                layer(hidden, residual)

        with nullcontext() if pdl else ordinary_launch():
            graph = captured([layers])
        hidden.copy_(start)
        residual.copy_(start)
        graph.replay()
        return hidden.clone()

    plain = chain(pdl=False)
    assert plain.isfinite().all()
    for _ in range(3):
        assert torch.equal(chain(pdl=True), plain)
