"""Work of one rank after a step whose tokens are known: a model takes the step in, and drafts what may follow."""

from dataclasses import replace
from typing import Any

import torch

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.kernels import Kernels
from nanovllm.kernels.sampling.gumbel import Draws
from nanovllm.kernels.step.state import DeviceState, DraftRows, StepBuffers
from nanovllm.layers.step import ForwardStep
from nanovllm.model_config import DrafterConfig
from nanovllm.parallel.group import TensorParallelGroup


class ModelDrafter:
    """A model that drafts (models/drafters/), and the tensors that it works on. `see` and then `draft` read nothing on
    the host that a captured graph could not know, but for the attention backend."""

    rows: DraftRows
    taps: torch.Tensor
    """[tokens, taps * hidden of the target]: residual streams of a step."""

    def __init__(
        self, model: Any, settings: DrafterConfig, kernels: Kernels, group: TensorParallelGroup,
        backend: AttentionBackend, max_num_seqs: int, max_model_len: int, block_size: int, num_drafts: int,
    ) -> None:  # fmt: skip
        """model: the Drafter."""
        self.model, self.settings, self._kernels, self._group, self._backend = model, settings, kernels, group, backend
        self.max_num_seqs, self._max_model_len, self._block_size = max_num_seqs, max_model_len, block_size
        self._num_drafts = num_drafts

    def allocate(self, max_tokens: int, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """Buffers of steps of at most so many tokens. width: hidden size of the target."""
        self.taps = torch.zeros(max_tokens, len(self.settings.taps) * width, dtype=dtype, device=device)
        self.rows = DraftRows.allocate(self.max_num_seqs, self.settings.model.hidden_size, dtype, device)

    def taps_of(self, num_tokens: int) -> dict[int, torch.Tensor]:
        """Tensors in which a step of so many tokens leaves residual streams, by layer."""
        parts = self.taps[:num_tokens].chunk(len(self.settings.taps), 1)
        return dict(zip(self.settings.taps, parts, strict=True))

    def see(
        self, packed: torch.Tensor, state: DeviceState, buffers: StepBuffers, step: ForwardStep, num_rows: int
    ) -> None:
        """Makes an entry of each token of a step, int32 words, after take_draws. num_rows: rows that may have gained a
        token, at most."""
        rows, num_rows = self.rows, min(num_rows, self.max_num_seqs)
        decode_rows = step.attention.num_decode_rows
        hidden = self.model.taken_in(self.taps[: buffers.next_ids.shape[0]])
        # Right before the look-up of embeddings, which waits for its end: kernels behind that may start early.
        self._kernels.follow_rows(packed, self.max_num_seqs, state, buffers, rows, decode_rows)
        step = replace(step, taps={}, wanted=rows.index[:num_rows])
        for part, found in zip(rows.hidden, self.model(buffers.next_ids, hidden, step), strict=True):
            part[:num_rows].copy_(found)

    def draft(self, state: DeviceState, num_rows: int) -> None:
        """Drafts state.drafts for the first `num_rows` of `rows`, padding or not."""
        rows, model = self.rows, self.model
        [table] = {layer.cache.table for layer in model.attention_layers()}
        normed, hidden = rows.hidden[:, :num_rows].unbind()
        draws = Draws(rows.row_slot[:num_rows], state.temperature, state.seed, rows.sample_positions[:num_rows])
        for place in range(self._num_drafts):
            if place:
                step = self._step(state, num_rows, table)
                self._backend.prepare(step.attention)
                normed, hidden = model(rows.input_ids[:num_rows], hidden, step)
            keys = self._kernels.draw_drafts(model.logits(normed), draws, model.offsets, model.vocab_start)
            if self._group.size > 1:
                keys = self._group.all_reduce_max(keys)
            self._kernels.place_drafts(
                keys, rows, state, place, table, self._block_size, self._max_model_len
            )  # fmt: skip

    def _step(self, state: DeviceState, num_rows: int, table: int) -> ForwardStep:
        """A step of one entry for each row."""
        rows = self.rows
        attention = AttentionMetadata(
            num_rows=num_rows, num_decode_rows=num_rows, row_slot=rows.row_slot[:num_rows],
            context_lens=rows.context_lens[:num_rows], cu_seqlens_q=rows.cu_seqlens[: num_rows + 1],
            block_tables=state.block_table.unbind(1), max_seqlen_q=1, max_context_len=self._max_model_len,
            num_tokens=num_rows, is_captured=True,
        )  # fmt: skip
        mappings = (rows.slot_mapping[:num_rows],) * (table + 1)
        return ForwardStep(rows.positions[:num_rows], mappings, attention, self._backend)
