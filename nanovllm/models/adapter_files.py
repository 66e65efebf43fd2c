"""LoRA adapters (Hu et al., arXiv 2106.09685) in PEFT's files: read, and refused by the name of what is not served.

A module of the model computes W x + s B (A x): A [r, in] and B [out, r] are "lora_A" and "lora_B" of its name, s is
alpha / r, or alpha / sqrt(r) where use_rslora is set. rank_pattern and alpha_pattern give modules a rank and an alpha
of their own.

Experts that are modules of their own have each an A and a B. Of those that are one parameter [E, out, in], which
target_parameters names, PEFT's ParamWrapper has A [E r, in], expert by expert, and B [out, r E], whose columns are
those of all experts for one rank after the other; before 0.19 "in" was the parameter's second dimension and "out" its
third. Where a module has two such parameters, the wrapper of the first is "base_layer" of the other's. "Shared outer"
adapters have [E, r, in] and [E, out, r] under the parameter's name, with 1 for E where all experts share one.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.errors import is_integer, is_number, refuse, shown
from nanovllm.models.checkpoint import DTYPES

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_READ = {
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "target_parameters", "peft_version", "layers_to_transform", "layers_pattern", "peft_type", "init_lora_weights",
    "bias",
}  # fmt: skip
IDLE = {
    "task_type", "base_model_name_or_path", "inference_mode", "revision", "auto_mapping",
    "lora_dropout", "megatron_config", "megatron_core", "qalora_group_size", "loftq_config", "eva_config",
    "corda_config", "runtime_config",
}  # fmt: skip
"""Fields that change nothing of what an adapter computes once it is trained."""
_KINDS: dict[str, tuple[type, ...]] = {
    "target_modules": (str, list, NoneType), "exclude_modules": (str, list, NoneType), "rank_pattern": (dict, NoneType),
    "alpha_pattern": (dict, NoneType), "layers_to_transform": (int, list, NoneType),
    "layers_pattern": (str, list, NoneType), "target_parameters": (list, NoneType), "peft_version": (str, NoneType),
}  # fmt: skip
_STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""Parameters of a module of experts, in the order in which they are wrapped. It has one of the first two."""
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base as it is."""
_PIECE_BYTES = 1 << 20
"""Size of a piece of a file that a thread reads."""


class LoRAPair(NamedTuple):
    """Weights of what a module adds: scale * B A x."""

    a: torch.Tensor
    """Weights [r, in] as they were trained; of a parameter of experts [E, r, in], 1 for E where all share one."""
    b: torch.Tensor
    """Weights [out, r], or [E, out, r]."""
    scale: float


class Adapter(NamedTuple):
    """An adapter as PEFT has it, in files or in memory."""

    digest: str
    """Digest of the bytes of its files, so that two adapters with one digest compute the same; of one from memory any
    text that no other has."""
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


def read_adapter(folder: Path) -> Adapter:
    """Reads a folder that PEFT's save_pretrained wrote. Raises ValueError where it is none."""
    try:
        written, (data, digests) = (folder / CONFIG).read_bytes(), _read(folder / TENSORS)
    except OSError as error:
        needs = f"must be a folder with {CONFIG} and {TENSORS}"
        raise ValueError(f"lora_path={shown(str(folder))}: {needs} ({error.strerror})") from None
    try:
        config = json.loads(written)
        tensors = _tensors(data)
    except ValueError as error:
        raise ValueError(f"lora_path={shown(str(folder))}: corrupt or cut short: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"lora_path={shown(str(folder))}: {CONFIG} must be an object")
    return Adapter(sha256(sha256(written).digest() + b"".join(digests)).hexdigest(), config, tensors)


def _read(path: Path) -> tuple[np.ndarray, list[bytes]]:
    """A file's bytes, uint8, and a digest of each piece of them; threads read pieces side by side."""
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor() as pool:
        data = np.empty(os.fstat(file.fileno()).st_size, np.uint8)

        def read(at: int) -> bytes:
            piece = data[at : at + _PIECE_BYTES].data
            os.preadv(file.fileno(), [piece], at)
            return sha256(piece).digest()

        return data, list(pool.map(read, range(0, len(data), _PIECE_BYTES)))


def _tensors(data: np.ndarray) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, in its memory; of unknown types their bytes. (The library's function copies
    them, and no other thread runs meanwhile: 25 to 80 ms for 87 MB.) Raises ValueError where it is cut short."""
    begin, whole = 8 + int.from_bytes(data[:8].tobytes(), "little"), torch.from_numpy(data)
    found: dict[str, torch.Tensor] = {}
    for name, entry in json.loads(data[8:begin].tobytes()).items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            if not 0 <= first <= end <= len(data) - begin:
                raise ValueError(f"tensor {name!r} ends at {begin + end} of {len(data)} bytes")
            part, dtype = whole[begin + first : begin + end], DTYPES.get(entry["dtype"])
            if dtype is not None and (begin + first) % dtype.itemsize:  # older writers did not pad the header
                part = part.clone()
            found[name] = part if dtype is None else part.view(dtype).view(entry["shape"])
    return found


def check_config(config: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first field that asks for more than a LoRA of linear layers."""
    if config.get("peft_type") != "LORA":
        refuse("peft_type", config.get("peft_type"), "'LORA'")
    if config.get("bias", "none") != "none":
        refuse("bias", config["bias"], "'none': trained biases are not served")
    if (start := config.get("init_lora_weights")) not in _PLAIN_STARTS:
        refuse("init_lora_weights", start, "one that does not change the base, or converted to an ordinary adapter")
    for name, value in config.items():
        if name not in _READ | IDLE and value not in (None, False, "", [], {}):
            raise ValueError(f"{name}={shown(value)}: this field is not served; it must be left out")
    for name, kinds in _KINDS.items():
        if not isinstance(value := config.get(name), kinds):
            allowed = ("null" if kind is NoneType else kind.__name__ for kind in kinds)
            refuse(name, value, "of type " + " or ".join(allowed))
    for name, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        for value in (config.get(name), *(config.get(patterns) or {}).values()):
            if not is_number(value) or value <= 0 or (name == "r" and not is_integer(value)):
                refuse(name, value, "an integer > 0" if name == "r" else "a number > 0")
    written = [config.get("target_modules"), config.get("exclude_modules"), *(config.get("rank_pattern") or {}),
               *(config.get("alpha_pattern") or {})]  # fmt: skip
    for expression in filter(lambda one: isinstance(one, str), written):
        try:
            re.compile(expression)
        except re.error as error:
            raise ValueError(f"{shown(expression)}: is no regular expression: {error}") from None


def is_target(config: Mapping[str, Any], module: str) -> bool:
    """Whether PEFT puts an adapter on this module of the base model, if it is a linear layer of a decoder's layer."""
    wanted, layers = config.get("target_modules") or [], config.get("layers_to_transform")
    if _names(config.get("exclude_modules") or [], module):
        return False
    found = wanted == "all-linear" or _names(wanted, module)
    is_named = module in wanted if isinstance(wanted, list) else wanted != "all-linear"
    if not found or layers in (None, []) or is_named:
        return found
    patterns = config.get("layers_pattern") or [r"[^.]*"]
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if number := re.match(rf".*\.{pattern}\.(\d+)\.", f".{module}"):
            return int(number[1]) in ([layers] if isinstance(layers, int) else layers)
    return False


def check_targets(config: Mapping[str, Any], given: Iterable[str], of_model: Iterable[str]) -> None:
    """Raises ValueError where an adapter's modules are not those of the model that its configuration names. of_model:
    modules that can have one."""
    given, of_model = set(given), set(of_model)
    if unknown := given - of_model:
        raise ValueError(f"{min(unknown)}: this model has no linear layer of that name that takes an adapter")
    for module in sorted(of_model):
        if is_target(config, module) != (module in given):
            said = "has no lora_A and lora_B" if module not in given else "has an adapter"
            names = "target_modules, exclude_modules and layers_to_transform"
            raise ValueError(f"target_modules={shown(config.get('target_modules'))}: {module} {said}, against {names}")


def is_parameter(config: Mapping[str, Any], name: str) -> bool:
    """Whether PEFT puts an adapter on this parameter of a module of experts."""
    return _names(config.get("target_parameters") or [], name)


def turns_experts(config: Mapping[str, Any]) -> bool:
    """Whether A is of a parameter's second dimension, as PEFT had it before 0.19."""
    numbers = re.findall(r"\d+", config.get("peft_version") or "0")
    return [*map(int, numbers[:2])] < [0, 19]


def _wrapped(config: Mapping[str, Any], module: str) -> str | None:
    """The parameter of experts that PEFT has wrapped in `module`; None: there is none."""
    path = module
    while path.endswith(".base_layer"):
        path = path.removesuffix(".base_layer")
    names = [f"{path}.{name}" for name in _STACKS if path.endswith(".experts")]
    names = [name for name in names if is_parameter(config, name)]
    depth, wrapped = module.count(".base_layer"), [*names[:1], *(one for one in names[1:] if one.endswith("down_proj"))]
    return wrapped[-1 - depth] if depth < len(wrapped) else None


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value of a tensor [...] is NaN or infinite; its sum is neither then, but where it is too large.
    (isfinite takes twenty times as long as aminmax, and that longer than a sum.)"""
    return not tensor.numel() or math.isfinite(tensor.sum()) or all(map(math.isfinite, tensor.aminmax()))


def check_finite(modules: Mapping[str, LoRAPair], dtype: torch.dtype) -> None:
    """Raises ValueError naming the first module with values that are not finite, or not with its scale in `dtype`."""
    for module, (a, b, scale) in modules.items():
        for half, tensor, factor in (("lora_A", a, 1.0), ("lora_B", b, scale)):
            if not is_finite(tensor):
                raise ValueError(f"{module}: {half} holds NaN or infinity")
            if not is_finite((tensor.float() * factor).to(dtype)):
                raise ValueError(f"{module}: {half} with its scale does not fit into {dtype}")


def modules_of(adapter: Adapter, max_rank: int) -> dict[str, LoRAPair]:
    """An adapter by the modules of a checkpoint, as transformers names them. Raises ValueError naming the field or the
    tensor that is not served."""
    config = adapter.config
    check_config(config)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in adapter.tensors.items():
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        if found is None or tensor.dim() not in (2, 3) or tensor.dtype not in DTYPES.values():
            needs = f"a matrix lora_A.weight or lora_B.weight of a linear layer, in {', '.join(DTYPES)}"
            raise ValueError(f"tensor {name!r}: must be {needs}")
        pairs.setdefault(found[1], {})[found[2]] = tensor
    if not pairs:
        raise ValueError(f"{TENSORS}: has no tensors")
    made = {}
    for module, pair in pairs.items():
        if len(pair) < 2:
            raise ValueError(f"{module}: has no lora_{'B' if 'A' in pair else 'A'}")
        a, b = pair["A"], pair["B"]
        parameter = _wrapped(config, module)
        module = parameter or module
        rank, alpha = _value(config, "rank_pattern", module, "r"), _value(config, "alpha_pattern", module, "lora_alpha")
        if rank > max_rank:
            raise ValueError(f"max_lora_rank={max_rank}: {module} has rank {rank}")
        if parameter and a.dim() == b.dim() == 2 and a.shape[0] == b.shape[1] and a.shape[0] % rank == 0:
            a, b = a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1)
        if a.dim() != b.dim() or a.shape[-2] != rank or b.shape[-1] != rank:
            found_ranks = f"lora_A is {list(a.shape)} and lora_B {list(b.shape)}"
            raise ValueError(f"{module}: {found_ranks}, the configuration says rank {rank}")
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        made[module] = LoRAPair(a, b, scale)
    return made


def _value(config: Mapping[str, Any], patterns: str, module: str, default: str) -> Any:
    """A module's value: of the first pattern that is its name, or the end of it from a dot on."""
    given = config.get(patterns) or {}
    return next((value for key, value in given.items() if re.match(rf"(.*\.)?({key})$", module)), config[default])


def _names(given: Any, module: str) -> bool:
    """Whether an expression, or one of several ends of names, names this module."""
    if isinstance(given, str):
        return re.fullmatch(given, module) is not None
    return any(module == end or module.endswith(f".{end}") for end in given)
