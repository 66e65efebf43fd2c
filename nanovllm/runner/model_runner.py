"""One rank: loads its share of the model, makes room beside it, and launches packed steps."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from nanovllm.attention import AttentionBackend, AttentionSetup, AttentionSpec, select_backend
from nanovllm.config import EngineConfig
from nanovllm.errors import refuse
from nanovllm.kernels import select_kernels
from nanovllm.kernels.base.compile_keys import hash_triton, resolve_keys
from nanovllm.kernels.plan.config import Choices
from nanovllm.kernels.plan.device import Device
from nanovllm.kernels.plan.plan import Planner, Rules
from nanovllm.kernels.row_by_row import row_by_row
from nanovllm.layers.adapted import room_for
from nanovllm.layers.attention import PagedAttention
from nanovllm.layers.context import ModelContext
from nanovllm.layers.memory import pages_of
from nanovllm.layers.quantized import FP8Matrix
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.drafters import build, passes
from nanovllm.models.plugins import load_plugins
from nanovllm.parallel.group import TensorParallelGroup
from nanovllm.runner.adapters import RankAdapters
from nanovllm.runner.cuda_graphs import StepGraphs, largest_chunk, most_step_tokens, why_no_graphs
from nanovllm.runner.device_io import DeviceIO
from nanovllm.runner.footprint import check_room, host_share, step_room
from nanovllm.runner.kernel_choice import before_capture, describe, library_settings, rules_of
from nanovllm.runner.memory_probe import GIB, NCCL_BYTES, MemoryProbe
from nanovllm.runner.rank_weights import RankWeights
from nanovllm.runner.sampler import OptionSampler, option_bytes
from nanovllm.runner.sleep import SleepableMemory
from nanovllm.runner.state_layout import layout_of
from nanovllm.runner.state_memory import StateMemory, num_blocks
from nanovllm.runner.step_work import StepWork
from nanovllm.runner.sum_order import check_order
from nanovllm.wire.sampling import split_section
from nanovllm.wire.shapes import MAX_PREFILL_ROWS, StepShape
from nanovllm.wire.state import StateSize, table_width
from nanovllm.wire.step import ADAPTERS_WORD, DRAFTS_WORD, PLACES_WORD, StepCounts, dummy_step, packed_capacity

if TYPE_CHECKING:
    from nanovllm.models.transformers_model import TransformersModel

logger = logging.getLogger(__name__)

_LAST_WAIT = 2.0  # seconds that close() gives a device after a failure


class ModelRunner:
    """The model, memory and graphs of one rank. Every rank runs the same steps in the same order."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, rank: int, store: dist.Store | None,
        progress: Callable[[], None] = lambda: None, module: torch.nn.Module | None = None,
    ) -> None:  # fmt: skip
        """Meets the other ranks and builds the model; `load` fills it. `config`: no "auto" is left. `progress`: called
        after each piece of a long command. `module`: whose parameters the model shares (models/live_module.py)."""
        load_plugins(config.plugins)
        self.config, self.model_config, self._progress = config, model_config, progress
        assert config.kvcache_block_size and config.max_model_len
        self.block_size: int = config.kvcache_block_size
        self.max_model_len: int = config.max_model_len
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.kv_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else self.dtype
        self.device = torch.device("cpu")
        if config.device == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
            threading.Thread(target=hash_triton, name="nanovllm-hash", daemon=True).start()  # or the first kernel waits
        self.memory = MemoryProbe(self.device)
        if module is None and model_config.implementation == "native":
            check_room(config, model_config, self.device)
        with self.memory.libraries(NCCL_BYTES if config.tensor_parallel_size > 1 else 0):
            self.group = self._meet(rank, store)
            progress()
            self.io = DeviceIO(self.device, config.uses("pdl"), keeps_tokens=rank == 0)
            self.graphs: StepGraphs | None = None
            with torch.inference_mode(), self.io.stream_context():
                self._build(module)

    # -- start-up -----------------------------------------------------------------------------------------------

    def _meet(self, rank: int, store: dist.Store | None) -> TensorParallelGroup:
        config = self.config
        group = TensorParallelGroup(
            rank, config.tensor_parallel_size, self.device, store, share_gpus=config.share_gpus,
            overlap=config.overlaps, exact_bits=config.exact_bits,
        )  # fmt: skip
        self._progress()
        self.memory.count(lambda: group.peer_bytes)
        if config.uses("peer_all_reduce") and self.device.type == "cuda" and group.size > 1:
            model, keys = self.model_config, config.most_places + MAX_PREFILL_ROWS
            rows = most_step_tokens(config) * model.most_sums
            group.use_peer_memory(rows, model.hidden_size, self.dtype, max_keys=keys)
        return group

    def _build(self, module: torch.nn.Module | None) -> None:
        config, model, is_first = self.config, self.model_config, self.group.rank == 0
        # On a CPU the triton backend means Triton's interpreter (it is refused otherwise): then all kernels go there.
        interpret = config.attention_backend == "triton"
        self.kernels = select_kernels(self.device, config.uses("fused_kernels"), interpret)
        if self.kernels.fused and self.device.type == "cuda":
            resolve_keys()
        if config.exact_bits is not None and not self.kernels.fused:
            self.kernels = row_by_row(self.kernels)
        by_transformers = self._load_transformers_model() if model.implementation == "transformers" else None
        self.planner = Planner(rules_of(config, model, Device.of(self.device), self.kernels.fused))
        context = ModelContext(
            self.group, self.kernels, self.dtype, self.device, model, self.max_model_len, planner=self.planner,
            adapters=room_for(config),
        )  # fmt: skip
        self.model: Any = by_transformers or DecoderForCausalLM(context)
        self.drafter = None if model.drafter is None else build(config, context, self.model)
        """The model that drafts for it; None: no model does."""
        self.backend = self._make_backend(tuple(dict.fromkeys(layer.spec for layer in self._attention_layers())))
        mixers = [*self.model.mixers(), *([] if self.drafter is None else self.drafter.attention_layers())]
        self.no_graphs_because = why_no_graphs(self.device, config.enforce_eager, self.kernels, self.backend, mixers)
        if by_transformers:
            self.no_graphs_because = "transformers computes the model"
        if is_first and self.device.type == "cuda" and self.no_graphs_because and not config.enforce_eager:
            logger.warning("no CUDA graphs, which is slow: %s", self.no_graphs_because)
        self._tell_backend()
        widened = self.device.type == "cuda" and not self.planner.rules.device.has_tma
        parts = [*self.model.modules(), *(() if self.drafter is None else self.drafter.modules())]
        if is_first and widened and any(isinstance(part, FP8Matrix) for part in parts):
            logger.warning("FP8 weights are widened for each product, slowly: it takes compute capability 9.x or 10.x")
        self.sleepable = sleepable = SleepableMemory(self.device)
        self.memory.count(lambda: sleepable.nbytes)
        to = sleepable if config.enable_sleep and module is None and self.device.type == "cuda" else None
        self.weights = RankWeights(
            config, model, self.model, self.io, self.memory, module, self._progress, to, self.drafter
        )
        self.adapters = None
        if context.adapters is not None:
            assert isinstance(self.model, DecoderForCausalLM)
            self.adapters = RankAdapters(self.model, model, config.max_lora_rank, self.io)
        self.state_memory = StateMemory(
            config, mixers, layout_of(pages_of(mixers), config, self.kv_dtype), self.kv_dtype, self.device,
            self.kernels, self.backend.token_major_cache, to,
        )  # fmt: skip
        self.work = StepWork(config, self.model, context, self.backend, self.io)
        if self.drafter is not None:
            self.work.drafter = passes(config, context, self.drafter, self.backend)
        self.option_sampler = OptionSampler(self.kernels, self.group, self.io, self.device, model.vocab_size)

    def _make_backend(self, specs: tuple[AttentionSpec, ...]) -> AttentionBackend:
        """Makes the attention backend, and notes in backend_reason why it is that one."""
        config, mode = self.config, self.config.exact_bits
        name = config.attention_backend
        if mode is not None:
            name = "fixed-order triton" if self.kernels.fused else "fixed-order torch"
        types, sizes = (self.device, self.dtype, self.kv_dtype), (config.most_places, self.max_model_len)
        setup = AttentionSetup(specs, self.block_size, *types, *sizes, config.tokens_per_step)
        found, self.backend_reason = select_backend(name, setup)
        if mode is not None:
            self.backend_reason = f"exact_bits={mode!r}"
        if self.group.rank == 0:
            logger.info("attention backend: %s (%s)", found.name, self.backend_reason)
        functions: Any = {"score_mod": config.score_mod, "mask_mod": config.mask_mod} if found.takes_functions else {}
        backend = found(setup, **functions)
        backend.is_required = config.attention_backend != "auto"
        return backend

    def _load_transformers_model(self) -> "TransformersModel":
        from nanovllm.models.transformers_model import TransformersModel, load_module

        module = load_module(
            self.model_config, self.config.model, dummy=self.config.load_format == "dummy", seed=self.config.seed,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip
        return TransformersModel(module, self.kernels)

    @torch.inference_mode()
    def measure_state(self) -> StateSize:
        """Measures how much memory for rows fits beside the weights, the largest step and the graphs. That step runs
        here, on one block."""
        memory, blocks = self.state_memory, self._num_blocks()
        if not memory.block_bytes and self.config.num_kvcache_blocks is None:  # nothing is kept by token: all rows fit
            blocks = self.config.max_num_seqs * table_width(self.max_model_len, self.block_size, 1)
        return memory.size(blocks)

    def _num_blocks(self) -> int:
        config, memory = self.config, self.state_memory
        needs, asked = (memory.block_bytes, memory.layout.num_tables), config.num_kvcache_blocks
        if self.device.type == "cpu":
            share, gib, whose = host_share(config), config.cpu_kvcache_gib, "a rank's share of the memory here"
            room, option = (gib * GIB, f"cpu_kvcache_gib={gib}") if asked is None else (share, whose)
            memory.choose_lines(int(min(share, room)))
            if room > share:
                refuse("cpu_kvcache_gib", gib, f"at most {share / GIB:.1f}, {whose}")
            return num_blocks(int(room), *needs, asked, option, slots=memory.fixed_bytes)
        option = f"gpu_memory_utilization={config.gpu_memory_utilization}"
        budget = self.memory.kv_budget(config.gpu_memory_utilization)
        memory.choose_lines(budget - (step_room(config, self.model_config, self.device) if memory.slot_bytes else 0))
        fixed = memory.fixed_bytes
        if fixed:  # before anything is allocated
            num_blocks(budget, *needs, None, option, self.memory.crowded, fixed)
        with self.io.stream_context():
            with self.memory.libraries():
                self.allocate_state(memory.size(1))
                self.warm_up_attention()
                self._progress()
                self.memory.begin_step()
                sizes = config.max_num_seqs, config.max_num_batched_tokens, self.max_model_len
                self.launch(dummy_step(*sizes, bool(fixed), config.enable_lora))
                torch.cuda.synchronize(self.device)
                step_bytes = self.memory.end_step()
            self._progress()
            graph_bytes = 0 if self.no_graphs_because else self._new_graphs().measure(self.memory.growth)
            self.io.forget_results()
        sampler_bytes = option_bytes(
            self.model_config, self.group.size, config.most_places, self.dtype, config.tokens_per_step
        )
        budget = self.memory.kv_budget(
            config.gpu_memory_utilization, step=step_bytes, graphs=graph_bytes, filters=sampler_bytes
        )
        return num_blocks(budget, *needs, asked, option, self.memory.crowded)

    def _attention_layers(self) -> list[PagedAttention]:
        models = [self.model] if self.drafter is None else [self.model, self.drafter]
        return [layer for model in models for layer in model.attention_layers()]

    def warm_up_attention(self) -> None:
        """Compiles what the backend needs for each kind of attention layer."""
        for layer in {layer.spec: layer for layer in self._attention_layers()}.values():
            self.backend.warmup(layer.cache, layer.spec)

    @torch.inference_mode()
    def allocate_state(self, size: StateSize) -> None:
        """Allocates the layers' memory, the request state by slot and the buffers of a step."""
        config = self.config
        self.state_memory.release()
        self.memory.release_cached()
        with self.io.stream_context():
            self.state_memory.allocate(size)
            rows = config.most_places + MAX_PREFILL_ROWS
            sizes = config.max_num_batched_tokens + rows, size.num_tables, size.num_lines
            self.work.allocate(rows, *sizes, self.state_memory.ids)
            capacity = packed_capacity(size, config.max_num_seqs, config.max_num_batched_tokens)
            self.io.allocate(capacity, rows + 1)  # and the number of drafted tokens

    def _tell_backend(self) -> None:
        """Makes attention leave L1 to weights that pass through registers, as those of one row in FP8 do."""
        if self.model_config.implementation == "native":
            fills_registers = any(plan.fills_registers for plan in self.model.plans(1))
            self.backend.prefer_small_shared_memory(fills_registers)

    @torch.inference_mode()
    def capture_graphs(self, rules: Rules) -> int:
        """Takes rank 0's `rules` and captures every step shape; returns their number."""
        self.planner.adopt(rules)
        if self.config.exact_bits is not None and self.device.type == "cuda":
            with self.io.stream_context(), library_settings(self.planner.rules):
                check_order(self.model, self.planner, self.config.max_num_batched_tokens)
        if self.no_graphs_because is not None:
            return 0
        with self.io.stream_context(), library_settings(self.planner.rules):
            self.graphs, before = self._new_graphs(), self.memory.used_bytes()
            with self.memory.libraries(self.graphs.usual_bytes):
                self.graphs.capture_all()
            self.memory.note_graphs(self.memory.used_bytes() - before)
        return len(self.graphs)

    @torch.inference_mode()
    def time_step(self, choices: Choices, num_decode_rows: int, replays: int) -> float:
        """Repeats the last step, of so many decodes, with `choices` of kernels; returns its microseconds, infinite
        where these kernels cannot run. For scripts/tune_steps.py, which calls all ranks."""
        from nanovllm.kernels.base.graph_timing import graph_us

        self._progress()
        self.planner.adopt(replace(self.planner.rules, tried=choices))
        self._tell_backend()
        computed = self.work.state.num_computed
        with self.io.stream_context():
            before = computed - 1  # a step moves its rows on, to where they have no room and would read no keys

            def again() -> None:
                computed.copy_(before)
                self.work.run_padded(StepShape(num_decode_rows, 0))

            try:
                return graph_us([again], replays)
            except ValueError:  # a kernel refuses its shape, on all ranks alike
                return float("inf")

    def _new_graphs(self) -> StepGraphs:
        assert self.io.stream is not None
        self.io.step_buffer.zero_()  # a step without rows: everything is padding
        max_tokens = largest_chunk(self.config.max_num_batched_tokens, self.backend, self.model.num_weights)
        work = self.work
        drafting: dict[str, Any] = {}
        if work.drafter is not None:
            drafting = {"see": work.see_padded, "draft": work.draft_padded, "max_drafting": self.config.most_drafting}
        return StepGraphs(
            work.run_padded, self.config.most_places, max_tokens, self.io.stream, self._progress,
            partial(before_capture, self.model), adapters=self.adapters is not None, **drafting,
        )  # fmt: skip

    # -- one step -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, packed: np.ndarray) -> None:
        """Runs a packed step (wire/step.py); DeviceIO.collect returns its tokens, oldest step first."""
        packed, section = split_section(packed)
        counts, places = StepCounts.of(packed), int(packed[PLACES_WORD])
        num_rows, num_decode_rows, num_sample_rows, num_tokens, *_ = counts.on_device(places)
        keep_hidden = section is not None and section.size("targets") > 0
        work, graphs, shape, scores = self.work, self.graphs, None, None
        speculates = self.config.speculative_config is not None
        pools = self.model_config.pooling is not None
        with self.io.stream_context(), library_settings(self.planner.rules):
            if graphs is not None and not keep_hidden:
                sizes = num_decode_rows, num_rows - num_decode_rows, num_tokens - num_decode_rows
                shape = graphs.shape_for(*sizes, packed[ADAPTERS_WORD] > 0)
            step = self.io.upload(packed)
            self.state_memory.begin(step, packed)
            if graphs is not None and shape is not None:
                graphs.replay(shape)
                first_chunk_row, hidden = shape.decode_rows, None
                logits = work.captured_logits[shape].tensor() if section is not None or pools else None
            else:
                first_chunk_row = num_decode_rows
                logits, hidden = work.run_exact(step, packed, keep_hidden)
            if section is not None:
                if speculates and logits is not None:  # option rows that compute nothing need the id of something
                    work.buffers.tokens[: logits.shape[0]].clamp_(min=0)
                scores = self.option_sampler.run(
                    section, logits, first_chunk_row, num_decode_rows, work.buffers, work.state, hidden, self.model
                )
            num_results = first_chunk_row + num_sample_rows - num_decode_rows
            if speculates:
                work.finish(step, counts, int(packed[DRAFTS_WORD]), places, first_chunk_row, shape, graphs)
            if section is not None:
                self.option_sampler.finish(scores, work.state)
            tokens = work.buffers.tokens[: num_results + speculates]
            padding = slice(num_decode_rows, first_chunk_row)
            if pools and logits is not None and num_sample_rows:
                rows = logits[: len(tokens)]
                scores = self.option_sampler.hand_out(torch.cat((rows[: padding.start], rows[padding.stop :])))
            self.io.receive(tokens, padding, scores)

    # -- the rest -----------------------------------------------------------------------------------------------

    def info(self) -> dict[str, object]:
        """Facts about this rank for engine_info: device, dtypes, backends and kernels."""
        cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "dtype": self.config.dtype,
            "kv_cache_dtype": str(self.kv_dtype).removeprefix("torch."),
            "model_impl": self.model_config.implementation,
            "attention_backend": self.backend.name,
            "attention_backend_reason": self.backend.fallen_back_from or self.backend_reason,
            "block_size": self.block_size,
            "kv_cache_groups": self.state_memory.describe(),
            "slot_bytes": self.state_memory.slot_bytes,
            "num_state_lines": self.state_memory.num_lines,
            "all_reduce": self.group.all_reduce_name,
            "gemms": describe(self.model, self.planner.rules),
            "exact_bits": self.config.exact_bits,
            "cuda_graphs": len(self.graphs) if self.graphs else 0,
            "no_cuda_graphs_because": self.no_graphs_because,
            **({} if self.weights.live_module is None else self.weights.live_module.report()),
            **self.memory.report(),
        }

    def close(self, failed: bool) -> None:
        """Frees the device. After a failure no rank is waited for, and a device that does not come to rest keeps all
        memory until this process ends: freeing would wait for it."""
        if failed:
            self.group.abort()
            if not self.memory.is_idle_within(_LAST_WAIT):
                logger.warning("the device did not become idle within %g s: its memory is not freed", _LAST_WAIT)
                return
        if self.graphs is not None:
            self.graphs.clear()  # before the communicators that they captured
            self.graphs = None
        self.group.close(failed)
        del self.model, self.drafter, self.weights, self.work
        self.state_memory.free()
        self.sleepable.free("weights")
        self.memory.release_cached()
