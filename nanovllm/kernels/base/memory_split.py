"""Division of a multiprocessor's memory between its L1 cache and the kernels' shared memory."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # CUfunction_attribute


@contextmanager
def equal_memory_split(percent: int) -> Iterator[None]:
    """Triton kernels that are launched within ask for `percent` of the memory as shared memory, from then on.

    A multiprocessor has one division at a time. Where a kernel asks for another than the one before it, PDL cannot
    start it there before that has left: in a chain of short kernels all should ask for the same.
    """
    from triton import knobs

    driver = ctypes.CDLL("libcuda.so.1")

    def ask(launch: Any) -> None:
        function = ctypes.c_void_p(launch.get()["function"])
        driver.cuFuncSetAttribute(function, _PREFERRED_SHARED_MEMORY_CARVEOUT, percent)  # a wish: no error matters

    knobs.runtime.launch_enter_hook.add(ask)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(ask)
