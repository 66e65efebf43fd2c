"""The keys of Triton's cache, computed early and in one order. No torch."""

import importlib
import pkgutil
from contextlib import suppress

_ROOMS = ("nanovllm.kernels", "nanovllm.parallel.peer")


def hash_triton() -> None:
    """Has Triton compute the hash of its own files that every key of its cache begins with. It keeps the result, takes
    a second or more for it, and lets other threads run meanwhile."""
    try:
        from triton.runtime.cache import triton_key

        triton_key()
    except Exception:
        pass  # another version keeps it elsewhere, and computes it when it needs it


def resolve_keys() -> None:
    """Has Triton compute the part of each kernel's key that comes from its source: here in the order of definition.

    Left to itself it does so at a kernel's first launch, and what comes out depends on whether a kernel that calls the
    same function was there before (it takes a callee's globals over before it has looked for them; seen in 3.6).
    """
    from triton.runtime.jit import JITFunction

    for room in _ROOMS:
        package = importlib.import_module(room)
        for found in pkgutil.walk_packages(package.__path__, f"{room}."):
            for value in vars(importlib.import_module(found.name)).values():
                if isinstance(value, JITFunction):
                    with suppress(Exception):  # a kernel that cannot have one says so when it is launched
                        _ = value.cache_key
