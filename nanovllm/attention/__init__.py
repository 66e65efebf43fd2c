"""Attention backends and the choice among them."""

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import torch

from nanovllm.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec

__all__ = ["BACKENDS", "AttentionBackend", "AttentionMetadata", "AttentionSpec", "Selection", "select_backend"]

# Imported on demand: Triton and FlashAttention need not be installed where they are not used.
BACKENDS: dict[str, tuple[str, str]] = {
    "flash": ("nanovllm.attention.flash_backend", "FlashBackend"),
    "triton": ("nanovllm.attention.triton_backend", "TritonBackend"),
    "torch": ("nanovllm.attention.torch_backend", "TorchBackend"),
    "flex": ("nanovllm.attention.flex_backend", "FlexBackend"),
}


class Selection(NamedTuple):
    backend: type[AttentionBackend]
    reason: str
    is_fallback: bool = False
    """Something faster could not be used; `reason` says why."""


def select_backend(name: str, specs: Sequence[AttentionSpec], *, device: torch.device | str, dtype: torch.dtype,
                   block_size: int) -> Selection:
    """The backend called `name`, or for "auto" the fastest one that is installed and that can serve all `specs`.

    A backend asked for by name is used or refused with ValueError, never replaced.
    """
    if name != "auto":
        backend = _load(name)
        backend.check(specs, block_size, dtype, device)
        return Selection(backend, "asked for")
    refusals = []
    candidates = ("flash", "triton", "torch") if torch.device(device).type == "cuda" else ("torch",)
    for candidate in candidates:
        try:
            backend = _load(candidate)
            backend.check(specs, block_size, dtype, device)
        except ValueError as error:
            refusals.append(str(error))
            continue
        reason = "; ".join(refusals) or f"the fastest on {torch.device(device).type}"
        return Selection(backend, reason, is_fallback=bool(refusals))
    raise ValueError("attention_backend='auto': none can serve this model: " + "; ".join(refusals))


def _load(name: str) -> type[AttentionBackend]:
    if name not in BACKENDS:
        raise ValueError(f"attention_backend={name!r}: must be one of 'auto', " + ", ".join(map(repr, BACKENDS)))
    module, cls = BACKENDS[name]
    try:
        return getattr(import_module(module), cls)
    except (ImportError, RuntimeError, OSError) as error:  # half an installation fails in its own ways
        raise ValueError(f"attention_backend={name!r}: must be installed ({error})") from error
