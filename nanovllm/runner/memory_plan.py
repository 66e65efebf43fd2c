"""Memory plan: bytes that an engine takes of each GPU and how many tokens fit beside it, computed without a GPU by the
engine's own layers, without memory behind them, and its own arithmetic.

Weights, KV cache, tables, peer memory and filters are exact. An engine measures the largest step, its graphs and the
libraries when it starts; here they follow from the widest part of a layer and from what libraries usually take.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.kernels import select_kernels
from nanovllm.layers.moe import MoE
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM, ModelContext
from nanovllm.parallel.group import TensorParallelGroup
from nanovllm.parallel.peer.memory import Layout
from nanovllm.parallel.two_batch import Overlap
from nanovllm.runner.cuda_graphs import captured_shapes, usual_graph_bytes
from nanovllm.runner.kv_cache import block_bytes, blocks_that_fit
from nanovllm.runner.memory_probe import CONTEXT_PER_SM, GIB, KERNELS, MIB, NCCL_BYTES, kv_room
from nanovllm.runner.sampler import option_bytes
from nanovllm.wire.shapes import MAX_PREFILL_ROWS

_META, _CPU = torch.device("meta"), torch.device("cpu")
_STAGES = 2
"""Stages of a start in which kernels are loaded."""
_WORKSPACE = 64 * MIB
"""Bytes of workspace of the library's matrix products."""
_ROUNDED_UP = 1.05
"""Factor by which torch's allocator rounds up."""


@dataclass(frozen=True)
class Gpu:
    name: str
    total: int
    """Bytes, as the driver says."""
    multiprocessors: int = 132


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40", int(39.4 * GIB), 108), Gpu("A100-80", int(79.2 * GIB), 108), Gpu("H100", int(79.1 * GIB)),
        Gpu("H200", int(139.8 * GIB)), Gpu("B200", int(178.4 * GIB), 148), Gpu("L4", int(22.0 * GIB), 58),
        Gpu("L40S", int(44.4 * GIB), 142), Gpu("RTX-4090", int(23.5 * GIB), 128), Gpu("RTX-5090", int(31.4 * GIB), 170),
        Gpu("RTX-PRO-6000", int(94.9 * GIB), 188),
    )
}  # fmt: skip


@dataclass(frozen=True)
class RankPlan:
    """Memory plan of one rank; sizes are bytes."""

    ranks: int
    weights: int
    libraries: int
    """With the CUDA context."""
    used: int
    """With the weights and libraries: tables and peer memory."""
    reserved: Mapping[str, int]
    """Bytes kept free, by name: "step", "graphs" and "filters"."""
    token_bytes: Mapping[tuple[int | None, int, int], tuple[int, int]]
    """(window, KV heads of a rank, head_dim) -> (layers, bytes that a token takes in them)."""
    block_size: int
    blocks: int

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    def users(self, length: int) -> int:
        """Requests of `length` tokens that fit at once."""
        return self.blocks // -(-length // self.block_size)


def rank_model(config: EngineConfig, model: ModelConfig) -> DecoderForCausalLM:
    """A rank's layers without memory behind them. config: no "auto" is left."""
    assert config.max_model_len
    group = TensorParallelGroup(0, 1, _CPU, None, exact_bits=config.exact_bits)
    group.size = config.tensor_parallel_size  # nobody is there to speak to
    backend: Any = None
    kernels = select_kernels(_CPU, fused=False)
    dtype = getattr(torch, config.dtype)
    return DecoderForCausalLM(ModelContext(group, kernels, dtype, _META, model, backend, config.max_model_len))


def plan_rank(config: EngineConfig, model: ModelConfig, gpu: Gpu) -> RankPlan:
    """Raises ValueError as an engine does that cannot start with these options on that GPU. config: no "auto" is
    left."""
    assert config.kvcache_block_size
    layers = rank_model(config, model)
    dtype, kv_dtype = getattr(torch, config.dtype), torch.float8_e4m3fn
    kv_dtype = kv_dtype if config.kv_cache_dtype == "fp8" else dtype
    attention = layers.attention_layers()
    weights = weight_bytes(layers)
    tables = {id(one.cos_sin): one.cos_sin.nbytes for one in attention if one.cos_sin is not None}
    libraries = _library_bytes(config, gpu)
    used = weights + libraries + sum(tables.values()) + _peer_bytes(config, model, dtype)
    rows = config.max_num_seqs
    reserved = {
        "step": _step_bytes(layers, config.max_num_batched_tokens + rows, dtype),
        "graphs": 0 if config.enforce_eager else _graph_bytes(layers, config, dtype),
        "filters": option_bytes(model.vocab_size, config.tensor_parallel_size, rows, dtype),
    }
    share = int(config.gpu_memory_utilization * gpu.total)
    per_block = block_bytes(attention, config.kvcache_block_size, kv_dtype)
    room = kv_room(share, used, gpu.total - used, reserved)
    blocks = blocks_that_fit(room, per_block, f"gpu_memory_utilization={config.gpu_memory_utilization}")
    groups = Counter((one.spec.window, *one.cache_shape) for one in attention)
    one_of = {(one.spec.window, *one.cache_shape): one for one in attention}
    token_bytes = {key: (count, count * block_bytes([one_of[key]], 1, kv_dtype)) for key, count in groups.items()}
    size = config.tensor_parallel_size
    return RankPlan(size, weights, libraries, used, reserved, token_bytes, config.kvcache_block_size, blocks)


def weight_bytes(layers: DecoderForCausalLM) -> int:
    """Bytes of the memory that weights and their scales are loaded into, each counted once."""
    held = list(layers.parameters())
    for shard in (shard for weight in layers.checkpoint_weights() for shard in weight.shards):
        held += [shard.target] if shard.scales is None else [shard.target, shard.scales.values]  # type: ignore[list-item]
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in held)}
    return sum(storage.nbytes() for storage in storages.values())


def _peer_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    if config.tensor_parallel_size == 1 or not config.uses("peer_all_reduce"):
        return 0
    rows, halves = config.max_num_batched_tokens, 0
    if config.uses("two_batch_overlap") and config.exact_bits is None:
        halves = Overlap(_CPU).first_half(rows)
    keys = config.max_num_seqs + MAX_PREFILL_ROWS
    layout = Layout.for_limits(config.tensor_parallel_size, model.hidden_size, dtype.itemsize, rows, keys, halves)
    return layout.nbytes


def _library_bytes(config: EngineConfig, gpu: Gpu) -> int:
    nccl = NCCL_BYTES if config.tensor_parallel_size > 1 else 0
    return gpu.multiprocessors * CONTEXT_PER_SM + _STAGES * KERNELS + _WORKSPACE + nccl


def _step_bytes(layers: DecoderForCausalLM, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of activations at the peak of a step, in the widest part of its widest layer: inputs and outputs there,
    beside the residual stream and the rows that are normed."""
    hidden, widest = layers.config.hidden_size, 0
    for layer in layers.layers:
        spec, mlp = layer.self_attn.spec, layer.mlp
        attention = (3 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        widest = max(widest, attention * dtype.itemsize, _mlp_bytes(layers, mlp, dtype))
    return int(tokens * (3 * hidden * dtype.itemsize + widest) * _ROUNDED_UP)


def _mlp_bytes(layers: DecoderForCausalLM, mlp: Any, dtype: torch.dtype) -> int:
    """Bytes of one token within an MLP or a mixture of experts."""
    config, ranks = layers.config, layers.group.size
    if not isinstance(mlp, MoE):
        return (3 if config.gated_mlp else 2) * -(-config.intermediate_size // ranks) * dtype.itemsize
    shared = 3 * -(-mlp.config.shared_size // ranks) + config.hidden_size * bool(mlp.config.shared_size)
    routing = 4 * mlp.config.num_experts + 12 * mlp.config.top_k
    return routing + (mlp.config.top_k * (mlp.size + config.hidden_size) + shared) * dtype.itemsize


def _graph_bytes(layers: DecoderForCausalLM, config: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes of all graphs: their pool is that of the largest, and holds its logits."""
    rows = config.max_num_seqs + MAX_PREFILL_ROWS
    shapes = captured_shapes(config.max_num_seqs, config.max_num_batched_tokens)
    logits = rows * layers.lm_head.weight.shape[0] * dtype.itemsize
    return usual_graph_bytes(shapes) + _step_bytes(layers, sum(shapes[0]), dtype) + logits
