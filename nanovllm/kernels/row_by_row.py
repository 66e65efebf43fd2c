"""The PyTorch twins called with one row at a time, so that a row's bits do not depend on how many there are.

PyTorch's own CPU kernels have other loops for the end of a tensor, and share out work by its size: silu of the last few
elements differs in the last bit from silu of the others.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch

from nanovllm.kernels import Kernels


def row_by_row(kernels: Kernels) -> Kernels:
    """Kernels with as many calls as rows, for all functions but those that only move values or compare them. A
    routing is a list with each token's."""
    tokens = {"qkv": 0, "positions": 0, "slot_mapping": 0, "mean_squares": 0}
    return replace(
        kernels,
        add_norms=_each_row(kernels.add_norms, x=-2, residual=0),
        activation=_each_row(kernels.activation, x=0),
        qk_norm_rope_store=_each_row(kernels.qk_norm_rope_store, **tokens),
        qk_mean_squares=_each_row(kernels.qk_mean_squares, qkv=0),
        token_logprobs=_each_row(kernels.token_logprobs, scored=0),
        route=_each_row(kernels.route, joined=None, logits=1),
        expert_gate_up=_each_row(kernels.expert_gate_up, x=0, routing=0, delta=0),
        expert_down=_each_row(kernels.expert_down, joined=1, h=0, routing=0, delta=0),
        adapter_delta=partial(_adapter_delta, _each_row(kernels.adapter_delta, x=0, slots=0)),
        combine=_each_row(kernels.combine, parts=1, shared=0, logits=1),
    )


def _adapter_delta(
    each_row: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    return each_row(x if tokens is None else x[tokens], *args)


def _each_row(function: Callable[..., Any], joined: int | None = 0, **rows: int) -> Callable[..., Any]:
    """`function` called with each row alone. rows: its operands that have rows, and in which dimension; a list has an
    element for each, and a tensor beside it as many rows for each. joined: the dimension of the results' rows; None:
    they stay a list."""
    parameters = signature(function)

    def call(*args: Any, **options: Any) -> Any:
        given = parameters.bind(*args, **options).arguments
        own = {name: given[name] for name in rows if given.get(name) is not None}
        count = next((len(x) for x in own.values() if isinstance(x, list)), None)
        own = {name: x if isinstance(x, list) else x.split(1 if count is None else x.shape[0] // count, rows[name])
               for name, x in own.items()}  # fmt: skip
        results = [function(**given | dict(zip(own, each, strict=True))) for each in zip(*own.values(), strict=True)]
        if joined is None:
            return results
        if isinstance(results[0], tuple):
            return tuple(torch.cat(parts, joined) for parts in zip(*results, strict=True))
        return torch.cat(results, joined)

    return call
