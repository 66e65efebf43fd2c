"""The PyTorch twins called with one row at a time, so that a row's bits do not depend on how many there are.

PyTorch's own CPU kernels have other loops for the end of a tensor, and share out work by its size: silu of the last few
elements differs in the last bit from silu of the others.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels import Kernels
from nanovllm.kernels.moe.experts import experts_of
from nanovllm.kernels.moe.routing import Routing, TopK, sort_reference
from nanovllm.kernels.pointwise.rope import QKNormRope


def row_by_row(kernels: Kernels) -> Kernels:
    """Kernels with as many calls as rows, for all functions but those that only move values or compare them."""

    def add_norms(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        rows = [slice(row, row + 1) for row in range(x.shape[-2])] or [slice(0)]
        outs = [kernels.add_norms(x[..., own, :], _some(residual, own), *rest) for own in rows]
        normed, sums = (torch.cat(parts) for parts in zip(*outs, strict=True))
        return normed, sums if residual is None else residual

    def activation(x: Tensor, *rest: Any) -> Tensor:
        return _joined(len(x), lambda own: kernels.activation(x[own], *rest))

    def qk_norm_rope_store(
        qkv: Tensor, how: QKNormRope, positions: Tensor, slot_mapping: Tensor, *caches: Tensor,
        mean_squares: Tensor | None = None, **rest: Any,
    ) -> Tensor:  # fmt: skip
        for token in range(len(qkv)):
            own = slice(token, token + 1)
            args = (qkv[own], how, positions[own], slot_mapping[own], *caches)
            kernels.qk_norm_rope_store(*args, mean_squares=_some(mean_squares, own), **rest)
        return how.heads(qkv)[:, : how.num_heads]

    def qk_mean_squares(qkv: Tensor, *rest: Any) -> Tensor:
        return _joined(len(qkv), lambda own: kernels.qk_mean_squares(qkv[own], *rest))

    def token_logprobs(
        logits: Tensor, rows: Tensor, tokens: Tensor, token_rows: Tensor, k: int, vocab_size: int,
        scale: Tensor | None = None, least: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        def of_row(own: slice) -> Tensor:
            args = (logits, rows[own], tokens, token_rows[own], k, vocab_size)
            return kernels.token_logprobs(*args, _some(scale, own), _some(least, own))

        return _joined(len(rows), of_row)

    return replace(
        _experts_row_by_row(kernels), add_norms=add_norms, activation=activation,
        qk_norm_rope_store=qk_norm_rope_store, qk_mean_squares=qk_mean_squares, token_logprobs=token_logprobs,
    )  # fmt: skip


def _experts_row_by_row(kernels: Kernels) -> Kernels:
    """The functions of a mixture of experts."""

    def route(logits: Tensor, options: TopK, block_m: int, *rest: Any) -> Routing:
        alone = [kernels.route(logits[:, row : row + 1], options, block_m, *rest) for row in range(logits.shape[1])]
        if not alone:
            return kernels.route(logits, options, block_m, *rest)
        chosen = torch.stack([one.tiles[one.order.argsort(), 0] for one in alone]).long()
        weights = torch.cat([one.weights for one in alone])
        return Routing(weights, *sort_reference(chosen, options, block_m), options.top_k)

    def expert_gate_up(
        x: Tensor, weight: Tensor, routing: Routing, config: Any, activation: Any, bias: Tensor | None = None
    ) -> Tensor:
        out = x.new_empty(routing.order.shape[0], weight.shape[1] // 2)
        for position, choice, own, one in _choices(routing):
            args = (x[choice // routing.top_k][None].clone(), weight[own], one, config, activation)
            out[position] = kernels.expert_gate_up(*args, _some(bias, own))[0]
        return out

    def expert_down(
        h: Tensor, weight: Tensor, routing: Routing, config: Any, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        out = h.new_empty(routing.top_k, routing.num_tokens, weight.shape[1], dtype=out_dtype)
        for position, choice, own, one in _choices(routing):
            args = (h[position][None].clone(), weight[own], one, config, out_dtype)
            out[choice % routing.top_k, choice // routing.top_k] = kernels.expert_down(*args, _some(bias, own))[0, 0]
        return out

    def combine(
        parts: Tensor, dtype: torch.dtype, shared: Tensor | None = None, logits: Tensor | None = None, gate: int = 0
    ) -> Tensor:
        def of_row(own: slice) -> Tensor:
            of_gate = None if logits is None else logits[:, own]
            return kernels.combine(parts[:, own], dtype, _some(shared, own), of_gate, gate)

        return _joined(parts.shape[1], of_row)

    return replace(kernels, route=route, expert_gate_up=expert_gate_up, expert_down=expert_down, combine=combine)


def _joined(rows: int, compute: Callable[[slice], Tensor]) -> Tensor:
    """Concatenates the results of `compute` for each row, or for none."""
    return torch.cat([compute(slice(row, row + 1)) for row in range(rows)]) if rows else compute(slice(0))


def _some(x: Tensor | None, own: slice) -> Tensor | None:
    return None if x is None else x[own]


def _choices(routing: Routing) -> Iterator[tuple[int, int, slice, Routing]]:
    """Iterates over the choices of a Routing: position, number, expert, and a Routing of that choice alone to the first
    of one expert."""
    weights, order, tile = routing.weights.flatten(), routing.order.new_zeros(1), torch.tensor([[0, 0, 1]])
    for expert, first, end in experts_of(routing):
        for position in range(first, end):
            choice = int(routing.order[position])
            one = Routing(weights[choice].view(1, 1), order, tile, 1)
            yield position, choice, slice(expert, expert + 1), one
