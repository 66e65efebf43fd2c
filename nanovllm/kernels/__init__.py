"""Triton kernels, each beside a plain PyTorch twin that states what it computes; those in `Kernels` and their twins
have one signature."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.moe.routing import Routing

_MODULES = {
    "pointwise.embedding": "embed_shard",
    "pointwise.norm": "rms_norm add_norms add_norms_fp8",
    "pointwise.activation": "silu_mul silu_mul_fp8 activation",
    "moe.routing": "route",
    "moe.experts": "expert_gate_up expert_down",
    "moe.combine": "combine",
    "pointwise.rope": "qk_norm_rope_store qk_mean_squares",
    "sampling.gumbel": "gumbel_argmax commit_tokens sample_tokens",
    "sampling.penalties": "edit_logits",
    "sampling.filters": "sample_filtered",
    "sampling.kept": "sample_kept",
    "sampling.logprobs": "token_logprobs",
    "step.input": "apply_deltas expand_rows prepare_decode",
    "step.blocks": "copy_blocks",
    "step.mailbox": "publish_tokens",
}


@dataclass(frozen=True)
class Kernels:
    """The device functions of the forward pass and around it; see the `..._reference` twins for what each computes."""

    embed_shard: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    add_norms: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    add_norms_fp8: Callable[..., tuple[FP8Rows, torch.Tensor]]
    silu_mul: Callable[..., torch.Tensor]
    silu_mul_fp8: Callable[..., FP8Rows]
    activation: Callable[..., torch.Tensor]
    route: Callable[..., Routing]
    expert_gate_up: Callable[..., torch.Tensor]
    expert_down: Callable[..., torch.Tensor]
    combine: Callable[..., torch.Tensor]
    qk_norm_rope_store: Callable[..., torch.Tensor]
    qk_mean_squares: Callable[..., torch.Tensor]
    gumbel_argmax: Callable[..., torch.Tensor]
    commit_tokens: Callable[..., torch.Tensor]
    sample_tokens: Callable[..., torch.Tensor]
    apply_deltas: Callable[..., None]
    expand_rows: Callable[..., None]
    prepare_decode: Callable[..., None]
    copy_blocks: Callable[..., None]
    publish_tokens: Callable[..., None]
    edit_logits: Callable[..., torch.Tensor]
    sample_filtered: Callable[..., torch.Tensor | None]
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
    functions = {
        name: getattr(import_module(f"{__name__}.{module}"), name + suffix)
        for module, names in _MODULES.items()
        for name in names.split()
    }
    return Kernels(**functions, fused=use_triton)
