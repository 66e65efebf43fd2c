"""Checkpoints of 4-bit floats and 8-bit integers, written number by number as the named tools write them; what they
stand for is computed from the written bytes alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from checkpoints import FILE, read_json, write_json
from exactness.int4_checkpoints import is_quantized
from safetensors.torch import load_file, save_file

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Tensors = dict[str, torch.Tensor]


def _codes(scaled: np.ndarray) -> np.ndarray:
    """The nearest numbers of e2m1: bit 3 the sign, bits 0 to 2 the place of the magnitude."""
    nearest = np.abs(np.abs(scaled)[..., None] - MAGNITUDES).argmin(-1)
    return (nearest | np.where(scaled < 0, 8, 0)).astype(np.uint8)


def _in_bytes(codes: np.ndarray) -> torch.Tensor:
    """Even columns in the lower halves."""
    return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4)


def _of_bytes(numbers: torch.Tensor) -> np.ndarray:
    halves = np.stack([numbers.numpy() & 15, numbers.numpy() >> 4], -1).reshape(len(numbers), -1)
    return np.where(halves & 8, -1, 1) * MAGNITUDES[halves & 7]


def _spread(of_groups: np.ndarray, columns: int, group: int) -> np.ndarray:
    return of_groups[:, np.arange(columns) // (group or columns)]


def _largest(weight: np.ndarray, group: int) -> np.ndarray:
    """A group's largest magnitude [rows, groups]."""
    each = group or weight.shape[1]
    starts = range(0, weight.shape[1], each)
    return np.stack([np.abs(weight[:, start : start + each]).max(1) for start in starts], 1)


def _nvfp4(path: str, weight: np.ndarray) -> tuple[Tensors, float]:
    """Tensors but for the tensor's scale, and this."""
    of_tensor = float(np.float32(np.abs(weight).max() / (6 * 448)))
    scales = torch.from_numpy(_largest(weight, 16) / 6 / of_tensor).to(torch.float8_e4m3fn)
    by_column = _spread(scales.double().numpy() * of_tensor, weight.shape[1], 16)
    numbers = _in_bytes(_codes(weight / np.where(by_column == 0, 1, by_column)))
    return {"numbers": numbers, f"{path}.weight_scale": scales}, of_tensor


def modelopt(path: str, weight: np.ndarray) -> Tensors:
    found, of_tensor = _nvfp4(path, weight)
    numbers, ones = found.pop("numbers"), torch.tensor(0.01)
    of_cache = {f"{path}.{path[-6]}_scale": torch.tensor(1.0)} if path.endswith(("k_proj", "v_proj")) else {}
    return {
        **found, f"{path}.weight": numbers, f"{path}.weight_scale_2": torch.tensor(of_tensor),
        f"{path}.input_scale": ones, **of_cache,
    }  # fmt: skip


def of_modelopt(path: str, tensors: Tensors) -> np.ndarray:
    values = _of_bytes(tensors[f"{path}.weight"])
    scales = tensors[f"{path}.weight_scale"].double().numpy() * tensors[f"{path}.weight_scale_2"].double().numpy()
    return values * _spread(scales, values.shape[1], 16)


def nvfp4(path: str, weight: np.ndarray) -> Tensors:
    found, of_tensor = _nvfp4(path, weight)
    of_tensors = {name: torch.tensor([1 / of_tensor]) for name in ("weight_global_scale", "input_global_scale")}
    attention, _, projection = path.rpartition(".")
    of_cache = {f"{attention}.{projection[0]}_scale": torch.ones(1)} if projection in ("k_proj", "v_proj") else {}
    return {
        f"{path}.weight_packed": found.pop("numbers"), **found, **of_cache,
        **{f"{path}.{name}": value.float() for name, value in of_tensors.items()},
    }  # fmt: skip


def of_nvfp4(path: str, tensors: Tensors) -> np.ndarray:
    values = _of_bytes(tensors[f"{path}.weight_packed"])
    scales = tensors[f"{path}.weight_scale"].double().numpy() / tensors[f"{path}.weight_global_scale"].double().numpy()
    return values * _spread(scales, values.shape[1], 16)


def mxfp4(path: str, weight: np.ndarray) -> Tensors:
    exponents = np.clip(np.floor(np.log2(np.maximum(_largest(weight, 32), 1e-30))) - 2, -127, 1)
    numbers = _codes(weight / _spread(np.exp2(exponents), weight.shape[1], 32))
    scales = torch.from_numpy((exponents + 127).astype(np.uint8))
    return {f"{path}.weight_packed": _in_bytes(numbers), f"{path}.weight_scale": scales}


def of_mxfp4(path: str, tensors: Tensors) -> np.ndarray:
    values = _of_bytes(tensors[f"{path}.weight_packed"])
    scales = np.exp2(tensors[f"{path}.weight_scale"].double().numpy() - 127)
    return values * _spread(scales, values.shape[1], 32)


def int8(path: str, weight: np.ndarray, group: int) -> Tensors:
    scales = (_largest(weight, group) / 127.5).astype(np.float32)
    numbers = np.clip(np.round(weight / _spread(scales, weight.shape[1], group)), -128, 127).astype(np.int8)
    return {f"{path}.weight": torch.from_numpy(numbers), f"{path}.weight_scale": torch.from_numpy(scales)}


def int8_packed(path: str, weight: np.ndarray, group: int) -> Tensors:
    found = int8(path, weight, group)
    numbers = found.pop(f"{path}.weight").numpy().astype(np.int64) + 128
    padded = np.pad(numbers, [(0, 0), (0, -numbers.shape[1] % 4)])
    words = sum(padded[:, place::4] << 8 * place for place in range(4))
    packed = torch.from_numpy(np.ascontiguousarray(words).astype(np.uint32).view(np.int32))
    return {**found, f"{path}.weight_packed": packed, f"{path}.weight_shape": torch.tensor(numbers.shape)}


def of_int8(path: str, tensors: Tensors, group: int) -> np.ndarray:
    if f"{path}.weight" in tensors:
        numbers = tensors[f"{path}.weight"].double().numpy()
    else:
        words = tensors[f"{path}.weight_packed"].numpy().view(np.uint32).astype(np.int64)
        columns = int(tensors[f"{path}.weight_shape"][1])
        numbers = np.stack([words >> 8 * place & 255 for place in range(4)], -1).reshape(len(words), -1) - 128.0
        numbers = numbers[:, :columns]
    return numbers * _spread(tensors[f"{path}.weight_scale"].double().numpy(), numbers.shape[1], group)


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    weights = {"symmetric": True, "dynamic": False, "actorder": None, "observer": "minmax", **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {**group, "format": form}},
        "ignore": ["lm_head", "re:.*mlp.gate$"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


_E2M1 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_INT8, _FP8 = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float", "dynamic": False}
_OF_ROWS = {**_INT8, "strategy": "channel", "group_size": None}
_TOKENS = {**_INT8, "strategy": "token", "dynamic": True, "symmetric": True}


class Format(NamedTuple):
    config: dict[str, Any]
    """quantization_config."""
    write: Callable[[str, np.ndarray], Tensors]
    """(module, matrix [out, in]) -> its tensors."""
    read: Callable[[str, Tensors], np.ndarray]
    """Matrix that they stand for, by the format's definition."""


MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.37.0"},
    "ignore": ["lm_head", "*.mlp.gate"], "kv_cache_scheme": _FP8,
    "config_groups": {"group_0": {"weights": _E2M1, "input_activations": _E2M1, "targets": ["Linear"]}},
}  # fmt: skip
FORMATS: dict[str, Format] = {
    "modelopt": Format(MODELOPT, modelopt, of_modelopt),
    "nvfp4": Format(
        {**_compressed("nvfp4-pack-quantized", _E2M1, {**_E2M1, "dynamic": "local"}), "kv_cache_scheme": _FP8},
        nvfp4, of_nvfp4,
    ),
    "mxfp4": Format(
        _compressed("mxfp4-pack-quantized", {**_E2M1, "strategy": "group", "group_size": 32}), mxfp4, of_mxfp4
    ),
    "int8": Format(
        _compressed("int-quantized", _OF_ROWS, _TOKENS), lambda *a: int8(*a, 0), lambda *a: of_int8(*a, 0)
    ),
    "int8 packed": Format(
        _compressed("pack-quantized", _OF_ROWS), lambda *a: int8_packed(*a, 0), lambda *a: of_int8(*a, 0)
    ),
    "int8 in groups": Format(
        _compressed("pack-quantized", {**_INT8, "strategy": "group", "group_size": 128}),
        lambda *a: int8_packed(*a, 128), lambda *a: of_int8(*a, 128),
    ),
}  # fmt: skip


def save_as(name: str, folder: Path, target: Path) -> tuple[Path, Path]:
    """The wide checkpoint in `folder` as a tool writes it, and what that stands for, in two folders below `target`."""
    form, packed, wide = FORMATS[name], dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for path, value in load_file(folder / FILE).items():
        if not is_quantized(path):
            packed[path] = wide[path] = value
            continue
        written = form.write(path.removesuffix(".weight"), value.double().numpy())
        packed |= written
        wide[path] = torch.from_numpy(form.read(path.removesuffix(".weight"), written)).float()
    config = read_json(folder / "config.json")
    for kind, tensors, entries in (("packed", packed, {"quantization_config": form.config}), ("wide", wide, {})):
        (target / kind).mkdir(parents=True)
        save_file({key: value.contiguous() for key, value in tensors.items()}, target / kind / FILE)
        write_json(target / kind / "config.json", {**config, **entries})
    return target / "packed", target / "wide"
