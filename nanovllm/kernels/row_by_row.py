"""The PyTorch twins called with one row at a time, so that a row's bits do not depend on how many there are.

PyTorch's own CPU kernels have other loops for the end of a tensor, and share out work by its size: silu of the last few
elements differs in the last bit from silu of the others.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from nanovllm.kernels import Kernels
from nanovllm.kernels.moe.experts import experts_of
from nanovllm.kernels.moe.routing import Routing, TopK, sort_reference
from nanovllm.kernels.pointwise.rope import QKNormRope


def row_by_row(kernels: Kernels) -> Kernels:
    """The same functions, each with as many calls as rows. Not those that only move values or compare them."""

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _joined(x, lambda row: kernels.rms_norm(row, weight, eps))

    def add_norms(x: torch.Tensor, residual: torch.Tensor | None, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [slice(row, row + 1) for row in range(x.shape[-2])]
        outs = [kernels.add_norms(x[..., row, :], None if residual is None else residual[row], *rest) for row in rows]
        if not outs:
            return kernels.add_norms(x, residual, *rest)
        normed, sums = (torch.cat(parts) for parts in zip(*outs, strict=True))
        return normed, sums if residual is None else residual

    def activation(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return _joined(x, lambda row: kernels.activation(row, *rest))

    def qk_norm_rope_store(
        qkv: torch.Tensor, how: QKNormRope, positions: torch.Tensor, slot_mapping: torch.Tensor, k_cache: torch.Tensor,
        v_cache: torch.Tensor, *, mean_squares: torch.Tensor | None = None, **rest: Any,
    ) -> torch.Tensor:  # fmt: skip
        for token in range(qkv.shape[0]):
            own = slice(token, token + 1)
            squares = None if mean_squares is None else mean_squares[own]
            args = (qkv[own], how, positions[own], slot_mapping[own], k_cache, v_cache)
            kernels.qk_norm_rope_store(*args, mean_squares=squares, **rest)
        return how.heads(qkv)[:, : how.num_heads]

    def qk_mean_squares(qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
        return _joined(qkv, lambda row: kernels.qk_mean_squares(row, *rest))

    def token_logprobs(
        logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, token_rows: torch.Tensor, k: int,
        vocab_size: int, scale: torch.Tensor | None = None, least: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        tables = []
        for n in range(rows.shape[0]):
            own = slice(n, n + 1)
            processed = (None if each is None else each[own] for each in (scale, least))
            args = (logits, rows[own], tokens, token_rows[own], k, vocab_size)
            tables.append(kernels.token_logprobs(*args, *processed))
        return torch.cat(tables)

    return replace(
        _experts_row_by_row(kernels), rms_norm=rms_norm, add_norms=add_norms, activation=activation,
        silu_mul=lambda x: activation(x, "silu", True), qk_norm_rope_store=qk_norm_rope_store,
        qk_mean_squares=qk_mean_squares, token_logprobs=token_logprobs,
    )  # fmt: skip


def _experts_row_by_row(kernels: Kernels) -> Kernels:
    """The functions of a mixture of experts."""

    def route(logits: torch.Tensor, options: TopK, block_m: int, *rest: Any) -> Routing:
        alone = [kernels.route(logits[:, row : row + 1], options, block_m, *rest) for row in range(logits.shape[1])]
        if not alone:
            return kernels.route(logits, options, block_m, *rest)
        chosen = torch.stack([one.tiles[one.order.argsort(), 0] for one in alone]).long()
        weights = torch.cat([one.weights for one in alone])
        return Routing(weights, *sort_reference(chosen, options, block_m), options.top_k)

    def expert_gate_up(
        x: torch.Tensor, weight: torch.Tensor, routing: Routing, config: Any, activation: Any,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        out = x.new_empty(routing.order.shape[0], weight.shape[1] // 2)
        for position, choice, own, one in _choices(routing):
            args = (x[choice // routing.top_k][None].clone(), weight[own], one, config, activation)
            out[position] = kernels.expert_gate_up(*args, None if bias is None else bias[own])[0]
        return out

    def expert_down(
        h: torch.Tensor, weight: torch.Tensor, routing: Routing, config: Any, out_dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        out = h.new_empty(routing.top_k, routing.num_tokens, weight.shape[1], dtype=out_dtype)
        for position, choice, own, one in _choices(routing):
            args = (h[position][None].clone(), weight[own], one, config, out_dtype)
            y = kernels.expert_down(*args, None if bias is None else bias[own])
            out[choice % routing.top_k, choice // routing.top_k] = y[0, 0]
        return out

    def combine(
        parts: torch.Tensor, dtype: torch.dtype, shared: torch.Tensor | None = None, logits: torch.Tensor | None = None,
        gate: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        rows = [slice(row, row + 1) for row in range(parts.shape[1])]
        outs = [kernels.combine(parts[:, row], dtype, None if shared is None else shared[row],
                                None if logits is None else logits[:, row], gate) for row in rows]  # fmt: skip
        return torch.cat(outs) if outs else kernels.combine(parts, dtype, shared, logits, gate)

    return replace(kernels, route=route, expert_gate_up=expert_gate_up, expert_down=expert_down, combine=combine)


def _joined(x: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return torch.cat([compute(x[row : row + 1]) for row in range(x.shape[0])]) if x.shape[0] else compute(x)


def _choices(routing: Routing) -> Iterator[tuple[int, int, slice, Routing]]:
    """Of each choice: its position, its number, its expert, and a Routing of it alone to the first of one expert."""
    weights, order, tile = routing.weights.flatten(), routing.order.new_zeros(1), torch.tensor([[0, 0, 1]])
    for expert, first, end in experts_of(routing):
        for position in range(first, end):
            choice = int(routing.order[position])
            one = Routing(weights[choice].view(1, 1), order, tile, 1)
            yield position, choice, slice(expert, expert + 1), one
