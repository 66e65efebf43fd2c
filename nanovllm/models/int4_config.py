"""What a checkpoint's `quantization_config` says of 4-bit weights, and what of it is served. No torch."""

from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import Quantization

GROUP = 128
"""Columns of a group where weights are made while loading."""


def _option(raw: dict[str, Any], name: str, *known: Any, path: str = "") -> Any:
    """raw's entry `name`, one of `known`, of which the first is the default."""
    value = raw.get(name, known[0])
    if value not in known:
        refuse(f"quantization_config: {path}{name}", value, "one of " + ", ".join(map(repr, known)))
    return value


def _required(raw: dict[str, Any], name: str, value: int, path: str = "") -> None:
    if raw.get(name) != value:
        refuse(f"quantization_config: {path}{name}", raw.get(name), f"{value}, for other widths are not served")


def _group_size(value: Any, path: str = "") -> int:
    """Columns of a group; 0 for -1 and None: whole rows."""
    if value in (None, -1):
        return 0
    if type(value) is not int or (value not in (32, 64) and (value < 128 or value % 128)):
        refuse(f"quantization_config: {path}group_size", value, "-1, 32, 64 or a multiple of 128")
    return value


def read_awq(raw: dict[str, Any]) -> tuple[Quantization, list[str]]:
    """quant_method "awq", as AutoAWQ writes it."""
    _required(raw, "bits", 4)
    _option({"version": str(raw.get("version", "gemm")).lower()}, "version", "gemm")
    _option(raw, "zero_point", True)
    found = Quantization("int4", layout="awq", group=_group_size(raw.get("group_size")), has_zeros=True)
    return found, raw.get("modules_to_not_convert") or []


def read_gptq(raw: dict[str, Any]) -> tuple[Quantization, list[str]]:
    """quant_method "gptq", as AutoGPTQ and GPTQModel write it."""
    _required(raw, "bits", 4)
    _option(raw, "desc_act", False)
    _option(raw, "lm_head", False)
    layout = _option(raw, "checkpoint_format", "gptq", "gptq_v2")
    for name in ("dynamic", "modules_in_block_to_quantize"):
        if raw.get(name):
            refuse(f"quantization_config: {name}", raw[name], "absent")
    return Quantization("int4", layout=layout, group=_group_size(raw.get("group_size")), has_zeros=True), []


def read_packed(weights: dict[str, Any], inputs: dict[str, Any] | None, form: Any) -> Quantization:
    """The weights and input_activations of a group of compressed-tensors, of integers, and its format."""
    _required(weights, "num_bits", 4, "weights.")
    if inputs is not None:
        refuse("quantization_config: input_activations", inputs, "absent beside weights of integers")
    _option({"format": form}, "format", "pack-quantized")
    _option(weights, "dynamic", False, path="weights.")
    _option(weights, "actorder", None, "weight", "static", path="weights.")
    strategy = _option(weights, "strategy", "group", "channel", path="weights.")
    group = _group_size(weights.get("group_size") if strategy == "group" else None, "weights.")
    symmetric = _option(weights, "symmetric", True, False, path="weights.")
    return Quantization("int4", layout="compressed-tensors", group=group, has_zeros=not symmetric)
