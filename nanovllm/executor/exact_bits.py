"""Options and devices for which EngineConfig.exact_bits cannot be promised, by name."""

from collections.abc import Iterator
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.kernels.plan.order import leaves_of
from nanovllm.model_config import ModelConfig

CAPABILITY = (9, 0)
"""Compute capability of the GPUs whose tensor cores were measured."""

_UNSET = {"kernel_choices": None, "quantization": None, "kv_cache_dtype": "auto", "lm_head_dtype": "auto"}
"""Options that must have their defaults."""

Rule = tuple[Any, str, Any, str]
"""Whether it is broken; by which option, that one's value, and the bound."""


def rules_of_exact_bits(config: EngineConfig, model: ModelConfig, capability: tuple[int, int]) -> Iterator[Rule]:
    """Rules for options, of a resolved `config`, and properties of the model and of a GPU of this compute capability,
    without which exact_bits would be broken."""
    if config.exact_bits is not None:
        for is_broken, option, value, bound in _rules(config, model, capability):
            yield is_broken, option, value, f"{bound} with exact_bits={config.exact_bits!r}"


def _rules(config: EngineConfig, model: ModelConfig, capability: tuple[int, int]) -> Iterator[Rule]:
    on_cpu = config.device == "cpu"
    backends, given = ("auto", "torch" if on_cpu else "triton"), config.attention_backend
    yield given not in backends, "attention_backend", given, " or ".join(map(repr, backends))
    yield model.implementation == "transformers", "model_impl", config.model_impl, "of a model that our layers have"
    is_other = any(layer.mixer != "attention" or layer.mlp not in ("dense", "moe") for layer in model.layers)
    yield is_other, "model", config.model, "without mixers and MLPs that its family alone has"
    for option, default in _UNSET.items():
        yield (given := getattr(config, option)) != default, option, given, repr(default)
    is_rounded = config.speculation is not None and config.speculation.quantization is not None
    yield is_rounded, "speculative_config: quantization", "fp8", "None"
    quantized = [held for layer in model.layers for held in layer.formats]
    is_packed = any(one.method != "mxfp4" or one.layout for one in quantized)  # of gpt-oss experts alone are in 4 bits
    yield is_packed, "model", config.model, "a checkpoint that is not quantised"
    for name in ("fused_kernels", "gemm_kernels"):
        yield not config.uses(name), "disable", name, "left on"
    if not on_cpu:
        yield config.dtype == "float32", "dtype", config.dtype, "'bfloat16' or 'float16' on a GPU"
        found = "compute capability {}.{}".format(*capability)
        yield capability != CAPABILITY, "device", found, "9.0, whose tensor cores were measured,"
    if config.exact_bits == "tp":
        yield from _rules_of_tree(config, model)


def _rules_of_tree(config: EngineConfig, model: ModelConfig) -> Iterator[Rule]:
    size = config.tensor_parallel_size
    yield model.moe is not None, "model", config.model, "without experts"
    yield size not in (1, 2, 4, 8), "tensor_parallel_size", size, "1, 2, 4 or 8"
    for width in {(layer.num_heads or model.num_attention_heads) * layer.head_dim for layer in model.layers}:
        most = leaves_of(width)
        yield most < size, "tensor_parallel_size", size, f"at most {most} for {width} inputs of o_proj"
    for name in ("o_bias", "mlp_bias", "attention_gate"):
        yield getattr(model, name), "model", config.model, f"without {name}"
    yield model.norm_placement == "parallel", "model", config.model, "without parallel blocks"
    yield model.qk_norm == "width", "model", config.model, "without a norm over all heads"
