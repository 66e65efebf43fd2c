"""Reading of `quantization_config`: how a checkpoint's weights are quantised, and which of that is served. No torch."""

import fnmatch
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import NoneType
from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import LatentSizes, LayerSpec, MoEConfig, Quantization
from nanovllm.models.names import CheckpointNames

logger = logging.getLogger(__name__)

PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Parts that are quantised together (LayerSpec.wide) -> their modules in a layer."""
_OF_MIXERS: dict[str, dict[str, tuple[str, ...]]] = {
    "delta": {"qkv": tuple(f"linear_attn.in_proj_{name}" for name in "qkvz"), "o": ("linear_attn.out_proj",)},
    "conv": {"qkv": ("conv.in_proj",), "o": ("conv.out_proj",)},
    "mamba": {"qkv": ("mamba.in_proj",), "o": ("mamba.out_proj",)},
    "latent": {
        "qkv": tuple(f"self_attn.{name}" for name in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"))
    },
}
"""Parts of other mixers. Gates of delta nets are never quantised."""
_KV_B = "model.layers.0.self_attn.kv_b_proj"
"""Projection of latents to keys and values, which is held wide (models/widened.py)."""
_OF_LAYER_INPUTS = (
    "model.layers.0.per_layer_input_gate", "model.layers.0.per_layer_projection", "model.per_layer_model_projection",
)  # fmt: skip
"""Products of layers/layer_inputs.py, as checkpoints name them; the first layer stands for all."""
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


def _read_fp8(raw: dict[str, Any]) -> tuple[Quantization, list[str]]:
    """quant_method "fp8"."""
    _option(raw.get("fmt", "e4m3"), "fmt", "e4m3", "float8_e4m3fn")
    if _option(raw.get("scale_fmt"), "scale_fmt", None, "float", "ue8m0") == "ue8m0":  # of weights they are float32
        logger.warning("fp8: scales of activations are not rounded to powers of two here (scale_fmt)")
    static = _option(raw.get("activation_scheme", "dynamic"), "activation_scheme", "dynamic", "static") == "static"
    block = _option(raw.get("weight_block_size"), "weight_block_size", None, _BLOCK)
    wide = raw.get("modules_to_not_convert") or raw.get("ignored_layers") or []
    return Quantization("fp8", "block" if block else "tensor", static), wide


def _read_compressed(raw: dict[str, Any]) -> tuple[Quantization, list[str]]:
    """quant_method "compressed-tensors"."""
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not all(isinstance(one, dict) for one in groups.values()):
        refuse("quantization_config: config_groups", groups, "one group, an object")
    [group] = groups.values()
    _require_absent(raw, "transform_config")
    _require_absent(group, "output_activations")
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    for name, part in (("weights", weights), ("input_activations", inputs)):
        if not isinstance(part, (dict, NoneType)):
            refuse(f"quantization_config: {name}", part, "an object")
    ignored = raw.get("ignore") or []
    if isinstance(ignored, list):
        ignored = ignored + _beside_targets(group.get("targets", ["Linear"]))
    form, kind = group.get("format") or raw.get("format"), (weights.get("type", "float"), weights.get("num_bits"))
    if kind in (("float", 4), ("int", 8)):
        _check_cache(raw.get("kv_cache_scheme"))
        read = _read_fp4 if kind == ("float", 4) else _read_int8
        return read(weights, inputs, form), ignored
    _require_absent(raw, "kv_cache_scheme")
    if weights.get("type", "float") == "int":
        return _read_packed(weights, inputs, form), ignored
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
    return Quantization("fp8", kind, static), ignored


def _beside_targets(targets: Any) -> list[str]:
    """Pattern of what is not quantised where a group's targets are modules by name or expression, and not all."""
    if not isinstance(targets, list) or not targets or not all(isinstance(one, str) for one in targets):
        refuse("quantization_config: targets", targets, "a list of names")
    if "Linear" in targets:
        return []
    wanted = (one.removeprefix("re:") if one.startswith("re:") else f"{re.escape(one)}$" for one in targets)
    return [f"re:(?!{'|'.join(f'(?:{one})' for one in wanted)})"]


def _group_size(value: Any, path: str = "") -> int:
    """Columns of a group; 0 for -1 and None: whole rows."""
    if value in (None, -1):
        return 0
    if type(value) is not int or (value not in (32, 64) and (value < 128 or value % 128)):
        refuse(f"quantization_config: {path}group_size", value, "-1, 32, 64 or a multiple of 128")
    return value


def _read_awq(raw: dict[str, Any]) -> tuple[Quantization, list[str]]:
    """quant_method "awq", as AutoAWQ writes it."""
    _option(raw.get("bits"), "bits", 4)
    _option(str(raw.get("version", "gemm")).lower(), "version", "gemm")
    _option(raw.get("zero_point", True), "zero_point", True)
    found = Quantization("int4", layout="awq", group=_group_size(raw.get("group_size")), has_zeros=True)
    return found, raw.get("modules_to_not_convert") or []


def _read_gptq(raw: dict[str, Any]) -> tuple[Quantization, list[str]]:
    """quant_method "gptq", as AutoGPTQ and GPTQModel write it."""
    _option(raw.get("bits"), "bits", 4)
    for name in ("desc_act", "lm_head"):
        _option(raw.get(name, False), name, False)
    layout = _option(raw.get("checkpoint_format", "gptq"), "checkpoint_format", "gptq", "gptq_v2")
    dynamic = raw.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(name.startswith("-:") for name in dynamic):
        refuse("quantization_config: dynamic", dynamic, "an object of patterns that begin with '-:'")
    wide = [f"re:{name.removeprefix('-:')}" for name in dynamic]
    found = Quantization("int4", layout=layout, group=_group_size(raw.get("group_size")), has_zeros=True)
    return found, wide + _beside_named(raw)


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


def _read_auto_round(raw: dict[str, Any]) -> tuple[Quantization, list[str]]:
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
    return found, names + _beside_named(raw)


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


def _read_modelopt(raw: dict[str, Any]) -> tuple[Quantization, list[str]]:
    """quant_method "modelopt": in config.json, or as hf_quant_config.json has it, below "quantization"."""
    found = raw.get("quantization") or raw
    if not isinstance(found, dict):
        refuse("quantization_config: quantization", found, "an object")
    if (method := found.get("quant_algo")) not in ("NVFP4", "W4A16_NVFP4"):
        refuse("quantization_config: quant_algo", method, f"'NVFP4' or 'W4A16_NVFP4' ({_INSTEAD})")
    _option(found.get("group_size", _NV_GROUP), "group_size", _NV_GROUP)
    algorithm, fp8 = found.get("kv_cache_quant_algo"), {"type": "float", "num_bits": 8}
    _check_cache(found.get("kv_cache_scheme") or (fp8 if algorithm == "FP8" else algorithm))
    _keep_wide("nvfp4", method == "NVFP4")
    names = found.get("exclude_modules") or found.get("ignore") or []
    return Quantization("nvfp4", layout="modelopt", group=_NV_GROUP), names


def _read_mxfp4(raw: dict[str, Any]) -> tuple[Quantization, list[str]]:
    """quant_method "mxfp4", of gpt-oss: of experts alone."""
    return Quantization("mxfp4", group=_MX_GROUP), raw.get("modules_to_not_convert") or []


METHODS: dict[str, Callable[[dict[str, Any]], tuple[Quantization, list[str]]]] = {
    "fp8": _read_fp8, "compressed-tensors": _read_compressed, "awq": _read_awq, "gptq": _read_gptq,
    "auto-round": _read_auto_round, "modelopt": _read_modelopt, "mxfp4": _read_mxfp4,
}  # fmt: skip
"""Readers of a quantization_config by its quant_method: each returns how the weights are held, and the names of modules
that are not quantised."""


def read_quantization(
    raw: dict[str, Any] | None, wanted: str | None, moe: MoEConfig | None = None
) -> tuple[Quantization | None, list[str]]:
    """Returns how the weights are quantised (None: not at all), and the names of modules that are not. raw:
    config.json's quantization_config; wanted: EngineConfig.quantization; moe: the model's. Raises ValueError for what
    is not served."""
    has_mxfp4 = moe is not None and moe.layout == "transposed"
    if raw is None:
        group = {"int4": _INT4_GROUP, "mxfp4": _MX_GROUP}.get(wanted or "", 0)
        layout = "compressed-tensors" if wanted == "mxfp4" and not has_mxfp4 else ""
        made = Quantization(wanted, while_loading=True, layout=layout, group=group) if wanted is not None else None
        return made, []
    known = [name for name in METHODS if has_mxfp4 or name != "mxfp4"]
    if not isinstance(raw, dict) or raw.get("quant_method", "mxfp4" if has_mxfp4 else None) not in known:
        named = " or ".join(map(repr, known))
        refuse("quantization_config", raw, f"absent, or with quant_method {named} ({_INSTEAD})")
    found, names = METHODS[raw.get("quant_method", "mxfp4")](raw)
    if wanted is not None and wanted != found.method:
        refuse("quantization", wanted, f"None or {found.method!r}, as the checkpoint has it")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse("quantization_config: modules that are not converted", names, "a list of names")
    return found, names


class _Named:
    """Matcher of a list such as modules_to_not_convert or ignore: paths, whole parts of paths (a dot may end them),
    patterns ("re:...") that the beginning of a path matches, and such with "*" that match a module or one that it is
    in."""

    def __init__(self, names: list[str]) -> None:
        try:
            self._patterns = [re.compile(name.removeprefix("re:")) for name in names if name.startswith("re:")]
        except re.error as error:
            bound = f"paths, or patterns of Python's: {error}"
            refuse("quantization_config: modules that are not converted", names, bound)
        others = [name for name in names if not name.startswith("re:")]
        self._wild = [re.compile(fnmatch.translate(name)) for name in others if "*" in name]
        self._parts = {name.removesuffix(".") for name in others}

    def __contains__(self, module: str) -> bool:
        parts = module.split(".")
        ranges = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        is_wild = any(pattern.match(one) for pattern in self._wild for one in around)
        return is_wild or not self._parts.isdisjoint(ranges) or any(one.match(module) for one in self._patterns)


def _modules(layer: str, spec: LayerSpec, moe: MoEConfig | None) -> Iterator[tuple[str, list[str]]]:
    """Parts that LayerSpec.wide may name, each with its modules, of the layer with this path."""
    for part, modules in PARTS.items():
        own = _OF_MIXERS.get(spec.mixer, {}).get(part, modules)
        lacks = ("k_proj", "v_proj") if spec.shares_keys else ("v_proj",) if spec.values_are_keys else ()
        if isinstance(spec.options, LatentSizes):
            lacks = ("q_proj",) if spec.options.query_rank else ("q_a_proj", "q_b_proj")
        own = tuple(name for name in own if not name.endswith(lacks))
        of_mixer = part in ("qkv", "o")
        if (spec.mixer != "none") if of_mixer else spec.has_dense_mlp:
            yield part, [f"{layer}.{module}" for module in own]
    if spec.has_experts and moe is not None:
        names = ("gate_proj", "up_proj", "down_proj")
        yield "experts", [f"{layer}.mlp.experts.{i}.{name}" for i in range(moe.num_experts) for name in names]
        if moe.shared_size:
            shared = f"{layer}.mlp.{moe.shared_name}"
            yield "shared_gate_up", [f"{shared}.gate_proj", f"{shared}.up_proj"]
            yield "shared_down", [f"{shared}.down_proj"]
        if moe.latent_size:
            yield "latent", [f"{layer}.mlp.{name}_latent_proj" for name in ("fc1", "fc2")]


def quantized_layers(fields: dict[str, Any], found: Quantization, names: list[str], spelling: CheckpointNames) -> Any:
    """`layers` of a ModelConfig's `fields`, with what is quantised in each. Raises ValueError where a part of a matrix
    that we hold as one is quantised and another is not."""
    moe, layers = fields.get("moe"), []
    for prefix in (spelling.stripped, re.escape(spelling.stripped)):
        names = [name.replace(prefix, "") for name in names] if prefix else names
    named = _Named(names)
    wide_ones: tuple[str, ...] = _OF_LAYER_INPUTS if fields.get("layer_inputs") else ()
    if found.method != "fp8" and fields["layers"][0].mixer == "latent":
        wide_ones = (_KV_B,)
    if missing := [module for module in wide_ones if module not in named and not found.while_loading]:
        bound = f"a list that has {missing[0]} too: it is served unquantised alone"
        refuse("quantization_config: modules that are not converted", names[:3], bound)
    only_experts = found.method == "mxfp4" and (found.while_loading or not found.layout)
    for index, spec in enumerate(fields["layers"]):
        wide: set[str] = set()
        for part, modules in _modules(f"model.layers.{index}", spec, moe):
            spelt = {spelling.module(module) for module in modules}
            skipped = [module for module in sorted(spelt) if module in named]
            if 0 < len(skipped) < len(spelt):
                bound = f"all or none of {', '.join(sorted(spelt)[:3])}, which are one matrix here"
                refuse("quantization_config: modules that are not converted", skipped[0], bound)
            wide |= {part} if skipped or (only_experts and part != "experts") else set()
        layers.append(replace(spec, quantization=found, wide=frozenset(wide)))
    return tuple(layers)


def settled(found: Quantization, fields: dict[str, Any], spelling: CheckpointNames) -> Quantization:
    """`found` for a model's layers; raises ValueError where they cannot be quantised so. Scales that are made while
    loading are those of blocks, which the library multiplies fastest, if a checkpoint's rows are in our order."""
    moe = fields.get("moe")
    if found.method == "mxfp4" and moe is None and found.while_loading:
        refuse("quantization", "mxfp4", "of a model with experts, which alone are rounded")
    if found.method == "mxfp4" and not found.layout:
        return found
    if moe is not None and found.method != "fp8" and not found.while_loading and moe.layout in ("parameters", "turned"):
        moe = fields["moe"] = replace(moe, layout="experts")  # tools quantise modules, so each expert has its own
    if moe is not None and (moe.layout != "experts" or moe.bias or found.static_inputs):
        kinds = "experts that are stacked in the checkpoint, have a bias, or static scales of activations"
        raise ValueError(f"quantization={found.method!r}: not with {kinds}")
    if moe is not None and not moe.gated and found.method != "fp8":
        raise ValueError(f"quantization={found.method!r}: not with experts without gates")
    in_order = not fields.get("interleaved_rope") and not spelling.fused
    if found.scales == "block" and not in_order:
        raise ValueError("quantization_config: blocks of weights: not with fused projections or interleaved rope")
    if found.method == "fp8" and found.while_loading and in_order:
        return replace(found, scales="block")
    return found
