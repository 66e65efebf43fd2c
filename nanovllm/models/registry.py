"""The families by the name in a checkpoint's `architectures`, and the reading of a model folder's configuration.

No torch: the host reads a configuration before torch is imported.
"""

import logging
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.errors import refuse
from nanovllm.model_config import FP8_WHILE_LOADING, ModelConfig, Quantization
from nanovllm.models import families
from nanovllm.models.config_reader import CHANGES_RESULT, ConfigReader, check_overrides
from nanovllm.models.family import Family
from nanovllm.models.files import (
    CONFIGURATION,
    MODELOPT,
    TEXTS,
    WEIGHTS,
    check_configuration,
    check_tokenizer,
    check_weights,
    fetch,
    names_hub,
    read_json,
)
from nanovllm.models.names import CheckpointNames
from nanovllm.models.plugins import load_plugins
from nanovllm.models.pooling import read_pooling
from nanovllm.models.published import PUBLISHED_SHAPES
from nanovllm.models.quantization import read_quantization
from nanovllm.models.quantized_modules import quantized_layers, settled
from nanovllm.models.unserved import refuse_unserved, takes_more_than_text, unserved_parts
from nanovllm.models.wrappers import WRAPPERS, text_of, wrapped

logger = logging.getLogger(__name__)

FAMILIES: dict[str, Family] = {
    name: family
    for module in iter_modules(families.__path__, f"{families.__name__}.")
    for name, family in import_module(module.name).FAMILIES.items()
}
"""Families by the name in `architectures`."""

_OF_WHOLE = ("tie_word_embeddings", "eos_token_id", "quantization_config")
"""Entries of config.json that win over those of its nested model, as in transformers."""
_WITH_LATENTS = {"attention_backend": ("auto", "torch", "triton"), "kv_cache_dtype": ("auto",)}
"""Options of models with latent attention, and values that they may have."""


def register_model(architecture: str, family: Family) -> None:
    """Makes checkpoints served whose config.json names `architecture`; what was registered under that name goes. To be
    called by a file that EngineConfig.plugins names, which every process of an engine runs."""
    FAMILIES[architecture] = family


def family(architecture: str) -> Family:
    """Raises ValueError for an architecture that is not here."""
    if architecture not in [*FAMILIES]:  # which takes what has no hash
        refuse("architectures", architecture, "one of those that docs/models.md lists")
    return FAMILIES[architecture]


def parse_config(
    raw: dict[str, Any], generation: dict[str, Any] | None = None, quantization: str | None = None,
    overrides: dict[str, Any] | None = None,
) -> ModelConfig:  # fmt: skip
    """`raw`: config.json, whose `text_config`, where it has one, is the language model's; `generation`:
    generation_config.json, whose end-of-text ids win; `quantization`, `overrides`: of EngineConfig. Raises ValueError
    naming what is wrong or not served."""
    given, there, overrides = raw, _text_config(raw), overrides or {}
    raw, generation = override(raw, generation or {}, overrides)
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        refuse("architectures", architectures, "exactly one architecture in config.json")
    architecture, wrapper = architectures[0], None
    defaults: dict[str, Any] = {}
    if architecture in [*WRAPPERS]:
        wrapper = architecture
        architecture, defaults = text_of(wrapper, given)
    found = family(architecture)
    names = wrapped(found.names, wrapper)
    config = ConfigReader({**found.defaults, **defaults, **_text_config(raw)})
    fields = found.read(config, generation)
    written = config.get("quantization_config", config.get("compression_config"))  # llm-compressor's older name
    rules = read_quantization(written, quantization, fields.get("moe"))
    if rules:
        fields["layers"] = quantized_layers(fields, settled(rules, fields, names), names)
    config.finish()
    check_overrides(_text_config(overrides), {*there, *found.defaults, *config.was_read, *CHANGES_RESULT})
    return ModelConfig(architecture=architecture, wrapper=wrapper, **fields)


def names_of(config: ModelConfig) -> CheckpointNames:
    """Spelling of the layers' tensors in the checkpoint of a model of ours. One without a head may hold the tensors of
    the decoder alone, by their names in there."""
    names = wrapped(family(config.architecture).names, config.wrapper)
    sharing = [index for index, spec in enumerate(config.layers) if spec.shares_keys]
    unused = [f"model.layers.{index}.self_attn.{part}" for index in sharing for part in ("k_", "v_")]
    if names.skips_next_layer:
        unused.append(f"model.layers.{len(config.layers)}.")
    names = replace(names, unused=(*names.unused, *unused))
    if config.pooling is None:
        return names
    return replace(names, may_lack=f"{names.of('model')}.", skipped=(*names.skipped, names.of("lm_head")))


def with_head(raw: dict[str, Any]) -> dict[str, Any]:
    """config.json of a decoder that was saved without its head, as that of the model with it."""
    named = raw.get("architectures")
    whole = [name.removesuffix("Model") + "ForCausalLM" for name in named] if isinstance(named, list) else []
    return {**raw, "architectures": whole} if whole and whole[0] in FAMILIES else raw


def _text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The entries of a nested language model in place of the outer ones, but `architectures`."""
    nested = raw.get("text_config")
    if nested is None:
        return raw
    if not isinstance(nested, dict):
        refuse("text_config", nested, "a dict")
    outer = {name: value for name, value in raw.items() if name != "text_config"}
    return {**outer, **nested, "architectures": raw.get("architectures")}


def read_model_config(config: EngineConfig) -> ModelConfig:
    """The model's configuration from its folder (or, for dummy weights, from its published name), with hf_overrides.
    Raises ValueError where the ranks of one replica cannot share it."""
    load_plugins(config.plugins)
    folder = Path(config.model)
    generation: dict[str, Any] = {}
    if _is_published(config):
        raw = PUBLISHED_SHAPES[config.model]
    else:
        raw = read_json(folder / "config.json")
        if (folder / "generation_config.json").is_file():
            generation = read_json(folder / "generation_config.json")
        if raw.get("quantization_config") is None and (folder / MODELOPT).is_file():
            raw["quantization_config"] = {"quant_method": "modelopt", **read_json(folder / MODELOPT)}
    pooling = read_pooling(folder, config.runner)
    if pooling is not None:
        raw = with_head(raw)
    if _is_for_transformers(raw, config):
        if config.quantization is not None:
            refuse("quantization", config.quantization, "None where transformers computes the model (model_impl)")
        if pooling is not None:
            refuse("runner", "pooling", "'generate' where transformers computes the model (model_impl)")
        from nanovllm.models.transformers_model import read_transformers_config

        found = read_transformers_config(raw, generation, _rope_spelt_as_in(raw, config.hf_overrides))
    else:
        found = parse_config(raw, generation, config.quantization, config.hf_overrides)
    if pooling is not None:  # the head is not needed
        found = replace(found, pooling=pooling, tie_word_embeddings=True)
    if config.lm_head_dtype != "auto":
        found = replace(found, head_precision=_head_precision(found))
    mixers = {layer.mixer for layer in found.layers}
    stateless = {"attention", "latent"}
    needs = ("num_state_lines", None, stateless), ("state_dtype", "float32", stateless | {"conv"})
    for name, default, others in needs:
        if (given := getattr(config, name)) != default and mixers <= others:  # "conv": it keeps inputs alone
            refuse(name, given, f"{default!r} for a model without recurrent states")
    for name, known in _WITH_LATENTS.items():
        if "latent" in mixers and (given := getattr(config, name)) not in known:
            refuse(name, given, f"{' or '.join(map(repr, known))} for a model with latent attention")
    found = replace(found, state_dtype=config.state_dtype)
    found.check_tensor_parallel(config.tensor_parallel_size)
    return found


def _head_precision(found: ModelConfig) -> Quantization:
    """Quantisation of the output head under lm_head_dtype="fp8". Raises ValueError if the head cannot be quantised by
    itself."""
    if found.implementation == "transformers":
        refuse("lm_head_dtype", "fp8", "'auto' where transformers computes the model (model_impl)")
    if found.tie_word_embeddings:
        refuse("lm_head_dtype", "fp8", f"'auto' for {found.architecture}, whose head is the embedding's weight")
    return FP8_WHILE_LOADING


def _is_for_transformers(raw: dict[str, Any], config: EngineConfig) -> bool:
    """Whether transformers' own module computes the model: where it is asked for, and for an architecture that is not
    here but there. Raises ValueError for one that neither can compute here, and says why."""
    whole = {**raw, **config.hf_overrides}
    names = whole.get("architectures")
    if isinstance(names, list) and names and names[0] not in [*FAMILIES, *WRAPPERS]:  # which takes what has no hash
        text = _text_config(whole)
        if parts := unserved_parts(text):
            refuse_unserved(names[0], parts)
        from nanovllm.models.transformers_model import is_known

        if is_known(whole):
            if config.model_impl == "auto":
                logger.warning("%s is unknown here: transformers computes it, which is slow (model_impl)", names[0])
                return True
        elif takes_more_than_text(text):
            refuse_unserved(names[0], "takes images or sound, and there is no reader of its text")
    elif config.model_impl == "transformers" and (parts := unserved_parts(_text_config(whole))):
        refuse("model_impl", "transformers", f"'auto' or 'native' for a model that {parts}")
    return config.model_impl == "transformers"


def override(
    raw: dict[str, Any], generation: dict[str, Any], overrides: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json with `overrides` in force, whichever spelling the files use."""
    whole = {name: raw[name] for name in _OF_WHOLE if raw.get(name) is not None}
    if "text_config" in raw and (dtype := raw.get("dtype") or raw.get("torch_dtype")):
        whole["dtype"] = dtype
    raw = _text_config(raw) | whole
    overrides = _rope_spelt_as_in(raw, overrides)
    generation = {name: value for name, value in generation.items() if name not in overrides}
    return {**raw, **overrides}, generation


def _rope_spelt_as_in(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`overrides` with what they say of rotary embeddings as config.json says it: in rope_parameters, or apart."""
    rope = raw.get("rope_parameters") or {}
    if "rope_parameters" in overrides:
        return {"rope_scaling": None, **overrides}
    if not rope or not overrides.keys() & {"rope_theta", "rope_scaling"}:
        return overrides
    if any(isinstance(table, dict) for table in rope.values()):
        refuse("hf_overrides", overrides, "given rope_parameters, for the model has a table by kind of layer")
    theta = {name: value for name, value in {**rope, **overrides}.items() if name == "rope_theta"}
    rope = overrides["rope_scaling"] or {} if "rope_scaling" in overrides else raw.get("rope_scaling") or rope
    return {**overrides, "rope_scaling": None, "rope_parameters": {**rope, **theta}}


def is_hub_id(config: EngineConfig) -> bool:
    """Whether the model's files are the hub's. Raises ValueError for a file, and FileNotFoundError where there is no
    such folder either."""
    return not _is_published(config) and names_hub("model", config.model)


def _is_published(config: EngineConfig) -> bool:
    return config.load_format == "dummy" and config.model in PUBLISHED_SHAPES and not Path(config.model).is_dir()


def resolve_model_folder(config: EngineConfig) -> EngineConfig:
    """Replaces a hub id by the local folder of its files, downloaded where they are not there yet: the configuration
    first, and the rest of a model that is served. Raises FileNotFoundError or ValueError where files are missing, or
    are of a kind that is not read."""
    named, weights = config.model, WEIGHTS if config.load_format == "auto" else ()
    if is_hub_id(config):
        first = fetch(named, CONFIGURATION, config.revision, config.download_dir)
        check_configuration(named, Path(first))
        read_model_config(replace(config, model=first))
        folder = fetch(named, (*TEXTS, *weights), config.revision, config.download_dir)
        config = replace(config, model=folder, tokenizer=config.tokenizer or folder)
    here, tokenizer = Path(config.model), config.tokenizer or config.model
    if here.is_dir():
        check_configuration(named, here)
    if not config.skip_tokenizer_init and not names_hub("tokenizer", tokenizer):
        check_tokenizer("tokenizer" if config.tokenizer else "model", Path(tokenizer))
    if here.is_dir() and weights:
        check_weights(named, here)
    drafter = None if config.speculation is None else config.speculation.model
    if drafter is not None and names_hub("speculative_config: model", drafter):
        folder = fetch(drafter, ("config.json", *weights), None, config.download_dir)
        config = replace(config, speculative_config={**(config.speculative_config or {}), "model": folder})
    return config
