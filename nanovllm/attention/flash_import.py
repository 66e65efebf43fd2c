"""FlashAttention's packages: whether they are installed, which is soon said, and their import, which takes seconds."""

import inspect
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FLASH4 = "flash_attn.cute.interface"
"""Of package flash-attn-4."""
FLASH2 = "flash_attn.flash_attn_interface"
"""Of package flash-attn."""

Forward = Callable[..., Any]


class ImportFailed(RuntimeError):
    """A package is there and does not import: half an installation fails in its own ways."""


class _Import(threading.Thread):
    def __init__(self, package: str) -> None:
        super().__init__(name="nanovllm-flash-import", daemon=True)
        self.package = package
        self.result: Forward | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            module = import_module(self.package)
            self.result = _flash4_forward(module) if self.package == FLASH4 else module.flash_attn_varlen_func
        except Exception as error:
            self.error = error


_imports: dict[str, _Import] = {}
_lock = threading.Lock()


def installed() -> set[str]:
    """FLASH4, FLASH2: what has its files in place. Imports nothing, not even the package that they are in."""
    try:
        spec = find_spec("flash_attn")
    except (ImportError, ValueError):
        return set()
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    inside = {package: "/".join(package.split(".")[1:]) + ".py" for package in (FLASH4, FLASH2)}
    return {package for package, file in inside.items() if any((folder / file).is_file() for folder in folders)}


def start(package: str) -> None:
    """Starts the import in the background, once in a process."""
    with _lock:
        if package not in _imports:
            _imports[package] = _Import(package)
            _imports[package].start()


def forward(package: str) -> Forward:
    """The package's attention over sequences of several lengths, when it is imported; ImportFailed if it cannot be."""
    start(package)
    attempt = _imports[package]
    attempt.join()
    if attempt.result is None:
        raise ImportFailed(f"{type(attempt.error).__name__}: {attempt.error}") from attempt.error
    return attempt.result


def _flash4_forward(flash4: Any) -> Forward:
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
