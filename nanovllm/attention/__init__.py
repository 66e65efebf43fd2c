"""Attention backends and the choice among them."""

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import torch

from nanovllm.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec, KVCache
from nanovllm.errors import refuse

__all__ = [
    "BACKENDS", "AttentionBackend", "AttentionMetadata", "AttentionSpec", "KVCache", "Selection", "select_backend",
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
    is_fallback: bool = False
    """Something faster could not be used; `reason` says why."""


def select_backend(name: str, specs: Sequence[AttentionSpec], *, device: torch.device | str, dtype: torch.dtype,
                   block_size: int, kv_dtype: torch.dtype | None = None) -> Selection:
    """The backend called `name`, or for "auto" the fastest one that is installed and that can serve all `specs`.
    kv_dtype: of the KV cache, where it is not dtype.

    A backend asked for by name is used or refused with ValueError, never replaced.
    """
    is_cuda = torch.device(device).type == "cuda"
    has_fp8 = kv_dtype == torch.float8_e4m3fn
    if has_fp8 and is_cuda:
        check_fp8_cache(torch.cuda.get_device_capability(device))
    if name != "auto":
        backend = _load(name)
        backend.check(specs, block_size, dtype, device, kv_dtype)
        return Selection(backend, "asked for")
    refusals = []
    candidates = (("triton", "torch") if has_fp8 else ("flash", "triton", "torch")) if is_cuda else ("torch",)
    for candidate in candidates:
        try:
            backend = _load(candidate)
            backend.check(specs, block_size, dtype, device, kv_dtype)
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
