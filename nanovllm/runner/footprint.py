"""Memory footprint: bytes that an engine takes of each GPU and how many tokens fit beside it, computed without a GPU by
the engine's own layers, without memory behind them, and its own arithmetic.

Weights, KV cache, tables, peer memory and filters are exact. An engine measures the largest step, its graphs and the
libraries when it starts; here they follow from the widest part of a layer and from what libraries usually take (on an
H200 within 310 MiB for models of 0.6B to 30B, which is 0.3 % of the KV cache: tests/gpu/test_gpu_footprint.py).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from nanovllm.attention import check_fp8_cache
from nanovllm.config import EngineConfig
from nanovllm.kernels.attention.widened import copy_room
from nanovllm.kernels.plan.config import FP8
from nanovllm.kernels.plan.device import CPU, Device
from nanovllm.kernels.plan.plan import Rules
from nanovllm.kernels.plan.product import Product
from nanovllm.kernels.step.state import DeviceState, DraftRows, StepBuffers
from nanovllm.layers.adapted import AdaptedMatrix, room_for
from nanovllm.layers.attention import PagedAttention
from nanovllm.layers.memory import Pages, pages_of
from nanovllm.layers.weights import CheckpointWeight
from nanovllm.model_config import DrafterConfig, ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.drafters import build
from nanovllm.models.planned import one_of_each
from nanovllm.parallel.peer.memory import Layout
from nanovllm.parallel.two_batch import first_half
from nanovllm.processes.machine import usable_memory
from nanovllm.runner.cuda_graphs import captured_shapes, most_step_tokens
from nanovllm.runner.kernel_choice import rules_of
from nanovllm.runner.memory_probe import CONTEXT_PER_SM, GIB, KERNELS, MIB, NCCL_BYTES, kv_room
from nanovllm.runner.sampler import option_bytes
from nanovllm.runner.state_layout import StateLayout, layout_of
from nanovllm.runner.state_memory import lines_for, num_blocks, slot_bytes, spare_lines
from nanovllm.wire.shapes import MAX_PREFILL_ROWS
from nanovllm.wire.state import capacity_tokens, row_blocks, table_width

_STAGES = 2
"""Stages of a start in which kernels are loaded."""
_ROUGHLY = 160 * MIB
"""Bytes of the library's workspace, and of what torch's allocator rounds weights up by; 120 to 380 on an H200."""
_ROUNDED_UP = 1.15
"""Factor by which torch's allocator rounds the tensors of a step up; 1.02 to 1.6 on an H200."""


@dataclass(frozen=True)
class Gpu:
    device: Device
    total: int
    """Bytes, as the driver says."""


_L4 = Device("NVIDIA L4", (8, 9), 58, 99 << 10)
_PRO_6000 = Device("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 99 << 10)
GPUS = {
    name: Gpu(device, int(gib * GIB))
    for name, device, gib in (
        ("A100-40", Device.named("A100"), 39.4), ("A100-80", Device.named("A100"), 79.2),
        ("H100", Device.named("H100"), 79.1), ("H200", Device.named("H200"), 139.8),
        ("B200", Device.named("B200"), 178.4), ("L4", _L4, 22.0), ("L40S", Device.named("L40S"), 44.4),
        ("RTX-4090", Device.named("4090"), 23.5), ("RTX-5090", Device.named("5090"), 31.4),
        ("RTX-PRO-6000", _PRO_6000, 94.9),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Footprint:
    """Memory footprint of one rank; sizes are bytes."""

    ranks: int
    weights: int
    buffers: int
    """Bytes of tables by position, of the requests' state by slot, and of a step's inputs."""
    adapters: int
    """Bytes of the slots of adapters."""
    slots: int
    """Bytes of memory of fixed size, in all lines."""
    num_lines: int
    """Lines, for rows and for states that are kept."""
    line_bytes: int
    rows: int
    """Rows that run at once, at most: max_num_seqs."""
    peer: int
    """Bytes that other ranks write into, where GPUs can."""
    libraries: int
    """Bytes of libraries and the CUDA context."""
    reserved: Mapping[str, int]
    """Bytes kept free, by name: "step", "graphs" and "filters"."""
    token_bytes: Mapping[Pages, tuple[int, int]]
    """Number of layers, and bytes that a token takes in them, by kind of layers."""
    layout: StateLayout
    block_bytes: int
    block_size: int
    share: int
    """Bytes of the GPU that all of this has to fit into."""
    option: str
    """Option that sets `share`, written out with its value."""
    asked: int | None
    """Blocks that were asked for by num_kvcache_blocks."""

    @cached_property
    def blocks(self) -> int:
        """Raises ValueError as an engine does that has no room for one, or for those that were asked for."""
        room = kv_room(self.share, self.used, self.share - self.used, self.reserved)
        needs = (self.block_bytes, self.layout.num_tables, self.asked, self.option)
        return num_blocks(room + self.slots, *needs, slots=self.slots)

    @property
    def used(self) -> int:
        return self.weights + self.buffers + self.adapters + self.slots + self.peer + self.libraries

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what takes them; "libraries" are all that has no name of its own."""
        named = {"weights": self.weights, "adapters": self.adapters, "slots": self.slots}
        named = {name: size for name, size in named.items() if size or name == "weights"}
        return {**named, "libraries": self.used - sum(named.values()), **self.reserved}

    @property
    def surely_fits(self) -> bool:
        """A token fits beside what every engine takes that is none of the estimates."""
        left = self.share - self.weights - self.buffers - self.adapters - self.slots - self.reserved["filters"]
        return left >= self.layout.num_tables * self.block_bytes

    @property
    def tokens(self) -> int:
        """Tokens of the longest request that fits alone, or that the blocks hold where windows alone bound a
        request."""
        longest = capacity_tokens(self.layout.groups, self.blocks, self.block_size)
        return min(longest, self.blocks * self.block_size)

    def users(self, length: int) -> int:
        """Requests of `length` tokens that fit at once while they decode."""
        fit = self.blocks // row_blocks(self.layout.groups, length, self.block_size)
        return min(fit, self.num_lines, self.rows) if self.slots else fit


def check_room(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Raises ValueError, before a weight is there, where it is certain already that an engine of these options cannot
    start on this device. config: no "auto" is left."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        footprint = footprint_of(config, model, Gpu(Device.of(device), total))
        if not (footprint.surely_fits or config.share_gpus):
            footprint.blocks  # noqa: B018 (raises: there is no room for one)
        return
    share = host_share(config)
    layers, counts = one_of_each(model, rules_of(config, model, CPU, False), config.dtype)
    size = _weights(layers, counts)
    if size > share:
        needed = f"model={config.model!r}: a rank's weights take {size / GIB:.1f} GiB in {config.dtype}"
        raise ValueError(f"{needed}, must be at most {share / GIB:.1f}, its share of the memory here")


def step_room(config: EngineConfig, model: ModelConfig, device: torch.device) -> int:
    """Bytes that the largest step, graphs and filters take on this GPU, as predicted: for what is chosen before they
    are measured."""
    gpu = Gpu(Device.of(device), torch.cuda.mem_get_info(device)[1])
    return sum(footprint_of(config, model, gpu).reserved.values())


def host_share(config: EngineConfig) -> float:
    """Bytes of the memory here that a rank on a CPU may take."""
    return usable_memory() / config.tensor_parallel_size


def footprint_of(config: EngineConfig, model: ModelConfig, gpu: Gpu) -> Footprint:
    """Footprint of a rank with these options on that GPU. Raises ValueError as an engine does for what no such GPU can
    do. config: no "auto" is left."""
    assert config.kvcache_block_size and config.max_model_len
    rules = rules_of(config, model, gpu.device, config.uses("fused_kernels"))
    layers, counts = one_of_each(model, rules, config.dtype, room_for(config))
    dtype, kv_dtype = getattr(torch, config.dtype), torch.float8_e4m3fn
    if config.kv_cache_dtype == "fp8":
        check_fp8_cache(gpu.device.capability)
    else:
        kv_dtype = dtype
    places = config.most_places
    captures = not config.enforce_eager and all(mixer.can_capture for mixer in layers.mixers())
    reserved = {
        "step": _step_bytes(layers, rules, config.max_num_batched_tokens, places, dtype),
        "graphs": _graph_bytes(layers, rules, config, dtype) if captures else 0,
        "filters": option_bytes(model, config.tensor_parallel_size, places, dtype, config.tokens_per_step),
    }
    by_layer = zip(layers.mixers(), counts, strict=True)
    mixers = [mixer for mixer, count in by_layer for _ in range(count)]
    drafter = None if model.drafter is None else build(config, layers.context, layers)
    mixers += [] if drafter is None else drafter.attention_layers()
    pages = pages_of(mixers)
    layout = layout_of(pages, config, kv_dtype)
    token_bytes = {kind: (count, count * kind.token_bytes(kv_dtype)) for kind, count in Counter(pages).items()}
    share = int(config.gpu_memory_utilization * gpu.total)
    line_bytes, block_bytes = slot_bytes(mixers), layout.token_bytes(kv_dtype) * config.kvcache_block_size
    block_bytes += 4 * config.kvcache_block_size * config.looks_up
    weights = _weights(layers, counts) + (0 if drafter is None else weight_bytes(drafter.checkpoint_weights()))
    buffers = _buffer_bytes(config, model, layout)
    if kv_dtype != dtype:
        specs = [mixer.spec for mixer in mixers if isinstance(mixer, PagedAttention)]
        sizes = config.kvcache_block_size, config.most_places, config.max_model_len
        buffers += copy_room(specs, *sizes, dtype, gpu.device)[1]
    footprint = Footprint(
        config.tensor_parallel_size, weights, buffers, _adapter_bytes(layers, counts), 0,
        0, 0, config.max_num_seqs, _peer_bytes(config, model, dtype), _library_bytes(config, gpu), reserved,
        token_bytes, layout, block_bytes, config.kvcache_block_size, share,
        f"gpu_memory_utilization={config.gpu_memory_utilization}", config.num_kvcache_blocks,
    )  # fmt: skip
    spare = spare_lines(config)
    room = kv_room(share, footprint.used, share, reserved) - spare * line_bytes
    lines = lines_for(config, room, line_bytes, bool(block_bytes))
    return replace(footprint, num_lines=lines, line_bytes=line_bytes, slots=(lines + 1 + spare) * line_bytes)


def weight_bytes(weights: Iterable[CheckpointWeight]) -> int:
    """Bytes of the memory that weights and their scales are loaded into, each counted once."""
    held = []
    for shard in (shard for weight in weights for shard in weight.shards):
        held += [shard.target] if shard.scales is None else [shard.target, shard.scales.values]
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in held)}
    return sum(storage.nbytes() for storage in storages.values())


def _weights(layers: DecoderForCausalLM, counts: list[int]) -> int:
    """Bytes of weights of a model whose layers stand for so many each."""
    found = weight_bytes(layers.checkpoint_weights())
    for layer, count in zip(layers.layers, counts, strict=True):
        found += (count - 1) * weight_bytes(layer.checkpoint_weights(""))
    return found


def _adapter_bytes(layers: DecoderForCausalLM, counts: list[int]) -> int:
    """Bytes of the slots of adapters of a model whose layers stand for so many each."""
    found = 0
    for layer, count in zip(layers.layers, counts, strict=True):
        adapted = (part for part in layer.modules() if isinstance(part, AdaptedMatrix))
        found += count * sum(part.a.nbytes + part.b.nbytes for part in adapted)
    return found


def _buffer_bytes(config: EngineConfig, model: ModelConfig, layout: StateLayout) -> int:
    """Bytes of PositionTables (layers/rotary.py), DeviceState and StepBuffers (kernels/step/input.py)."""
    assert config.kvcache_block_size and config.max_model_len
    kinds = {(spec.rope, spec.head_dim) for spec in model.layers if spec.rope is not None}
    width = sum(model.ropes[name].rotary_dim(head_dim) for name, head_dim in kinds)
    by_position = 4 * config.max_model_len * (width + (model.query_scaling is not None))
    tables, slots = layout.num_tables, config.max_num_seqs
    rows = config.most_places + MAX_PREFILL_ROWS
    blocks = table_width(config.max_model_len, config.kvcache_block_size, tables)
    state = DeviceState.allocate(slots, tables, blocks, "meta")
    inputs = StepBuffers.allocate(rows, config.max_num_batched_tokens + rows, tables, "meta")
    tensors = [each for held in (state, inputs) for each in vars(held).values() if isinstance(each, torch.Tensor)]
    if model.drafter is not None:
        tensors += _drafting_buffers(config, model, model.drafter, rows)
    return by_position + sum(tensor.nbytes for tensor in tensors)


def _drafting_buffers(
    config: EngineConfig, model: ModelConfig, drafter: DrafterConfig, rows: int
) -> list[torch.Tensor]:
    """Tensors of ModelDrafter (models/drafters/shared.py), and of its layers by position."""
    assert config.max_model_len
    decoder, dtype = drafter.model, getattr(torch, config.dtype)
    taps = torch.empty(
        config.max_num_batched_tokens + rows, len(drafter.taps) * model.hidden_size, dtype=dtype, device="meta"
    )  # fmt: skip
    held = DraftRows.allocate(config.max_num_seqs, decoder.hidden_size, dtype, "meta")
    width = sum(rope.rotary_dim(decoder.head_dim) for rope in decoder.ropes.values())
    angles = torch.empty(config.max_model_len, width, dtype=torch.float32, device="meta")
    return [taps, angles, *vars(held).values()]


def _peer_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    if config.tensor_parallel_size == 1 or not config.uses("peer_all_reduce"):
        return 0
    rows, halves = most_step_tokens(config) * model.most_sums, 0
    if config.overlaps:
        halves = first_half(rows)
    keys = config.most_places + MAX_PREFILL_ROWS
    layout = Layout.for_limits(config.tensor_parallel_size, model.hidden_size, dtype, rows, keys, halves)
    return layout.nbytes


def _library_bytes(config: EngineConfig, gpu: Gpu) -> int:
    nccl = NCCL_BYTES if config.tensor_parallel_size > 1 else 0
    return gpu.device.processors * CONTEXT_PER_SM + _STAGES * KERNELS + _ROUGHLY + nccl


def _step_bytes(layers: DecoderForCausalLM, rules: Rules, tokens: int, slots: int, dtype: torch.dtype) -> int:
    """Bytes of activations at the peak of a step: in the widest part of its widest layer, inputs and outputs there
    beside the residual stream and the rows that are normed; or of the logits of all rows."""
    hidden, widest, weight, deltas = layers.config.hidden_size, 0, 0, 0
    for layer in layers.layers:
        inside = getattr(layer.self_attn, "elements_inside", 0) * dtype.itemsize
        widest = max(
            widest, _token_bytes(layer.self_attn.operations, dtype) + inside, _token_bytes(layer.mlp.operations, dtype)
        )  # fmt: skip
        adapted = any(isinstance(part, AdaptedMatrix) for part in layer.modules())  # their sums, wide and as rounded
        deltas = max((4 + dtype.itemsize) * one.n for one in layer.operations) if adapted else 0
        for one in layer.operations if not rules.device.has_tma else ():
            if one.dtype == FP8:  # kernels/fp8/reference.py: widened_products
                widest, weight = max(widest, 10 * one.n + 2 * one.k), max(weight, 2 * one.num_weights)
    beside = 0
    if (inputs := layers.layer_inputs) is not None:  # which stay, made of what is projected and normed
        beside = inputs.table[0].numel() * dtype.itemsize
        widest = max(widest, 2 * inputs.projection.product.n * dtype.itemsize)
    inside = int((tokens * (3 * hidden * dtype.itemsize + widest + deltas + beside) + weight) * _ROUNDED_UP)
    return max(inside, (slots + MAX_PREFILL_ROWS) * layers.lm_head.weight.shape[0] * dtype.itemsize)


def _token_bytes(operations: Sequence[Product], dtype: torch.dtype) -> int:
    """Bytes of one token within a mixer or an MLP: the results of its products and the widest of what they take of
    each other, or what the experts of the token make."""
    of_choice = [one for one in operations if one.choice is not None]
    products = [one for one in operations if one.choice is None]
    if of_choice and (choice := of_choice[0].choice) is not None:
        down = of_choice[-1]
        chosen = choice.top_k * (down.k + 2 * down.n) + down.n * bool(products)
        return 4 * choice.num_experts + 8 * choice.top_k + chosen * dtype.itemsize
    return (sum(one.n for one in products) + max((one.k for one in products[1:]), default=0)) * dtype.itemsize


def _graph_bytes(layers: DecoderForCausalLM, rules: Rules, config: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes of all graphs: they share a pool, which the largest fills."""
    [largest, *_] = captured_shapes(config.most_places, config.max_num_batched_tokens)
    return _step_bytes(layers, rules, sum(largest), config.most_places, dtype)
