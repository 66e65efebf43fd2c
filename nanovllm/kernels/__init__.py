"""Triton kernels, each beside a plain PyTorch twin that states what it computes; those in `Kernels` and their twins
have one signature."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated

import torch

from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.moe.routing import Routing


@dataclass(frozen=True)
class Kernels:
    """The device functions of the forward pass and around it, each with its module. Their `..._reference` twins say
    what they compute."""

    embed_shard: Annotated[Callable[..., torch.Tensor], "pointwise.embedding"]
    add_norms: Annotated[Callable[..., tuple[torch.Tensor | FP8Rows, torch.Tensor]], "pointwise.norm"]
    activation: Annotated[Callable[..., torch.Tensor | FP8Rows], "pointwise.activation"]
    gate_heads: Annotated[Callable[..., torch.Tensor], "pointwise.gate"]
    route: Annotated[Callable[..., Routing], "moe.routing"]
    expert_gate_up: Annotated[Callable[..., torch.Tensor | FP8Rows], "moe.experts"]
    expert_down: Annotated[Callable[..., torch.Tensor], "moe.experts"]
    choices: Annotated[Callable[..., tuple[torch.Tensor, torch.Tensor]], "moe.routing"]
    combine: Annotated[Callable[..., torch.Tensor], "moe.combine"]
    adapter_delta: Annotated[Callable[..., torch.Tensor], "gemm.adapters"]
    qk_norm_rope_store: Annotated[Callable[..., torch.Tensor], "pointwise.rope"]
    qk_mean_squares: Annotated[Callable[..., torch.Tensor], "pointwise.mean_squares"]
    latent_rope_store: Annotated[Callable[..., None], "latent.store"]
    causal_conv: Annotated[Callable[..., torch.Tensor], "recurrent.conv"]
    gated_delta_rule: Annotated[Callable[..., torch.Tensor], "recurrent.delta"]
    mamba: Annotated[Callable[..., torch.Tensor], "recurrent.mamba"]
    gated_norm: Annotated[Callable[..., torch.Tensor], "recurrent.gated_norm"]
    gated_mean_squares: Annotated[Callable[..., torch.Tensor], "recurrent.gated_norm"]
    gumbel_argmax: Annotated[Callable[..., torch.Tensor], "sampling.gumbel"]
    commit_tokens: Annotated[Callable[..., torch.Tensor], "sampling.gumbel"]
    sample_tokens: Annotated[Callable[..., torch.Tensor], "sampling.gumbel"]
    apply_deltas: Annotated[Callable[..., None], "step.input"]
    expand_rows: Annotated[Callable[..., None], "step.input"]
    prepare_decode: Annotated[Callable[..., None], "step.input"]
    take_draws: Annotated[Callable[..., None], "step.drafts"]
    look_up_drafts: Annotated[Callable[..., None], "step.drafts"]
    follow_rows: Annotated[Callable[..., None], "step.model_drafts"]
    place_drafts: Annotated[Callable[..., None], "step.model_drafts"]
    copy_blocks: Annotated[Callable[..., None], "step.blocks"]
    edit_logits: Annotated[Callable[..., torch.Tensor], "sampling.penalties"]
    count_tokens: Annotated[Callable[..., None], "sampling.penalties"]
    sample_filtered: Annotated[Callable[..., torch.Tensor | None], "sampling.filters"]
    sample_kept: Annotated[Callable[..., None], "sampling.kept"]
    token_logprobs: Annotated[Callable[..., torch.Tensor], "sampling.logprobs"]
    fused: bool
    """True: Triton; False: the PyTorch twins."""


def select_kernels(device: torch.device | str, fused: bool = True, interpret: bool = False) -> Kernels:
    """Triton kernels on CUDA, the twins on a CPU or when `fused` is off.

    interpret: Triton on a CPU too, by its interpreter (slow; TRITON_INTERPRET=1 must be set before triton is imported).
    """
    use_triton = fused and (torch.device(device).type == "cuda" or interpret)
    suffix = "" if use_triton else "_reference"
    functions = {
        name: getattr(import_module(f"{__name__}.{hint.__metadata__[0]}"), name + suffix)
        for name, hint in Kernels.__annotations__.items()
        if name != "fused"
    }
    return Kernels(**functions, fused=use_triton)
