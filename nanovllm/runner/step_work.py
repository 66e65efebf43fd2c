"""Work of one rank in a step: rows, layers, head, sampling; at its exact size, or padded for a CUDA graph."""

from typing import Any

import numpy as np
import torch

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.config import EngineConfig
from nanovllm.kernels.recurrent.rows import Lines
from nanovllm.kernels.sampling.gumbel import Draws
from nanovllm.kernels.step.state import DeviceState, StepBuffers
from nanovllm.layers.context import ModelContext
from nanovllm.layers.step import ForwardStep, wanted_rows
from nanovllm.models.drafters.shared import ModelDrafter
from nanovllm.runner.cuda_graphs import LogitsView, StepGraphs
from nanovllm.runner.device_io import DeviceIO
from nanovllm.wire.shapes import MAX_PREFILL_ROWS, StepShape
from nanovllm.wire.state import table_width
from nanovllm.wire.step import ADAPTERS_WORD, DRAFT, PLACES_WORD, StepCounts, row_lengths


class StepWork:
    """A step's work on the device, from the packed words to the sampled tokens, and the tensors that it works on."""

    state: DeviceState
    buffers: StepBuffers

    def __init__(
        self, config: EngineConfig, model: Any, context: ModelContext, backend: AttentionBackend, io: DeviceIO
    ) -> None:
        """`model`: a DecoderForCausalLM or a TransformersModel; `context`: what it was built with."""
        assert config.kvcache_block_size
        self._block_size: int = config.kvcache_block_size
        self._max_num_seqs, self._max_model_len = config.max_num_seqs, context.max_model_len
        self._most_places = config.most_places
        self._model, self._io, self._device, self._vocab_size = model, io, context.device, context.config.vocab_size
        self._kernels, self._group, self._backend = context.kernels, context.group, backend
        self._speculation = config.speculation
        rates = None if self._speculation is None else self._speculation.rates
        self._rates = None if rates is None else torch.tensor(rates, dtype=torch.float32, device=context.device)
        self._has_head, self._has_adapters = context.config.pooling is None, context.adapters is not None
        self.drafter: ModelDrafter | None = None
        """The model that drafts, where there is one."""
        self._taken: dict[StepShape | None, tuple[StepBuffers, ForwardStep]] = {}
        """The last step at its exact size, and the one that each graph computes, until a model has drafted from it."""
        self.captured_logits: dict[StepShape, LogitsView] = {}
        """Logits that the graph of each shape leaves behind, from which it has sampled; or what stands for them."""

    def allocate(
        self, max_rows: int, max_tokens: int, num_tables: int, num_lines: int, ids: torch.Tensor | None = None
    ) -> None:
        """The requests' state by slot, anew, and the buffers of steps of at most so many rows and tokens. num_tables:
        block tables of a row. num_lines: of memory of fixed size. ids: see StateMemory."""
        width = table_width(self._max_model_len, self._block_size, num_tables)
        num_drafts = 0 if self._speculation is None else self._speculation.num_tokens
        num_spare = self._most_places if num_drafts and num_lines else 0
        self.state = DeviceState.allocate(
            self._max_num_seqs, num_tables, width, self._device, num_lines, num_drafts, ids, self._has_adapters,
            num_spare,
        )  # fmt: skip
        self.buffers = StepBuffers.allocate(max_rows, max_tokens, num_tables, self._device)
        self._taken.clear()
        if self.drafter is not None:
            self.drafter.allocate(max_tokens)

    def run_exact(
        self, step: torch.Tensor, packed: np.ndarray, keep_hidden: bool = False
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Any step, eagerly, at its exact size: int32 words, as `step` on the device and as `packed` on the host.

        Returns the logits of the rows that drew [rows, this rank's ids], None where none did, and with `keep_hidden`
        the final hidden states of all tokens [T, hidden], else None. A model without a head draws nothing: the final
        hidden states of those rows [rows, hidden] stand for their logits.
        """
        counts = StepCounts.of(packed).on_device(int(packed[PLACES_WORD]))
        buffers = self.buffers.narrow(counts.num_rows, counts.num_tokens)
        self._expand(step, buffers, counts.num_decode_rows)
        starts, lengths = row_lengths(packed, self._max_num_seqs)
        ends = starts + lengths
        attention = self._attention(buffers, counts.num_decode_rows, counts.most_row_tokens, int(ends.max()))
        attention.token_ends = lengths.cumsum(dtype=np.int64)
        attention.num_prefill_blocks = int((-(-ends[counts.num_decode_rows :] // self._block_size)).sum())
        has_adapters = packed[ADAPTERS_WORD] > 0
        return self._forward(buffers, attention, counts.num_sample_rows, None, keep_hidden, has_adapters)

    def run_padded(self, shape: StepShape) -> None:
        """A step from the step buffer, padded to `shape`, without a look at what it holds: what a CUDA graph
        captures."""
        num_decode_rows, num_chunk_tokens, has_adapters = shape
        num_rows = num_decode_rows + (MAX_PREFILL_ROWS if num_chunk_tokens else 0)
        buffers = self.buffers.narrow(num_rows, num_decode_rows + num_chunk_tokens)
        step = self._io.step_buffer
        if num_chunk_tokens:
            self._expand(step, buffers, num_decode_rows)
        else:
            self._kernels.prepare_decode(step, self._max_num_seqs, self.state, self._block_size, buffers)
        attention = self._attention(buffers, num_decode_rows, max(1, num_chunk_tokens), self._max_model_len)
        attention.is_captured = True
        logits, _ = self._forward(buffers, attention, num_rows, shape, has_adapters=has_adapters)
        assert logits is not None
        self.captured_logits[shape] = LogitsView(logits)

    def finish(
        self, step: torch.Tensor, counts: StepCounts, drafts: int, places: int, first_chunk_row: int,
        shape: StepShape | None, graphs: StepGraphs | None,
    ) -> None:  # fmt: skip
        """Takes, after all that draws, what a step drew, int32 words on the device, and drafts what may follow. The
        word behind the tokens of the rows that gained one becomes the number of drafted ones. counts: of sequences;
        drafts: 0, ENTER or DRAFT, of a model; shape: of the step's graph."""
        num_decodes, num_rows = counts.num_decode_rows, counts.num_sample_rows
        end = first_chunk_row + num_rows - num_decodes
        self._kernels.take_draws(self.state, self.buffers, num_decodes, places, end, self._rates)
        if self.drafter is None:
            if num_rows:
                assert self._speculation is not None
                self._kernels.look_up_drafts(
                    self.state, self.buffers, num_decodes, places, first_chunk_row, num_rows, self._speculation.lookup,
                    self._rates is not None,
                )  # fmt: skip
            return
        if drafts and graphs is not None and shape is not None:
            graphs.replay_see(shape)
        elif drafts:
            self.drafter.see(step, self.state, *self._taken[None], num_rows)
        if drafts == DRAFT and num_rows:
            if graphs is not None:
                graphs.replay_draft(num_rows)
            else:
                self.drafter.draft(self.state, num_rows)
            self.buffers.tokens[end : end + 1].copy_(self.drafter.rows.num_drafted)

    def see_padded(self, shape: StepShape) -> None:
        """The model that drafts takes in the padded step in the step buffer, of this shape: what a graph captures."""
        assert self.drafter is not None
        buffers, step = self._taken[shape]
        self.drafter.see(self._io.step_buffer, self.state, buffers, step, buffers.row_slot.shape[0])

    def draft_padded(self, shape: StepShape) -> None:
        """The model drafts for the rows of what it has taken in, at most shape.decode_rows: what a CUDA graph
        captures."""
        assert self.drafter is not None
        self.drafter.draft(self.state, shape.decode_rows)

    def _expand(self, step: torch.Tensor, buffers: StepBuffers, num_decode_rows: int) -> None:
        """Applies a packed step to the state, and expands its rows into `buffers`."""
        self._kernels.apply_deltas(step, self._max_num_seqs, self.state)
        self._kernels.expand_rows(step, self._max_num_seqs, self.state, self._block_size, buffers, num_decode_rows)

    def _attention(
        self, buffers: StepBuffers, num_decode_rows: int, max_seqlen_q: int, max_context_len: int
    ) -> AttentionMetadata:
        num_tokens = buffers.positions.shape[0]
        return AttentionMetadata(
            num_rows=buffers.row_slot.shape[0], num_decode_rows=num_decode_rows, row_slot=buffers.row_slot,
            context_lens=buffers.context_lens, cu_seqlens_q=buffers.cu_seqlens_q,
            block_tables=self.state.block_table.unbind(1), max_seqlen_q=max_seqlen_q,
            max_context_len=max_context_len, num_tokens=num_tokens,
        )  # fmt: skip

    def _forward(
        self, buffers: StepBuffers, attention: AttentionMetadata, num_sample_rows: int, shape: StepShape | None,
        keep_hidden: bool = False, has_adapters: bool = False,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        """Layers, head, sampling, and the sampled tokens back into the state and the token buffer.

        Samples for the first `num_sample_rows` rows. In a captured step these include chunks of unfinished prompts,
        whose tokens are not read: their slot's last token is written again when the prompt ends. Returns what
        `run_exact` does.
        """
        lines = Lines(*buffers.lines[:4]) if self.state.num_lines else None
        step = ForwardStep(buffers.positions, buffers.slot_mapping.unbind(), attention, self._backend, lines)
        step.has_places = self._speculation is not None
        if has_adapters and self.state.adapters is not None:
            step.adapters = buffers.token_adapters(self.state.adapters)
        if self.drafter is not None:
            step.taps = self.drafter.taps_of(buffers.positions.shape[0])
            self._taken[shape] = buffers, step
        sampled = buffers.logits_indices[:num_sample_rows] if attention.num_prefill_rows else None
        hidden, kept = self._hidden_states(buffers.input_ids, step, None if keep_hidden else sampled), None
        if keep_hidden:
            hidden, kept = wanted_rows(hidden, sampled), hidden
        if num_sample_rows == 0:
            return None, kept
        if not self._has_head:
            return hidden, kept
        row_slot = buffers.row_slot[:num_sample_rows]
        logits = self._model.logits(hidden)
        tokens, state, vocab_size = buffers.tokens[:num_sample_rows], self.state, self._vocab_size
        draws = Draws(row_slot, state.temperature, state.seed, buffers.sample_positions[:num_sample_rows])
        if self._group.size == 1:
            self._kernels.sample_tokens(logits, draws, vocab_size, state.last_token, tokens)
        else:
            keys = self._kernels.gumbel_argmax(logits, draws, self._model.lm_head.vocab_start, vocab_size)
            self._kernels.commit_tokens(self._group.all_reduce_max(keys), row_slot, state.last_token, tokens)
        return logits, kept

    def _hidden_states(self, input_ids: torch.Tensor, step: ForwardStep, wanted: torch.Tensor | None) -> torch.Tensor:
        """The layers, over the whole step or in halves: final hidden states [T, hidden], or of the tokens `wanted`."""
        attention, overlap = step.attention, self._group.overlap
        cut = None
        if overlap is not None and (overlap.sums is None or self._model.norm.is_add_rms_norm):
            takes = self._model.takes_halves
            cut = overlap.cut(attention.num_tokens, attention.num_decode_rows) if takes else None
        if cut is None:
            self._backend.prepare(attention)
            return self._model(input_ids, step, wanted)
        halves = step.halves(cut)
        for half in halves:
            self._backend.prepare(half.attention)
        return self._model.forward_two_batch(input_ids, halves, wanted)
