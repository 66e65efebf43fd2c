"""Models in files of the user's own (EngineConfig.plugins). No torch."""

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from nanovllm.errors import refuse


def load_plugins(files: Iterable[str]) -> None:
    """Runs each file in this process, once, as a module of its own. Raises ValueError naming one that cannot be run."""
    for file in files:
        path = Path(file).resolve()
        name = f"nanovllm_plugin_{str(path).encode().hex()}"
        if name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(name, path)
        if not path.is_file() or spec is None or spec.loader is None:
            refuse("plugins", file, "a Python file that is there")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # its classes look themselves up
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise ValueError(f"plugins={file!r}: it raises {type(error).__name__}: {error}") from error
