"""Inputs of the layers in a step, and what a block hands to its operations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.attention.split import attention_halves
from nanovllm.kernels.moe.linear import Routed
from nanovllm.kernels.plan.plan import Launch
from nanovllm.kernels.pointwise.norm import Norm
from nanovllm.kernels.recurrent.rows import Lines, StepRows


@dataclass
class ForwardStep:
    """Inputs of the layers in a step, besides the hidden states [T, hidden]."""

    positions: torch.Tensor
    """int32 [T]"""
    slot_mappings: tuple[torch.Tensor, ...]
    """int32 [T] each, by KVCache.table: where a token's key and value go in the flat cache; -1: nowhere."""
    attention: AttentionMetadata
    backend: AttentionBackend
    """Attends for all layers; it was prepared for `attention`."""
    lines: Lines | None = None
    """Lines of rows with memory of fixed size; None: layers have none."""
    has_places: bool = field(default=False, kw_only=True)
    """Whether decodes may have several rows, one for each of their places."""
    adapters: torch.Tensor | None = None
    """int32 [T]: slot of each token's adapter, -1: none; None: no row of the step has one."""
    layer_inputs: torch.Tensor | None = None
    """[T, layers, width of this rank]: of models that have such (layers/layer_inputs.py)."""
    wanted: torch.Tensor | None = None
    """int [N]: in the last layer, the tokens whose results are read; None: all."""
    taps: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """[T, hidden] by layer: where the residual stream that the layer takes in is written, for a model that drafts; by
    the number of layers the final hidden states."""

    @property
    def rows(self) -> StepRows:
        """The step's rows as layers with memory of fixed size know them."""
        assert self.lines is not None
        attention = self.attention
        sizes = attention.num_decode_rows, attention.num_tokens
        return StepRows(attention.cu_seqlens_q, *sizes, self.lines, self.has_places)

    def halves(self, cut: int) -> "tuple[ForwardStep, ForwardStep]":
        """The first `cut` tokens, and the others; see attention_halves."""
        halves = attention_halves(self.attention, cut)
        lines: tuple[Lines | None, Lines | None] = (None, None)
        if self.lines is not None:
            lines = self.lines.halves(*(half.cu_seqlens_q.diff() for half in halves))
        first, second = (
            ForwardStep(
                self.positions[part], tuple(places[part] for places in self.slot_mappings), half, self.backend, of_half,
                None if self.adapters is None else self.adapters[part], has_places=self.has_places,
            )
            for part, half, of_half in zip((slice(cut), slice(cut, None)), halves, lines, strict=True)
        )
        return first, second


def wanted_rows(hidden: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
    """The rows of hidden [T, hidden] that are wanted, int32 [N] -> [N, hidden]; None: all, without a copy."""
    return hidden if wanted is None else hidden.index_select(0, wanted)


class Call(NamedTuple):
    """Companions of the rows x on their way from a block of a layer to the kernels of its operations."""

    step: ForwardStep | None
    """The step; None for products outside the layers, as of the head."""
    rows: torch.Tensor | None = None
    """int [N]: tokens of the step that are the rows of x; None: all."""
    norm: Norm | None = None
    """Norm of x that operations compute whose launch has one."""
    residual: torch.Tensor | None = None
    """The residual stream [rows, hidden], complete, where the layer's plan keeps it so: the operation before it adds to
    it in place."""
    routing: Routed | None = None
    """Experts of each row; for operations on experts."""
    delta: Any = None
    """Sums that adapters add to the product (kernels/gemm/dense.py); AdaptedMatrix alone sets it."""
    bias: torch.Tensor | None = None
    """Bias of the operation, [rows of its weight]; for launches that add it."""

    @property
    def has_adapters(self) -> bool:
        """Whether a row of the step has an adapter."""
        return self.step is not None and self.step.adapters is not None

    @property
    def adapters(self) -> torch.Tensor | None:
        """int32 [rows]: slot of the adapter of each row of x; see ForwardStep."""
        return None if self.step is None or self.step.adapters is None else wanted_rows(self.step.adapters, self.rows)

    def around(self, launch: Launch) -> dict[str, Any]:
        """Operands of what the kernel of this launch computes besides its product."""
        found: dict[str, Any] = {"gated": launch.gate}
        if launch.norm:
            found["norm"] = self.norm
        if launch.residual:
            found["residual"] = self.residual
        if launch.bias:
            found["bias"] = self.bias
        if self.delta is not None:
            found["delta"] = self.delta
        return found


OUTSIDE = Call(None)
"""Call of a product outside the layers."""
