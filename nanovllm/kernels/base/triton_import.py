"""Triton where it is installed, and otherwise a placeholder, so that kernel files still import.

PyTorch's CPU builds bring no Triton. The kernels' PyTorch twins live in the same files and must be importable there.
"""

from typing import Any

try:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

    HAS_TRITON = True
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise  # a Triton without what we need: its placeholder would be slow without a word
    HAS_TRITON = False

    class _Placeholder:
        """Any attribute is another placeholder; as a decorator it leaves the function alone."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args and callable(args[0]) else self

    triton = tl = gluon = gl = async_copy = mma_v2 = _Placeholder()
    mbarrier = tma = warpgroup_mma = warpgroup_mma_wait = triton

__all__ = [
    "HAS_TRITON", "async_copy", "gl", "gluon", "mbarrier", "mma_v2", "tl", "tma", "triton", "warpgroup_mma",
    "warpgroup_mma_wait",
]  # fmt: skip
