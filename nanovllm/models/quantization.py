"""Reading of `quantization_config`: how a checkpoint's weights are quantised, and which of that is served. No torch."""

import logging
import re
from collections.abc import Callable
from types import NoneType
from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import MoEConfig, Quantization
from nanovllm.models.quantized_modules import ALL, Rule

logger = logging.getLogger(__name__)

_BLOCK = [128, 128]
_NV_GROUP, _MX_GROUP = 16, 32
_INT4_GROUP = _INT8_GROUP = 128
"""Columns of a group: of int4 where it is made while loading, of int8 where it has any."""
_INSTEAD = "take the checkpoint that it was made of, with quantization='fp8' or 'int4' or without"


def _option(value: Any, name: str, *known: Any) -> Any:
    if value not in known:
        bound = ("one of " if len(known) > 1 else "") + ", ".join(map(repr, known))
        refuse(f"quantization_config: {name}", value, bound)
    return value


def _require_absent(raw: dict[str, Any], *names: str) -> None:
    for name in names:
        if raw.get(name):
            refuse(f"quantization_config: {name}", raw[name], "absent")


def _keep_wide(method: str, inputs: Any) -> None:
    """Says that activations are not rounded, where a checkpoint's `inputs` are."""
    if inputs:
        logger.warning("%s: weights alone are quantised here; activations stay wide, their scales are unused", method)


def _check_cache(scheme: Any) -> None:
    """Raises ValueError for keys and values in something else than 8-bit floats, whose scales we do without."""
    found = scheme if isinstance(scheme, dict) else {"type": scheme}
    if scheme and (found.get("type"), found.get("num_bits")) != ("float", 8):
        refuse("quantization_config: kv_cache_scheme", scheme, "absent, or of 8-bit floats")
    if scheme:
        logger.warning('scales of FP8 keys and values are unused: kv_cache_dtype="fp8" measures its own')


def _read_fp8(raw: dict[str, Any]) -> list[Rule]:
    """quant_method "fp8"."""
    _option(raw.get("fmt", "e4m3"), "fmt", "e4m3", "float8_e4m3fn")
    if _option(raw.get("scale_fmt"), "scale_fmt", None, "float", "ue8m0") == "ue8m0":  # of weights they are float32
        logger.warning("fp8: scales of activations are not rounded to powers of two here (scale_fmt)")
    static = _option(raw.get("activation_scheme", "dynamic"), "activation_scheme", "dynamic", "static") == "static"
    block = _option(raw.get("weight_block_size"), "weight_block_size", None, _BLOCK)
    wide = raw.get("modules_to_not_convert") or raw.get("ignored_layers") or []
    return _all_but(wide, Quantization("fp8", "block" if block else "tensor", static))


def _all_but(names: Any, found: Quantization) -> list[Rule]:
    """Rules of a checkpoint with one format. Raises ValueError where `names`, of what is not quantised, are no list of
    names."""
    return [(None, _names(names, "modules that are not converted")), (found, ALL)]


def _names(names: Any, entry: str) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse(f"quantization_config: {entry}", names, "a list of names")
    return names


def _read_compressed(raw: dict[str, Any]) -> list[Rule]:
    """quant_method "compressed-tensors"."""
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(one, dict) for one in groups.values()):
        refuse("quantization_config: config_groups", groups, "groups, an object of objects")
    _require_absent(raw, "transform_config")
    _check_cache(raw.get("kv_cache_scheme"))
    rules: list[Rule] = [(_read_group(one, raw), _targets(one)) for one in groups.values()]
    ignored = _names(raw.get("ignore") or [], "modules that are not converted")
    of_all = [rule for rule in rules if rule[1] is ALL]
    if len(of_all) > 1:
        refuse("quantization_config: config_groups", [*groups], "groups of which one at most has the target 'Linear'")
    return [(None, ignored), *(rule for rule in rules if rule[1] is not ALL), *of_all]


def _read_group(group: dict[str, Any], raw: dict[str, Any]) -> Quantization:
    """Reads one of the config_groups of compressed-tensors."""
    _require_absent(group, "output_activations")
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    for name, part in (("weights", weights), ("input_activations", inputs)):
        if not isinstance(part, (dict, NoneType)):
            refuse(f"quantization_config: {name}", part, "an object")
    form, kind = group.get("format") or raw.get("format"), (weights.get("type", "float"), weights.get("num_bits"))
    if kind in (("float", 4), ("int", 8)):
        read = _read_fp4 if kind == ("float", 4) else _read_int8
        return read(weights, inputs, form)
    if weights.get("type", "float") == "int":
        return _read_packed(weights, inputs, form)
    for name, part in (("weights", weights), ("input_activations", inputs)):
        part = part or {}
        _option(part.get("num_bits"), f"{name}.num_bits", 8)
        _option(part.get("type", "float"), f"{name}.type", "float")
    assert inputs is not None
    kind = _option(weights.get("strategy"), "weights.strategy", "tensor", "channel", "block")
    if kind == "block":
        _option(weights.get("block_structure"), "weights.block_structure", _BLOCK)
    static = not inputs.get("dynamic", False)
    strategy = inputs.get("strategy")
    _option(strategy, "input_activations.strategy", *(("tensor",) if static else ("token", "tensor", "group")))
    return Quantization("fp8", kind, static)


def _targets(group: dict[str, Any]) -> list[str]:
    """Names of the modules of one of the config_groups."""
    targets = group.get("targets", ["Linear"])
    if not targets:
        refuse("quantization_config: targets", targets, "a list of names")
    return ALL if "Linear" in _names(targets, "targets") else targets


def _group_size(value: Any, path: str = "") -> int:
    """Columns of a group; 0 for -1 and None: whole rows."""
    if value in (None, -1):
        return 0
    if type(value) is not int or (value not in (32, 64) and (value < 128 or value % 128)):
        refuse(f"quantization_config: {path}group_size", value, "-1, 32, 64 or a multiple of 128")
    return value


def _read_awq(raw: dict[str, Any]) -> list[Rule]:
    """quant_method "awq", as AutoAWQ writes it."""
    _option(raw.get("bits"), "bits", 4)
    _option(str(raw.get("version", "gemm")).lower(), "version", "gemm")
    _option(raw.get("zero_point", True), "zero_point", True)
    found = Quantization("int4", layout="awq", group=_group_size(raw.get("group_size")), has_zeros=True)
    return _all_but(raw.get("modules_to_not_convert") or [], found)


def _read_gptq(raw: dict[str, Any]) -> list[Rule]:
    """quant_method "gptq", as AutoGPTQ and GPTQModel write it."""
    _option(raw.get("bits"), "bits", 4)
    group = _group_size(raw.get("group_size"))
    if group:  # else all columns are in one, in any order
        _option(raw.get("desc_act", False), "desc_act", False)
    _option(raw.get("lm_head", False), "lm_head", False, True)
    layout = _option(raw.get("checkpoint_format", "gptq"), "checkpoint_format", "gptq", "gptq_v2")
    dynamic = raw.get("dynamic") or {}
    known = isinstance(dynamic, dict) and all(
        name.startswith("-:") or (isinstance(of, dict) and of.items() <= raw.items()) for name, of in dynamic.items()
    )
    if not known:
        refuse("quantization_config: dynamic", dynamic, "an object of patterns that begin with '-:'")
    wide = [f"re:{name.removeprefix('-:')}" for name in dynamic if name.startswith("-:")]
    found = Quantization("int4", layout=layout, group=group, has_zeros=True)
    return _all_but(wide + _beside_named(raw), found)


def _beside_named(raw: dict[str, Any]) -> list[str]:
    """Pattern of what is not quantised where modules_in_block_to_quantize names the modules of a layer that are."""
    named = raw.get("modules_in_block_to_quantize") or []
    lists = [one if isinstance(one, list) else [one] for one in named] if isinstance(named, list) else [[named]]
    flat = [name for names in lists for name in names]
    if not isinstance(named, list) or not all(isinstance(name, str) for name in flat):
        refuse("quantization_config: modules_in_block_to_quantize", named, "a list of names, or of lists of them")
    return [rf"re:(?:.*\.)?layers\.\d+\.(?!(?:{'|'.join(map(re.escape, flat))})$)"] if flat else []


_OF_EXPRESSIONS = set("*+?^$()[]{}|\\")
"""Characters that make a name of AutoRound's extra_config a regular expression, found anywhere in a module's."""
_AUTO_ROUND = {"auto_round": "gptq_v2", "auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""AutoRound's packing_format -> the layout of others that it is; its own has the zeros as they are."""


def _read_auto_round(raw: dict[str, Any]) -> list[Rule]:
    """quant_method "auto-round"."""
    _option(raw.get("bits"), "bits", 4)
    _option(raw.get("data_type", "int"), "data_type", "int")
    _option(raw.get("act_bits", 16), "act_bits", 16, None)
    layout = _AUTO_ROUND[_option(raw.get("packing_format", "auto_round"), "packing_format", *_AUTO_ROUND)]
    others = raw.get("extra_config") or {}
    if not isinstance(others, dict) or not all(isinstance(one, dict) for one in others.values()):
        refuse("quantization_config: extra_config", others, "an object of objects")
    for name, one in others.items():
        _option(one.get("bits"), f"extra_config: {name}: bits", 16)
    names = [f"re:.*(?:{name})" if _OF_EXPRESSIONS & {*name} else name for name in others]
    found = Quantization("int4", layout=layout, group=_group_size(raw.get("group_size")), has_zeros=True)
    return _all_but(names + _beside_named(raw), found)


def _read_packed(weights: dict[str, Any], inputs: dict[str, Any] | None, form: Any) -> Quantization:
    """The weights and input_activations of a group of compressed-tensors, of integers, and its format."""
    _option(weights.get("num_bits"), "weights.num_bits", 4)
    if inputs is not None:
        refuse("quantization_config: input_activations", inputs, "absent beside weights of integers")
    _option(form, "format", "pack-quantized")
    _option(weights.get("dynamic", False), "weights.dynamic", False)
    _option(weights.get("actorder"), "weights.actorder", None, "weight", "static")
    strategy = _option(weights.get("strategy", "group"), "weights.strategy", "group", "channel")
    group = _group_size(weights.get("group_size") if strategy == "group" else None, "weights.")
    symmetric = _option(weights.get("symmetric", True), "weights.symmetric", True, False)
    return Quantization("int4", layout="compressed-tensors", group=group, has_zeros=not symmetric)


_FP4 = {"nvfp4-pack-quantized": ("nvfp4", _NV_GROUP), "mxfp4-pack-quantized": ("mxfp4", _MX_GROUP)}
"""Formats of compressed-tensors of 4-bit floats, and the columns of a group."""


def _read_fp4(weights: dict[str, Any], inputs: dict[str, Any] | None, form: Any) -> Quantization:
    """Same as _read_packed, of 4-bit floats."""
    method, group = _FP4[_option(form, "format", *_FP4)]
    for name, wanted in (("group_size", group), ("symmetric", True), ("dynamic", False)):
        _option(weights.get(name, wanted), f"weights.{name}", wanted)
    _keep_wide(method, inputs)
    return Quantization(method, layout="compressed-tensors", group=group)


def _read_int8(weights: dict[str, Any], inputs: dict[str, Any] | None, form: Any) -> Quantization:
    """Same as _read_packed, of integers of 8 bits."""
    _option(form, "format", "pack-quantized", "int-quantized")
    for name, wanted in (("symmetric", True), ("dynamic", False)):
        _option(weights.get(name, wanted), f"weights.{name}", wanted)
    _option(weights.get("actorder"), "weights.actorder", None, "weight", "static")
    in_groups = _option(weights.get("strategy"), "weights.strategy", "channel", "group") == "group"
    group = _option(weights.get("group_size"), "weights.group_size", _INT8_GROUP) if in_groups else 0
    _keep_wide("int8", inputs)
    return Quantization("int8", layout=form, group=group)


_NVFP4 = Quantization("nvfp4", layout="modelopt", group=_NV_GROUP)
_ALGORITHMS = {
    "NVFP4": _NVFP4, "W4A16_NVFP4": _NVFP4, "FP8": Quantization("fp8", "tensor", static_inputs=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Quantization("fp8", "channel"),
}  # fmt: skip
"""Algorithms of ModelOpt."""


def _read_modelopt(raw: dict[str, Any]) -> list[Rule]:
    """quant_method "modelopt": in config.json, or as hf_quant_config.json has it, below "quantization"."""
    whole = raw.get("quantization") or raw
    if not isinstance(whole, dict):
        refuse("quantization_config: quantization", whole, "an object")
    by_module = whole.get("quantized_layers") or {}
    if whole.get("quant_algo") != "MIXED_PRECISION":
        by_module = {"": whole}
    elif not isinstance(by_module, dict) or not by_module or not all(isinstance(x, dict) for x in by_module.values()):
        refuse("quantization_config: quantized_layers", by_module, "an object of objects")
    rules: dict[Quantization, list[str]] = {}
    for module, one in by_module.items():
        if (method := one.get("quant_algo")) not in _ALGORITHMS:
            refuse("quantization_config: quant_algo", method, f"one of {', '.join(_ALGORITHMS)} ({_INSTEAD})")
        if _ALGORITHMS[method].group:
            _option(one.get("group_size", _NV_GROUP), "group_size", _NV_GROUP)
        rules.setdefault(_ALGORITHMS[method], []).append(module or ALL[0])
        if module.rpartition(".")[2] == "lm_head" and _ALGORITHMS[method] != _NVFP4:
            refuse("quantization_config: quantized_layers: lm_head", method, "NVFP4, or absent")
    algorithm, fp8 = whole.get("kv_cache_quant_algo"), {"type": "float", "num_bits": 8}
    _check_cache(whole.get("kv_cache_scheme") or (fp8 if algorithm == "FP8" else algorithm))
    _keep_wide("nvfp4", any(one.get("quant_algo") == "NVFP4" for one in by_module.values()))
    wide = _names(whole.get("exclude_modules") or whole.get("ignore") or [], "modules that are not converted")
    return [(None, wide), *rules.items()]


def _read_mxfp4(raw: dict[str, Any]) -> list[Rule]:
    """quant_method "mxfp4", of gpt-oss: of experts alone."""
    return _all_but(raw.get("modules_to_not_convert") or [], Quantization("mxfp4", group=_MX_GROUP))


METHODS: dict[str, Callable[[dict[str, Any]], list[Rule]]] = {
    "fp8": _read_fp8, "compressed-tensors": _read_compressed, "awq": _read_awq, "gptq": _read_gptq,
    "auto-round": _read_auto_round, "modelopt": _read_modelopt, "mxfp4": _read_mxfp4,
}  # fmt: skip
"""Readers of a quantization_config by its quant_method."""


def _without_nulls(value: Any) -> Any:
    """Entries that are null count as absent, as in config.json."""
    return {k: _without_nulls(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def read_quantization(raw: dict[str, Any] | None, wanted: str | None, moe: MoEConfig | None = None) -> list[Rule]:
    """Returns how the weights are quantised; no rules: not at all. raw: config.json's quantization_config; wanted:
    EngineConfig.quantization; moe: the model's. Raises ValueError for what is not served."""
    has_mxfp4 = moe is not None and moe.layout == "transposed"
    if raw is None:
        group = {"int4": _INT4_GROUP, "mxfp4": _MX_GROUP}.get(wanted or "", 0)
        layout = "compressed-tensors" if wanted == "mxfp4" and not has_mxfp4 else ""
        return [] if wanted is None else [(Quantization(wanted, while_loading=True, layout=layout, group=group), ALL)]
    known, raw = [name for name in METHODS if has_mxfp4 or name != "mxfp4"], _without_nulls(raw)
    if not isinstance(raw, dict) or raw.get("quant_method", "mxfp4" if has_mxfp4 else None) not in known:
        named = " or ".join(map(repr, known))
        refuse("quantization_config", raw, f"absent, or with quant_method {named} ({_INSTEAD})")
    rules = METHODS[raw.get("quant_method", "mxfp4")](raw)
    methods = sorted({found.method for found, _ in rules if found is not None})
    if wanted is not None and methods != [wanted]:
        refuse("quantization", wanted, f"None or {', '.join(map(repr, methods))}, as the checkpoint has it")
    return rules
