"""Checkpoints of 4-bit weights, packed number by number as the formats' definitions say."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from checkpoints import FILE, read_json, write_json
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Neighbour, of eight, at each place of an int32, from the lowest bits on."""


class Quantized(NamedTuple):
    """A matrix [out, in]: (codes - zeros of the group) * scales of the group. group: columns, 0: all."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    group: int

    def widened(self) -> np.ndarray:
        """float32; the products are exact in it where scales are float16."""
        columns = self.codes.shape[1]
        group = np.arange(columns) // (self.group or columns)
        return ((self.codes - self.zeros[:, group]) * self.scales[:, group]).astype(np.float32)


def quantized(
    weight: np.ndarray, group: int, symmetric: bool = False, scale_type: type[np.floating[Any]] = np.float16
) -> Quantized:
    rows, columns = weight.shape
    each = group or columns
    codes = np.empty((rows, columns), np.int64)
    count = -(-columns // each)
    zeros, scales = np.full((rows, count), 8, np.int64), np.empty((rows, count), np.float32)
    for g in range(count):
        columns_of = slice(g * each, (g + 1) * each)
        part = weight[:, columns_of]
        if symmetric:
            scales[:, g] = scale_type(np.abs(part).max(1) / 7.5)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, g] = scale_type((high - low) / 15)
            zeros[:, g] = np.clip(np.round(-low / scales[:, g]), 0, 15)
        codes[:, columns_of] = np.clip(np.round(part / scales[:, [g]]) + zeros[:, [g]], 0, 15)
    return Quantized(codes, zeros, scales, group)


def packed(numbers: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32, eight neighbours along `axis` in each, `order` from the lowest bits on."""
    lines = np.moveaxis(numbers, axis, -1)
    lines = np.pad(lines, [(0, 0), (0, -lines.shape[1] % 8)]).astype(np.uint32)
    out = np.zeros((lines.shape[0], lines.shape[1] // 8), np.uint32)
    for place, neighbour in enumerate(order):
        out |= lines[:, neighbour::8] << np.uint32(4 * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(out.view(np.int32), -1, axis)))


def tensors_of(path: str, matrix: Quantized, layout: str, symmetric: bool = False) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors of the module `path`."""
    scales = torch.from_numpy(matrix.scales)
    if layout == "compressed-tensors":
        found = {
            f"{path}.weight_packed": packed(matrix.codes, 1), f"{path}.weight_scale": scales,
            f"{path}.weight_shape": torch.tensor(matrix.codes.shape),
        }  # fmt: skip
        return found if symmetric else {**found, f"{path}.weight_zero_point": packed(matrix.zeros, 0)}
    of_groups = scales.T.contiguous().half()
    if layout == "awq":
        codes, zeros = packed(matrix.codes.T, 1, AWQ_ORDER), packed(matrix.zeros.T, 1, AWQ_ORDER)
        return {f"{path}.qweight": codes, f"{path}.qzeros": zeros, f"{path}.scales": of_groups}
    stored = (matrix.zeros.T - (layout == "gptq")) % 16
    columns = matrix.codes.shape[1]
    return {
        f"{path}.qweight": packed(matrix.codes.T, 0), f"{path}.qzeros": packed(stored, 1), f"{path}.scales": of_groups,
        f"{path}.g_idx": torch.arange(columns, dtype=torch.int32) // (matrix.group or columns),
    }  # fmt: skip


def config_of(layout: str, group: int, symmetric: bool = False) -> dict[str, Any]:
    """quantization_config."""
    size = group or -1
    if layout == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    if layout.startswith("gptq"):
        return {
            "quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": False, "sym": symmetric,
            "checkpoint_format": layout,
        }  # fmt: skip
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False, "actorder": None, **strategy}
    found = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": found},
        "ignore": ["lm_head"],
    }  # fmt: skip


def is_quantized(name: str) -> bool:
    return name.endswith(("proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")) or ".experts." in name


def quantize_folder(folder: Path, group: int) -> dict[str, Quantized]:
    """Rounds a checkpoint's linear layers, in place: what a packed one of the same numbers stands for."""
    tensors = load_file(folder / FILE)
    found = {
        name.removesuffix(".weight"): quantized(value.float().numpy(), group)
        for name, value in tensors.items() if is_quantized(name)
    }  # fmt: skip
    for path, matrix in found.items():
        tensors[f"{path}.weight"] = torch.from_numpy(matrix.widened())
    save_file(tensors, folder / FILE)
    return found


def save_packed(
    wide: Path, folder: Path, matrices: dict[str, Quantized], layout: str, symmetric: bool = False
) -> Path:
    """The checkpoint `wide` with its linear layers packed, in `folder`."""
    folder.mkdir()
    tensors = {name: value for name, value in load_file(wide / FILE).items() if not is_quantized(name)}
    for path, matrix in matrices.items():
        tensors |= tensors_of(path, matrix, layout, symmetric)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / FILE)
    group = next(iter(matrices.values())).group
    config = read_json(wide / "config.json")
    write_json(folder / "config.json", {**config, "quantization_config": config_of(layout, group, symmetric)})
    return folder
