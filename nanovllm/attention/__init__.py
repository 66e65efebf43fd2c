"""Attention backends and the choice among them."""

from importlib import import_module
from typing import NamedTuple

import torch

from nanovllm.attention.base import AttentionBackend, AttentionMetadata, AttentionSetup, AttentionSpec, KVCache
from nanovllm.errors import refuse

__all__ = [
    "BACKENDS", "AttentionBackend", "AttentionMetadata", "AttentionSetup", "AttentionSpec", "KVCache", "Selection",
    "select_backend",
]  # fmt: skip

# Imported on demand: Triton and FlashAttention need not be installed where they are not used.
BACKENDS: dict[str, tuple[str, str]] = {
    "flash": ("nanovllm.attention.flash_backend", "FlashBackend"),
    "triton": ("nanovllm.attention.triton_backend", "TritonBackend"),
    "torch": ("nanovllm.attention.torch_backend", "TorchBackend"),
    "fixed-order triton": ("nanovllm.attention.triton_backend", "FixedOrderTritonBackend"),
    "fixed-order torch": ("nanovllm.attention.torch_backend", "FixedOrderTorchBackend"),
    "flex": ("nanovllm.attention.flex_backend", "FlexBackend"),
}

FP8_CAPABILITY = (8, 9)
"""Lowest compute capability that converts e4m3."""


def check_fp8_cache(capability: tuple[int, int]) -> None:
    """Raises ValueError where a GPU of this compute capability cannot keep keys and values in e4m3."""
    if capability < FP8_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (FP8_CAPABILITY, capability))
        refuse("kv_cache_dtype", "fp8", f"'auto' on a device of compute capability {found}; FP8 needs {needed}")


class Selection(NamedTuple):
    backend: type[AttentionBackend]
    reason: str


def select_backend(name: str, setup: AttentionSetup) -> Selection:
    """The backend called `name`, or for "auto" the fastest one that is installed and that can serve all layers.

    A backend asked for by name is used or refused with ValueError, never replaced.
    """
    is_cuda, has_fp8 = setup.device.type == "cuda", setup.has_fp8_cache
    if has_fp8 and is_cuda:
        check_fp8_cache(torch.cuda.get_device_capability(setup.device))
    if name != "auto":
        backend = _load(name)
        backend.check(setup)
        return Selection(backend, "asked for")
    refusals = []
    of_cuda = ("triton", "torch") if has_fp8 else ("flash", "triton", "torch")
    candidates = of_cuda if is_cuda else ("torch",)
    for candidate in candidates:
        try:
            backend = _load(candidate)
            backend.check(setup)
        except ValueError as error:
            refusals.append(str(error))
            continue
        reason = "; ".join(refusals) or f"the fastest on {setup.device.type}"
        return Selection(backend, reason)
    raise ValueError("attention_backend='auto': none can serve this model: " + "; ".join(refusals))


def _load(name: str) -> type[AttentionBackend]:
    if name not in BACKENDS:
        raise ValueError(f"attention_backend={name!r}: must be one of 'auto', " + ", ".join(map(repr, BACKENDS)))
    module, cls = BACKENDS[name]
    try:
        return getattr(import_module(module), cls)
    except (ImportError, RuntimeError, OSError) as error:  # half an installation fails in its own ways
        raise ValueError(f"attention_backend={name!r}: must be installed ({error})") from error
