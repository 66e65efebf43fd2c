"""FlashAttention-4's package: whether it is installed, which is soon said, and its import, which takes seconds."""

import inspect
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MODULE = "flash_attn.cute.interface"
"""Of package flash-attn-4."""

Forward = Callable[..., Any]


class ImportFailed(RuntimeError):
    """The package is there and does not import: half an installation fails in its own ways."""


class _Import(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="nanovllm-flash-import", daemon=True)
        self.result: Forward | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.result = _forward_of(import_module(MODULE))
        except Exception as error:
            self.error = error


_imports: list[_Import] = []
"""At most one."""
_lock = threading.Lock()


def installed() -> bool:
    """Whether its files are in place. Imports nothing, not even the package that they are in."""
    try:
        spec = find_spec("flash_attn")
    except (ImportError, ValueError):
        return False
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return any((Path(folder) / "cute" / "interface.py").is_file() for folder in folders)


def start() -> None:
    """Starts the import in the background, once in a process."""
    with _lock:
        if not _imports:
            _imports.append(_Import())
            _imports[0].start()


def forward() -> Forward:
    """Attention over sequences of several lengths, when it is imported; ImportFailed if it cannot be."""
    start()
    [attempt] = _imports
    attempt.join()
    if attempt.result is None:
        raise ImportFailed(f"{type(attempt.error).__name__}: {attempt.error}") from attempt.error
    return attempt.result


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
