"""vLLM's names and values of engine options: taken where they mean the same, refused with what takes their place.

Nothing is passed over in silence: what is taken and has no effect asks for what is done anyway. docs/from-vllm.md has
all of it.
"""

from collections.abc import Mapping
from typing import Any

from nanovllm.errors import plain, shown

RENAMED = {
    "block_size": "kvcache_block_size",
    "enable_sleep_mode": "enable_sleep",
    "mamba_ssm_cache_dtype": "state_dtype",
    "num_gpu_blocks_override": "num_kvcache_blocks",
}
"""Options by another name."""
VALUES: Mapping[str, Mapping[str, str]] = {
    "attention_backend": {"FLASH_ATTN": "flash", "TRITON_ATTN": "triton", "FLEX_ATTENTION": "flex"},
    "data_parallel_backend": {"mp": "local"},
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": {"safetensors": "auto"},
    "logprobs_mode": {"raw_logprobs": "raw", "processed_logprobs": "processed"},
    "model_impl": {"vllm": "native"},
}
"""Values by another name, of our options."""
FIXED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "async_scheduling": (("true",), "disable='async_scheduling' turns it off"),
    "compilation_config": ((), "torch.compile is not used; enforce_eager=True turns CUDA graphs off"),
    "config_format": (("auto", "hf"), "checkpoints need a config.json"),
    "cpu_offload_gb": (("0",), "weights stay on the GPUs; quantization='int4' makes them smaller"),
    "disable_cascade_attn": (("true",), "there is no cascade attention"),
    "disable_custom_all_reduce": (("false",), "disable='peer_all_reduce' uses NCCL"),
    "disable_hybrid_kv_cache_manager": (("false",), "disable='window_groups' keeps all tokens of layers with windows"),
    "disable_sliding_window": (("false",), "windows are part of the model"),
    "distributed_executor_backend": (("mp", "uni", "auto"), "data_parallel_backend='ray' places replicas on a cluster"),
    "enable_chunked_prefill": (("true",), "prompts are always chunked; see max_num_prefill_tokens_with_decodes"),
    "enable_expert_parallel": (("false",), "tensor_parallel_size shards every expert"),
    "enable_lora_bias": (("false",), "adapters have no biases"),
    "enable_prompt_embeds": (("false",), "prompts are texts or token ids"),
    "fully_sharded_loras": (("false",), "each rank has what belongs to its share of a layer"),
    "guided_decoding_backend": (("auto", "guidance"), "llguidance compiles grammars"),
    "kv_cache_memory_bytes": ((), "use num_kvcache_blocks or gpu_memory_utilization"),
    "kv_transfer_config": ((), "keys and values stay with the engine that computed them"),
    "lora_dtype": (("auto",), "adapters have the model's dtype, and their sums are float32"),
    "limit_mm_per_prompt": ((), "models take text only"),
    "max_cpu_loras": ((), "all adapters that are loaded stay in host memory until they are removed"),
    "max_seq_len_to_capture": (("*",), "CUDA graphs serve every length"),
    "pipeline_parallel_size": (("1",), "use tensor_parallel_size, and data_parallel_size for replicas"),
    "rope_scaling": ((), "use hf_overrides={'rope_scaling': ...}"),
    "rope_theta": ((), "use hf_overrides={'rope_theta': ...}"),
    "scheduling_policy": (("fcfs",), "there are no priorities"),
    "structured_outputs_config": ((), "llguidance compiles grammars and has no options"),
    "swap_space": (("0",), "KV is never swapped to the host; preempted requests are recomputed"),
    "task": (("auto", "generate"), "use runner"),
    "tokenizer_mode": (("auto", "hf"), "the tokenizer is the checkpoint's tokenizer.json"),
    "tokenizer_revision": ((), "the tokenizer has the model's revision; tokenizer=FOLDER replaces it"),
    "trust_remote_code": (
        ("false",),
        "code from a checkpoint is never run: the engine implements the families of docs/models.md itself, and chat "
        "templates run in a sandbox",
    ),
    **dict.fromkeys(("calculate_kv_scales", "disable_log_stats", "use_tqdm_on_load"), (("true", "false"), "")),
}
"""Options that are none here: values, as texts, that ask for what is done anyway ("*": all), and what to do instead of
others."""


def translated(
    options: Mapping[str, Any],
    fixed: Mapping[str, tuple[tuple[str, ...], str]] = FIXED,
    values: Mapping[str, Mapping[str, str]] = VALUES,
) -> dict[str, Any]:
    """Options by our names and with our values. Raises ValueError naming one that has no meaning here, and what takes
    its place."""
    ours: dict[str, Any] = {}
    for name, value in options.items():
        if name in fixed:
            accepted, instead = fixed[name]
            if value is not None and not {"*", str(value).lower()} & {*accepted}:
                raise ValueError(f"{name}={shown(value)}: not supported; {instead}")
            continue
        known = RENAMED.get(name, name)
        if known != name and known in options:
            raise ValueError(f"{name}: is {known}, which is given too")
        value = str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else plain(value)
        ours[known] = values.get(known, {}).get(value, value) if isinstance(value, str) else value
    return ours
