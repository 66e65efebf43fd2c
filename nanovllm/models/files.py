"""The files of a model: those of a folder, or the hub's, of which the configuration comes first. No torch."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nanovllm.errors import refuse, short

MODELOPT = "hf_quant_config.json"
"""File in which ModelOpt says how weights are quantised, where config.json does not."""
CONFIGURATION = (
    "config.json", "generation_config.json", MODELOPT, "adapter_config.json", "modules.json", "*/config.json",
)  # fmt: skip
TEXTS = ("*.json", "*.txt", "*.jinja", "*.model")
WEIGHTS = ("*.safetensors",)
_TWICE = ("*/*.safetensors", "consolidated*.safetensors")
"""Patterns of files that hold the same weights by other names, and are never read."""
_TOKENIZERS = ("tokenizer", "vocab", "merges", "tekken", "spiece", "sentencepiece")
"""Beginnings of the names of a tokenizer's files."""
_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def names_hub(option: str, name: str) -> bool:
    """Whether `name` is a hub id and no folder. Raises ValueError for a file, and FileNotFoundError where it can be
    neither."""
    if Path(name).is_file():
        converted = ": GGUF is not read, name the safetensors it was made of" if name.endswith(".gguf") else ""
        refuse(option, name, f"a folder or a hub id, not a file{converted}")
    if not Path(name).is_dir() and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise FileNotFoundError(f"{option}={name!r}: no such folder, and not a hub id of the form 'owner/name'")
    return not Path(name).is_dir()


def fetch(model: str, patterns: Iterable[str], revision: str | None = None, download_dir: str | None = None) -> str:
    """The local folder of a hub id, in which its files of these `patterns` are. Raises FileNotFoundError where the hub
    does not give them. `revision`, `download_dir`: see EngineConfig."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        where: dict[str, Any] = {"revision": revision, "cache_dir": download_dir}
        return str(snapshot_download(model, allow_patterns=list(patterns), ignore_patterns=list(_TWICE), **where))
    except GatedRepoError as error:
        why = "the hub gives it to those who have accepted its terms there: do so, and set HF_TOKEN"
        raise FileNotFoundError(f"model={model!r}: {why}") from error
    except RepositoryNotFoundError as error:
        why = "no such folder, and the hub has no such model, or a private one, for which it takes HF_TOKEN"
        raise FileNotFoundError(f"model={model!r}: {why}") from error
    except RevisionNotFoundError as error:
        raise FileNotFoundError(f"model={model!r}: its repository has no revision={revision!r}") from error
    except Exception as error:  # also what its HTTP client and its downloader in Rust raise
        raise FileNotFoundError(f"model={model!r}: no such folder, and not from the hub: {short(error)}") from error


def _names(model: str, folder: Path) -> list[str]:
    """Names of the files in `model`'s folder, or in its repository as far as the hub answers."""
    here = [path.name for path in folder.iterdir()]
    if model == str(folder):
        return here
    from huggingface_hub import HfApi

    try:
        return here + HfApi().list_repo_files(model)
    except Exception:
        return here


def check_configuration(model: str, folder: Path) -> None:
    """Raises FileNotFoundError, or ValueError where it is something else than a model, for a folder without
    config.json. model: what the user has named."""
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        what = f"an adapter (LoRA) of {base!r}, not a model: merge it into that (PEFT's merge_and_unload)"
        raise ValueError(f"model={model!r}: {what} and save the result")
    if any(name.endswith(".gguf") for name in _names(model, folder)):
        raise ValueError(f"model={model!r}: GGUF files, which are not read: name the safetensors they were made of")
    raise FileNotFoundError(f"model={model!r}: config.json is missing")


def check_weights(model: str, folder: Path) -> None:
    """Raises FileNotFoundError where there are no weights that can be read."""
    if weight_files(folder):
        return
    pickles = sorted(name for name in _names(model, folder) if name.endswith((".bin", ".pt", ".pth")))
    if pickles:
        why = f"its weights are pickles ({pickles[0]}), which are not read"
        raise FileNotFoundError(f"model={model!r}: {why}: load and save it with transformers, which writes safetensors")
    raise FileNotFoundError(f"model={model!r}: no *.safetensors file")


def check_tokenizer(option: str, folder: Path) -> None:
    """Raises ValueError where a folder has no file of a tokenizer."""
    files = folder.iterdir()
    if not any(path.name.startswith(_TOKENIZERS) or path.suffix in (".model", ".tiktoken") for path in files):
        has = "no tokenizer there: give tokenizer=..., or skip_tokenizer_init=True for token ids alone"
        raise ValueError(f"{option}={str(folder)!r}: {has}")


def weight_map(folder: Path) -> dict[str, str]:
    """Names of a folder's tensors with the file that its index has each in; empty where there is no index. Raises
    FileNotFoundError where one of these files is missing, ValueError for a corrupt index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return {}
    try:
        found: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = set(found.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index}: corrupt: no weight_map from names to files: {error!r}") from None
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{index}: corrupt: its weight_map names the files {names or 'none'}")
    for name in sorted(names):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{index} names {name}, which is missing")
    return found


def weight_files(folder: Path, index: Mapping[str, str] | None = None) -> list[Path]:
    """The files of a folder's weights: those that its index names, or all but such as hold the same ones by other
    names. index: its weight_map, where it has been read. Raises FileNotFoundError and ValueError as weight_map."""
    if named := weight_map(folder) if index is None else index:
        return [folder / name for name in sorted(set(named.values()))]
    return [path for path in sorted(folder.glob(*WEIGHTS)) if not any(map(path.match, _TWICE[1:]))]


def _number(content: dict[str, Any]) -> Any:
    """Replaces what transformers writes for numbers that JSON does not have."""
    tag = content.get("__float__") if len(content) == 1 else None
    return _NUMBERS.get(tag, content) if isinstance(tag, str) else content


def parse_json(text: str) -> Any:
    """Value of a JSON text, with transformers' spelling of numbers that JSON does not have."""
    return json.loads(text, object_hook=_number)


def read_json(path: Path) -> dict[str, Any]:
    """An object in a file. Raises FileNotFoundError, or ValueError with its path where there is something else."""
    if not path.is_file():
        raise FileNotFoundError(f"model={str(path.parent)!r}: {path.name} is missing")
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content
