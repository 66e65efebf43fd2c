"""Match of the modules that `quantization_config` names with those of each layer: which are quantised, and how. No
torch."""

import fnmatch
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import LatentSizes, LayerSpec, MoEConfig, Quantization
from nanovllm.models.names import CheckpointNames

logger = logging.getLogger(__name__)

Rule = tuple[Quantization | None, list[str]]
"""Format of modules (None: they are not quantised), and their names. Of several rules the first that names a module
counts."""
ALL = ["re:"]
"""Names every module."""

PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Parts that are quantised together (LayerSpec.precision) -> their modules in a layer."""
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


class _Named:
    """Matcher of a list such as modules_to_not_convert or ignore: paths, whole parts of paths (a dot may end them),
    patterns ("re:...") that the beginning of a path matches, and such with "*" that match a module or one that it is
    in. Paths may have what is stripped of a checkpoint's names; patterns that speak of it match paths with it."""

    def __init__(self, names: list[str], stripped: str) -> None:
        self._stripped, self._stem = stripped, stripped.removesuffix(".")
        patterns = [name for name in names if name.startswith("re:")]
        try:
            self._patterns = [(self._is_nested(one), re.compile(one.removeprefix("re:"))) for one in patterns]
        except re.error as error:
            bound = f"paths, or patterns of Python's: {error}"
            refuse("quantization_config: modules that are not converted", names, bound)
        others = [name for name in names if not name.startswith("re:")]
        self._wild = [(self._is_nested(name), re.compile(fnmatch.translate(name))) for name in others if "*" in name]
        self._parts = {name.replace(stripped, "").removesuffix(".") for name in others}

    def __contains__(self, module: str) -> bool:
        ranges, around = _parts_of(module)
        is_wild = any(self._matches(*each, path) for each in self._wild for path in around)
        is_named = is_wild or not self._parts.isdisjoint(ranges)
        return is_named or any(self._matches(*each, module) for each in self._patterns)

    def _is_nested(self, pattern: str) -> bool:
        return bool(self._stem) and self._stem in pattern

    def _matches(self, is_nested: bool, pattern: re.Pattern[str], path: str) -> bool:
        """Whether it matches a path, or one as either nesting spells it."""
        nested = f"{self._stripped}{path}", path.replace("model.", f"model.{self._stripped}", 1)
        return any(map(pattern.match, nested if is_nested else [path]))


@lru_cache(1)
def _parts_of(module: str) -> tuple[list[str], list[str]]:
    """Paths of parts of this one that follow each other, and those of all modules that it is in."""
    parts = module.split(".")
    ranges = [".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
    return ranges, ranges[: len(parts)]


def _modules(layer: str, spec: LayerSpec, fields: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Parts of the layer with this path that LayerSpec.precision knows, each with its modules."""
    moe: MoEConfig | None = fields.get("moe")
    for part, modules in PARTS.items():
        found = _OF_MIXERS.get(spec.mixer, {}).get(part, modules)
        lacks = ("k_proj", "v_proj") if spec.shares_keys else ("v_proj",) if spec.values_are_keys else ()
        if isinstance(spec.options, LatentSizes):
            lacks = ("q_proj",) if spec.options.query_rank else ("q_a_proj", "q_b_proj")
        lacks = lacks if fields.get("gated_mlp", True) else (*lacks, "gate_proj")
        found = tuple(name for name in found if not name.endswith(lacks))
        of_mixer = part in ("qkv", "o")
        if (spec.mixer != "none") if of_mixer else spec.has_dense_mlp:
            yield part, [f"{layer}.{module}" for module in found]
    if spec.has_experts and moe is not None:
        gate_up = ["gate_proj", "up_proj"] if moe.gated else ["up_proj"]
        one = [f"experts.{i}.{name}" for i in range(moe.num_experts) for name in (*gate_up, "down_proj")]
        names = ["input_linear", "output_linear"] if moe.layout == "linears" else one
        yield "experts", [f"{layer}.mlp.{name}" for name in names]
        if moe.shared_size:
            shared = f"{layer}.mlp.{moe.shared_name}"
            yield "shared_gate_up", [f"{shared}.{name}" for name in gate_up]
            yield "shared_down", [f"{shared}.down_proj"]
        if moe.latent_size:
            yield "latent", [f"{layer}.mlp.{name}_latent_proj" for name in ("fc1", "fc2")]


def quantized_layers(fields: dict[str, Any], rules: list[Rule], spelling: CheckpointNames) -> tuple[LayerSpec, ...]:
    """`layers` of a ModelConfig's `fields`, with what is quantised in each. Raises ValueError where parts of a matrix
    that we hold as one are not held alike."""
    moe, layers, default, is_static = fields.get("moe"), [], rules[-1][0], False
    assert default is not None
    named = [(found, _Named(names, spelling.stripped)) for found, names in rules]

    def held(module: str) -> Quantization | None:
        return next((found for found, names in named if module in names), None)

    wide_ones: tuple[str, ...] = _OF_LAYER_INPUTS if fields.get("layer_inputs") else ()
    if fields["layers"][0].mixer == "latent" and (found := held(_KV_B)) is not None and found.method != "fp8":
        wide_ones = (_KV_B,)
    quantized = [module for module in wide_ones if held(module) is not None]
    if quantized and not default.while_loading:
        bound = f"a list that has {quantized[0]} too: it is served unquantised alone"
        refuse("quantization_config: modules that are not converted", rules[0][1][:3], bound)
    only_experts = default.method == "mxfp4" and (default.while_loading or not default.layout)
    for index, spec in enumerate(fields["layers"]):
        others = set[tuple[str, Quantization | None]]()
        for part, modules in _modules(f"model.layers.{index}", spec, fields):
            spelt = sorted({spelling.module(module) for module in modules}, reverse=True)
            kinds = {held(module): module for module in spelt}
            if len(kinds) > 1:
                one = kinds.get(None, [*kinds.values()][-1])
                bound = f"held as all of {', '.join(spelt[:-4:-1])}, which are one matrix here"
                refuse("quantization_config: modules that are not converted", one, bound)
            [how] = kinds
            if only_experts and part != "experts":
                how = None
            elif part == "experts" and how is not None:
                is_static = is_static or how.static_inputs
                how = _of_experts(how, moe)
            others |= {(part, how)} - {(part, default)}
        layers.append(replace(spec, quantization=default, others=frozenset(others)))
    if is_static:
        logger.warning("fp8: scales of experts' activations are unused: they are measured")
    return tuple(layers)


def _of_experts(found: Quantization, moe: MoEConfig | None) -> Quantization:
    """Format of experts that a checkpoint has in this one; raises ValueError where they cannot be held so. Scales of
    activations are measured, whatever the checkpoint has of them."""
    is_stack = found.method == "mxfp4" and not found.layout
    if not is_stack and moe is not None and (moe.layout not in ("experts", "linears") or moe.bias):
        raise ValueError(f"quantization={found.method!r}: not with experts that are stacked or have a bias")
    return replace(found, static_inputs=False)


def settled(rules: list[Rule], fields: dict[str, Any], spelling: CheckpointNames) -> list[Rule]:
    """`rules` for a model's layers; raises ValueError where they cannot be quantised so. Scales that are made while
    loading are those of blocks, which the library multiplies fastest, if a checkpoint's rows are in our order."""
    moe, made = fields.get("moe"), [found for found, _ in rules if found is not None]
    if made[-1].method == "mxfp4" and made[-1].while_loading and moe is None:
        refuse("quantization", "mxfp4", "of a model with experts, which alone are rounded")
    if made[-1].method == "mxfp4" and not made[-1].layout:
        return rules
    are_modules = any(found.method != "fp8" and not found.while_loading for found in made)
    if moe is not None and are_modules and moe.layout in ("parameters", "turned"):
        fields["moe"] = replace(moe, layout="experts")  # tools quantise modules, so each expert has its own
    in_order = not fields.get("interleaved_rope") and not spelling.fused
    if not in_order and any(found.scales == "block" for found in made):
        raise ValueError("quantization_config: blocks of weights: not with fused projections or interleaved rope")
    if made[-1].method == "fp8" and made[-1].while_loading and in_order:
        return [(found and replace(found, scales="block"), names) for found, names in rules]
    if len({(found.layout, found.group) for found in made if found.method == "int4"}) > 1:
        raise ValueError("quantization_config: integers of 4 bits in groups of several sizes: must be of one")
    return rules
