"""Triton where it is installed, and otherwise a placeholder, so that kernel files still import.

PyTorch's CPU builds bring no Triton. The kernels' PyTorch twins live in the same files and must be importable there.

Every launch states whether a product may be fused with a sum, since releases of Triton differ in what they take where
nothing is said: `jit` of `triton` and `gluon`, as this module has them, makes kernels that may unless a launch says
otherwise.
"""

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

try:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
    from triton.runtime.jit import JITFunction

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



def _launcher(kernel: Any, grid: Any) -> Callable[..., Any]:
    return partial(kernel.run, grid=grid, warmup=False, enable_fp_fusion=True)


@cache
def _stating_fusion(kind: Any) -> type:
    return type(kind.__name__, (kind,), {"__getitem__": _launcher})


def _with_jit(module: Any) -> Any:
    """The contents of `module` (a module again, or kernels could not name it), with a `jit` as above."""

    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return partial(jit, **options)
        kernel: Any = module.jit(function, **options)
        kind: Any = type(kernel)
        if isinstance(kernel, JITFunction):  # else Triton's interpreter, which fuses nothing
            kernel.__class__ = _stating_fusion(kind)
        return kernel

    changed = ModuleType(module.__name__)
    vars(changed).update(vars(module), jit=jit)
    return changed


if HAS_TRITON:
    triton, gluon = _with_jit(triton), _with_jit(gluon)

__all__ = [
    "HAS_TRITON", "async_copy", "gl", "gluon", "mbarrier", "mma_v2", "tl", "tma", "triton", "warpgroup_mma",
    "warpgroup_mma_wait",
]  # fmt: skip
