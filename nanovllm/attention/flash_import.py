"""FlashAttention-4's package: whether it is installed, which is soon said, and its import, which takes seconds."""

import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MODULE = "flash_attn.cute.interface"
"""Module of the package flash-attn-4."""

Forward = Callable[..., Any]


class ImportFailed(RuntimeError):
    """The package is there and does not import: half an installation fails in its own ways."""


def installed() -> bool:
    """Whether its files are in place. Imports nothing, not even the package that they are in."""
    try:
        spec = find_spec("flash_attn")
    except (ImportError, ValueError):
        return False
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return any((Path(folder) / "cute" / "interface.py").is_file() for folder in folders)


@cache
def start() -> "Future[Forward]":
    """Attention over sequences of several lengths, or ImportFailed: the import goes on in the background, once in a
    process."""
    found: Future[Forward] = Future()

    def load() -> None:
        try:
            found.set_result(_forward_of(import_module(MODULE)))
        except BaseException as error:  # somebody waits
            found.set_exception(ImportFailed(f"{type(error).__name__}: {error}"))

    threading.Thread(target=load, name="nanovllm-flash-import", daemon=True).start()
    return found


def _forward_of(flash4: Any) -> Forward:
    """The forward pass that writes into a given tensor, which the package keeps below its public function; the public
    one allocates its result, which would cost a copy."""
    forward: Forward | None = getattr(flash4, "_flash_attn_fwd", None)
    if forward is not None and "out" in inspect.signature(forward).parameters:
        return forward
    public: Forward = flash4.flash_attn_varlen_func

    def copying(*args: Any, out: Any, window_size_left: int | None = None, window_size_right: int | None = None,
                **options: Any) -> None:
        if window_size_left is not None:
            options["window_size"] = (window_size_left, window_size_right)
        result = public(*args, **options)
        out.copy_(result[0] if isinstance(result, tuple) else result)

    return copying
