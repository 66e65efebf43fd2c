"""Options and devices for which EngineConfig.exact_bits cannot be promised, by name."""

from nanovllm.config import EngineConfig
from nanovllm.errors import refuse
from nanovllm.kernels.plan.order import leaves_of
from nanovllm.model_config import ModelConfig

CAPABILITY = (9, 0)
"""Compute capability of the GPUs whose tensor cores were measured."""


def check_exact_bits(config: EngineConfig, model: ModelConfig, capability: tuple[int, int]) -> None:
    """Raises ValueError naming the first option, of a resolved `config`, or property of the model or of a GPU of this
    compute capability that would break exact_bits."""
    if config.exact_bits is None:
        return
    where = f" with exact_bits={config.exact_bits!r}"
    on_cpu = config.device == "cpu"
    backends = ("auto", "torch") if on_cpu else ("auto", "triton")
    if config.attention_backend not in backends:
        refuse("attention_backend", config.attention_backend, " or ".join(map(repr, backends)) + where)
    if model.implementation == "transformers":
        refuse("model_impl", config.model_impl, "of a model that our layers have" + where)
    if any(layer.mixer != "attention" or layer.mlp not in ("dense", "moe") for layer in model.layers):
        refuse("model", config.model, "without mixers and MLPs that its family alone has" + where)
    for option in ("kernel_choices", "quantization"):
        if getattr(config, option) is not None:
            refuse(option, getattr(config, option), "None" + where)
    for option in ("kv_cache_dtype", "lm_head_dtype"):
        if getattr(config, option) != "auto":
            refuse(option, getattr(config, option), "'auto'" + where)
    quantized = [held for layer in model.layers for held in layer.formats]
    if any(one.method != "mxfp4" or one.layout for one in quantized):  # of gpt-oss experts alone are in 4 bits
        refuse("model", config.model, "a checkpoint that is not quantised" + where)
    for name in ("fused_kernels", "gemm_kernels"):
        if not config.uses(name):
            refuse("disable", name, "left on" + where)
    if not on_cpu:
        _check_gpu(config, capability, where)
    if config.exact_bits == "tp":
        _check_tree(config, model, where)


def _check_gpu(config: EngineConfig, found: tuple[int, int], where: str) -> None:
    if config.dtype == "float32":
        refuse("dtype", config.dtype, "'bfloat16' or 'float16' on a GPU" + where)
    if found != CAPABILITY:
        refuse("device", f"compute capability {found[0]}.{found[1]}", "9.0, whose tensor cores were measured," + where)


def _check_tree(config: EngineConfig, model: ModelConfig, where: str) -> None:
    if model.moe is not None:
        refuse("model", config.model, "without experts" + where)
    size = config.tensor_parallel_size
    if size not in (1, 2, 4, 8):
        refuse("tensor_parallel_size", size, "1, 2, 4 or 8" + where)
    for width in {(layer.num_heads or model.num_attention_heads) * layer.head_dim for layer in model.layers}:
        if (most := leaves_of(width)) < size:
            refuse("tensor_parallel_size", size, f"at most {most} for {width} inputs of o_proj" + where)
    for name in ("o_bias", "mlp_bias", "attention_gate"):
        if getattr(model, name):
            refuse("model", config.model, f"without {name}" + where)
    if model.norm_placement == "parallel":
        refuse("model", config.model, "without parallel blocks" + where)
    if model.qk_norm == "width":
        refuse("model", config.model, "without a norm over all heads" + where)
