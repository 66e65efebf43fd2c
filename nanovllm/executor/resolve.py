"""Options that the user left open ("auto", None) become values."""

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from nanovllm.config import EngineConfig
from nanovllm.errors import refuse
from nanovllm.executor.exact_bits import Rule, rules_of_exact_bits
from nanovllm.model_config import ModelConfig

logger = logging.getLogger(__name__)

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def resolve(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Replaces what is left open by what this machine and this model call for. Raises ValueError naming an option that
    neither can serve."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
        if device == "cpu" and not hidden and _NVIDIA_DRIVER.exists():
            built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
            logger.warning("device='auto': the CPU, which is slow. Torch %s and sees no GPU of this machine", built)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch sees no GPU")
    share_gpus = device == "cuda" and _shares_gpus(config, torch.cuda.device_count())
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    return settle(replace(config, device=device, share_gpus=share_gpus), model, capability)


def settle(config: EngineConfig, model: ModelConfig, capability: tuple[int, int]) -> EngineConfig:
    """Replaces what the device, which is chosen, leaves open. capability: of its GPUs. Raises ValueError as `resolve`.
    """
    is_cuda, dtype = config.device == "cuda", config.dtype
    if dtype == "auto":
        dtype = model.torch_dtype if is_cuda else "float32"
        if dtype in ("float32", "float64") and is_cuda:
            dtype = "bfloat16"
    if config.runner == "pooling" and model.pooling is None:
        raise ValueError("runner='pooling': must be 'auto' or 'generate' for a live module")
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ValueError(f"max_model_len={config.max_model_len}: must be at most max_position_embeddings={longest}")
    settled = replace(
        config,
        dtype=dtype,
        runner="generate" if model.pooling is None else "pooling",
        # Where ranks share a GPU the host sums norms over all heads, which no graph can hold.
        enforce_eager=config.enforce_eager or (config.share_gpus and model.qk_norm == "width"),
        max_model_len=config.max_model_len or model.usual_context,
        kvcache_block_size=config.kvcache_block_size or (128 if is_cuda else 16),
    )
    rules = chain(rules_of_exact_bits(settled, model, capability), _rules(settled, model))
    for is_broken, option, value, bound in rules:
        if is_broken:
            refuse(option, value, bound)
    return settled


def _rules(config: EngineConfig, model: ModelConfig) -> Iterator[Rule]:
    """Rules for what goes with drafts, and with adapters."""
    is_foreign, embeds = model.implementation == "transformers", model.pooling is not None
    if (given := config.speculative_config) is not None:
        yield is_foreign, "model_impl", config.model_impl, "of a model that our layers have with speculative_config"
        yield embeds, "speculative_config", given, "None for a model that embeds"
        yield config.attention_backend == "flex", "attention_backend", "flex", "another with speculative_config"
    if config.enable_lora:
        yield is_foreign, "model_impl", config.model_impl, "of a model that our layers have with enable_lora"
        yield embeds, "enable_lora", True, "False for a model that embeds"
        is_served = config.exact_bits is None or (config.exact_bits == "batch" and config.device == "cpu")
        yield not is_served, "exact_bits", config.exact_bits, "None with enable_lora; 'batch' is there on a CPU"


def _shares_gpus(config: EngineConfig, count: int) -> bool:
    """Whether ranks have to share `count` GPUs. Raises ValueError where they must not, or lack an option for it."""
    size = config.tensor_parallel_size
    if size <= count:
        return False
    if not config.share_gpus:
        raise ValueError(f"tensor_parallel_size={size}: must be at most the {count} GPUs here (or set share_gpus)")
    if config.num_kvcache_blocks is None:
        raise ValueError(f"num_kvcache_blocks=None: must be given where {size} ranks share {count} GPUs (share_gpus)")
    if not (config.uses("peer_all_reduce") or config.enforce_eager):
        raise ValueError("disable='peer_all_reduce': must go with enforce_eager=True where ranks share GPUs")
    return True
