"""LoRA adapters of an LLM: what a request names one by, and the calls that load and remove them."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from nanovllm.engine.protocol import Engine
from nanovllm.turns import Turns

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by its name, with vLLM's fields."""

    lora_name: str
    lora_int_id: int = 0
    """vLLM's number, which says nothing here: names tell adapters apart."""
    lora_path: str = ""
    """Folder that PEFT has written (adapter_config.json, adapter_model.safetensors), which the first request loads. "":
    LLM.load_adapter has loaded it."""
    load_inplace: bool = False
    """Read the folder again, whatever had the name before; requests that run keep what they began with."""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name={self.lora_name!r}: must be a text that is not empty")
        if not isinstance(self.lora_path, (str, os.PathLike)):
            raise ValueError(f"lora_path={self.lora_path!r}: must be a path")


def _as_lora_requests(given: Any, count: int) -> Sequence[LoRARequest | None]:
    """One for all of `count` prompts, or one or None for each. Raises TypeError and ValueError."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    if not isinstance(given, (list, tuple)) or not all(one is None or isinstance(one, LoRARequest) for one in given):
        raise TypeError("lora_request: must be a LoRARequest, None, or a list of them")
    if len(given) != count:
        raise ValueError(f"lora_request: {len(given)} given, must be one or as many as prompts ({count})")
    return given


class Adapters:
    """Base of LLM with the calls about adapters."""

    engine: Engine
    _turns: Turns
    _saved: dict[str, "TemporaryDirectory[str]"]
    """Folders of adapters from memory by name, which replicas that are restarted read again; they go with the entry."""

    def load_adapter(
        self, name: str, path: str | Path | None = None, *, tensors: "Mapping[str, torch.Tensor] | None" = None,
        config: Mapping[str, Any] | None = None,
    ) -> LoRARequest:  # fmt: skip
        """Loads a LoRA adapter, from a folder as PEFT writes it or from memory, under this name, in place of what had
        it before; returns what requests ask for it with. Needs enable_lora=True.

        `tensors`: by PEFT's names, on any device; `config`: the entries of adapter_config.json. Requests that run keep
        the adapter that they began with. Raises ValueError naming the field or tensor that is not served, with nothing
        changed.
        """
        if (path is None) != (tensors is not None and config is not None):
            raise ValueError("load_adapter: must have either a path, or tensors and config")
        request, folder = LoRARequest(name), None
        if tensors is not None and config is not None:
            config = json.loads(config_text(config))
            if not self.engine.config.has_front:
                given = {"weights": tensors.items(), "lora_config": config}
                self._turns.call("load_adapter", lora_name=name, load_inplace=True, **given)
                return request
            folder = TemporaryDirectory(prefix="nanovllm-adapter-")
            _save(Path(folder.name), tensors, config)
            path = folder.name
        self._load_adapter(replace(request, lora_path=str(path)), replaces=True)
        self._saved.pop(name, None)
        if folder is not None:
            self._saved[name] = folder
        return request

    def remove_adapter(self, name: str) -> None:
        """Lets no more requests have this adapter. Those that have it end with it; then its memory is free for
        others."""
        self._turns.call("remove_adapter", lora_name=name)
        self._saved.pop(name, None)

    def adapters_of(self, given: Any, count: int) -> list[str | None]:
        """adapter_of for each of `count` prompts, of one request for all or one or None for each; what is asked for
        several times is loaded once."""
        requests = _as_lora_requests(given, count)
        found = {request: self.adapter_of(request) for request in dict.fromkeys(requests)}
        return [found[request] for request in requests]

    def adapter_of(self, request: LoRARequest | None) -> str | None:
        """Digest of the adapter that a request asks for, which is loaded where it is not there yet."""
        if request is None:
            return None
        self._turns.require_open()
        loaded = self.engine.state.adapters.get(request.lora_name)
        if loaded is None or request.load_inplace or (request.lora_path and loaded.path != _absolute(request)):
            return self._load_adapter(request, request.load_inplace)
        return loaded.digest

    def _load_adapter(self, request: LoRARequest, replaces: bool) -> str:
        if not request.lora_path:
            fault = "no adapter of this name is loaded, and lora_path is empty"
            raise ValueError(f"lora_name={request.lora_name!r}: {fault}")
        options = {"lora_name": request.lora_name, "lora_path": _absolute(request), "load_inplace": replaces}
        digest: str = self._turns.call("load_adapter", **options)["digest"]
        return digest


def _absolute(request: LoRARequest) -> str:
    """The folder as replicas, which may have other working folders, find it."""
    return os.path.abspath(request.lora_path)


def _save(folder: Path, tensors: "Mapping[str, torch.Tensor]", config: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    from nanovllm.models.adapter_files import CONFIG, TENSORS

    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if len({tensor.untyped_storage().data_ptr() for tensor in held.values()}) < len(held):  # the library refuses that
        held = {name: tensor.clone() for name, tensor in held.items()}
    save_file(held, folder / TENSORS)


def config_text(config: Mapping[str, Any]) -> str:
    """The entries of adapter_config.json as its text."""
    return json.dumps(dict(config), default=_plain)


def _plain(value: Any) -> Any:
    """Returns what JSON has for a value of a LoraConfig: for sets of names, and for enums that are texts."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
