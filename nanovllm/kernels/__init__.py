"""Triton kernels, each beside a plain PyTorch twin that states what it computes; those in `Kernels` and their twins
have one signature."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import torch

_HOME = {
    "embed_shard": "pointwise.embedding",
    "rms_norm": "pointwise.norm",
    "add_rms_norm": "pointwise.norm",
    "add_norms": "pointwise.norm",
    "silu_mul": "pointwise.activation",
    "activation": "pointwise.activation",
    "qk_norm_rope_store": "pointwise.rope",
    "qk_mean_squares": "pointwise.rope",
    "gumbel_argmax": "sampling.gumbel",
    "commit_tokens": "sampling.gumbel",
    "sample_tokens": "sampling.gumbel",
    "apply_deltas": "step.input",
    "expand_rows": "step.input",
    "prepare_decode": "step.input",
    "publish_tokens": "step.mailbox",
    "edit_logits": "sampling.penalties",
    "sample_filtered": "sampling.filters",
    "sample_kept": "sampling.survivors",
    "token_logprobs": "sampling.logprobs",
}


@dataclass(frozen=True)
class Kernels:
    """The device functions of the forward pass and around it; see the `..._reference` twins for what each computes."""

    embed_shard: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    add_norms: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    silu_mul: Callable[..., torch.Tensor]
    activation: Callable[..., torch.Tensor]
    qk_norm_rope_store: Callable[..., torch.Tensor]
    qk_mean_squares: Callable[..., torch.Tensor]
    gumbel_argmax: Callable[..., torch.Tensor]
    commit_tokens: Callable[..., torch.Tensor]
    sample_tokens: Callable[..., torch.Tensor]
    apply_deltas: Callable[..., None]
    expand_rows: Callable[..., None]
    prepare_decode: Callable[..., None]
    publish_tokens: Callable[..., None]
    edit_logits: Callable[..., torch.Tensor]
    sample_filtered: Callable[..., None]
    sample_kept: Callable[..., None]
    token_logprobs: Callable[..., torch.Tensor]
    fused: bool
    """True: Triton; False: the PyTorch twins."""


def select_kernels(device: torch.device | str, fused: bool = True, interpret: bool = False) -> Kernels:
    """Triton kernels on CUDA, the twins on a CPU or when `fused` is off.

    interpret: Triton on a CPU too, by its interpreter (slow; TRITON_INTERPRET=1 must be set before triton is imported).
    """
    use_triton = fused and (torch.device(device).type == "cuda" or interpret)
    suffix = "" if use_triton else "_reference"
    found: dict[str, Any] = {"fused": use_triton}
    for field in fields(Kernels):
        if field.name in _HOME:
            module = import_module(f"{__name__}.{_HOME[field.name]}")
            found[field.name] = getattr(module, field.name + suffix)
    return Kernels(**found)
