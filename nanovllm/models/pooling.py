"""Reading of sentence-transformers' files in a model's folder: how a text becomes a vector. No torch."""

import json
from pathlib import Path
from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import Pooling
from nanovllm.models.files import read_json

MODULES = "modules.json"
_SERVED = ("Transformer", "Pooling", "Normalize")


def read_pooling(folder: Path, runner: str) -> Pooling | None:
    """The pooling of the model in a folder; None for one that generates text. `runner`: of EngineConfig; "pooling" has
    the last token taken, and normalised, where the files say nothing. Raises ValueError naming what is not served."""
    modules = _modules(folder / MODULES)
    if runner == "generate" or (runner == "auto" and "Pooling" not in modules):
        return None
    for kind in modules:
        if kind not in _SERVED:
            refuse(str(folder / MODULES), kind, f"a list of {', '.join(_SERVED)} alone")
    path = folder / modules.get("Pooling", "1_Pooling") / "config.json"
    if path.is_file() and (modes := _modes(read_json(path))) != ["lasttoken"]:
        refuse(f"{path}: pooling_mode", modes, "['lasttoken'] (others are not supported)")
    about = folder / "config_sentence_transformers.json"
    given: dict[str, Any] = read_json(about) if about.is_file() else {}
    prompts = {name: text for name, text in (given.get("prompts") or {}).items() if isinstance(text, str)}
    found = Pooling(not modules or "Normalize" in modules, prompts, given.get("default_prompt_name"))
    found.prompt(None)
    return found


def _modules(path: Path) -> dict[str, str]:
    """Folders of the modules by their kind, the last part of the name of their class; empty without such a file."""
    if not path.is_file():
        return {}
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        return {one["type"].rpartition(".")[2]: one["path"] for one in modules}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: must be a list of modules with type and path: {error!r}") from None


def _modes(config: dict[str, Any]) -> list[str]:
    """The modes that a Pooling's file names, by name or, in older files, by flags."""
    if (named := config.get("pooling_mode")) is not None:
        return [named] if isinstance(named, str) else [*named]
    before = "pooling_mode_"
    return [name.removeprefix(before) for name, value in config.items() if name.startswith(before) and value is True]
