"""The PyTorch twins called with one row at a time, so that a row's bits do not depend on how many there are.

PyTorch's own CPU kernels have other loops for the end of a tensor, and share out work by its size: silu of the last few
elements differs in the last bit from silu of the others.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nanovllm.kernels import Kernels
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
        kernels, rms_norm=rms_norm, add_norms=add_norms, activation=activation,
        silu_mul=lambda x: activation(x, "silu", True), qk_norm_rope_store=qk_norm_rope_store,
        qk_mean_squares=qk_mean_squares, token_logprobs=token_logprobs,
    )  # fmt: skip


def _joined(x: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return torch.cat([compute(x[row : row + 1]) for row in range(x.shape[0])]) if x.shape[0] else compute(x)
