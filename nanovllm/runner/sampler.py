"""One rank's general sampler: rows that filters, penalties, masks or log-probabilities set apart, after the step
itself.

The step (a CUDA graph, mostly) has drawn a token for every row by temperature; here the general rows are drawn again
from the logits it has left behind, where what they drew cannot stand. Nothing waits for the device.

With several ranks each holds a range of the vocabulary. Filters and penalties of a row need its whole distribution, so
the general rows' logits are gathered: [G, vocab / ranks] of every rank to every rank, in the model's type. From
there all ranks compute the same from the same bits. Rows that are plain move nothing but their winners.
"""

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.kernels import Kernels
from nanovllm.kernels.sampling.candidates import list_bytes
from nanovllm.kernels.sampling.filters import LIST_DEPTH
from nanovllm.kernels.sampling.logprobs import TOP_BUCKETS, top_bucket
from nanovllm.kernels.sampling.rows import Rows
from nanovllm.kernels.step.input import DeviceState, StepBuffers
from nanovllm.parallel.group import TensorParallelGroup
from nanovllm.wire.sampling import (
    CHANGED,
    DRAWN,
    FILTERED,
    MASK,
    PENALTIES,
    RECORD,
    RECORD_WORDS,
    Section,
    SectionBuilder,
    mask_words,
)

if TYPE_CHECKING:
    from nanovllm.runner.device_io import DeviceIO

_PROMPT_ROWS = 256  # prompt positions whose logits exist at a time
_MANY_ROWS = 64  # general rows that are drawn as any larger number is


class LogitsView:
    """The logits that a captured graph writes, without owning their memory, which is the graphs' pool's."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._pointer, self._dtype = logits.data_ptr(), logits.dtype
        self._shape, self._stride, self._item = tuple(logits.shape), logits.stride(), logits.element_size()
        self._device = logits.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = tuple(step * self._item for step in self._stride)
        return {"shape": self._shape, "strides": strides, "typestr": f"<i{self._item}", "data": (self._pointer, False),
                "version": 3}  # fmt: skip

    def tensor(self) -> torch.Tensor:
        """Valid until another graph is replayed."""
        return torch.as_tensor(self, device=self._device).view(self._dtype)


class GeneralSampler:
    """Counts and masks by slot, and the work of one step's general rows."""

    def __init__(
        self, kernels: Kernels, group: TensorParallelGroup, io: "DeviceIO", device: torch.device, vocab_size: int
    ) -> None:
        self._kernels, self._group, self._io, self._device = kernels, group, io, device
        self._vocab_size = vocab_size
        self._counts: torch.Tensor | None = None
        """int32 [S, vocab_size], from the first request with penalties on."""
        self._masks: torch.Tensor | None = None
        """int32 [S, vocab_size / 32], from the first request with a mask on."""
        self._identity = torch.empty(0, dtype=torch.int32, device=device)
        self._pinned: dict[tuple[str, int], torch.Tensor] = {}
        self._results: deque[tuple[torch.Tensor | None, torch.Tensor | None]] = deque()

    def reserve_bytes(self, max_num_seqs: int, dtype: torch.dtype) -> int:
        """Device memory that the most general steps may take: counts and masks, which stay, and while such a step runs
        edited copies and lists of all rows, their gathered logits, and logits of prompt tokens."""
        ids = self._vocab_size
        stays = 4 * max_num_seqs * (ids + mask_words(ids))
        rows = 4 * max_num_seqs * ids + list_bytes(max_num_seqs, ids, LIST_DEPTH)
        gathers = 2 if self._group.size > 1 else 0  # as they arrive, and in the order of ids
        whole = (gathers * max_num_seqs + (1 + gathers) * _PROMPT_ROWS) * ids * dtype.itemsize
        return stays + rows + whole

    # -- one step -----------------------------------------------------------------------------------------------

    def run(
        self,
        section: Section,
        logits: torch.Tensor | None,
        first_chunk_row: int,
        num_decode_rows: int,
        buffers: StepBuffers,
        state: DeviceState,
        hidden: torch.Tensor | None,
        model: Any,
    ) -> None:
        """Does what `section` asks after a step whose sampled rows left `logits` [rows, this rank's ids]; `hidden`
        [tokens, hidden size]: of all tokens of the step, where prompt log-probabilities are wanted."""
        words = self._upload(section, first_chunk_row, num_decode_rows)
        self._take_slots(section, words, state.temperature.shape[0])
        drawn = prompt = None
        if section.num_rows:
            assert logits is not None
            drawn = self._sample(
                section, words, *self._whole_logits(logits, words[section.where("rows")]), buffers, state
            )
        if section.num_targets:
            assert hidden is not None
            prompt = self._prompt_logprobs(section, words, hidden, model)
        if self._group.rank == 0 and (section.num_scored or section.num_targets):
            self._results.append((self._download("rows", drawn), self._download("prompt", prompt)))

    def _sample(
        self,
        section: Section,
        words: torch.Tensor,
        raw: torch.Tensor,
        raw_rows: torch.Tensor,
        buffers: StepBuffers,
        state: DeviceState,
    ) -> torch.Tensor | None:
        """Samples the general rows, each kind in its way; log-probabilities (see logprobs.py) of rows that want
        them. A row's kind is its own, so that what is computed for it does not depend on the others."""
        records = words[section.where("records")].view(-1, RECORD_WORDS)
        rows = Rows(
            raw, raw_rows, words[section.where("slots")], records, words[section.where("rows")], state.temperature,
            state.seed, buffers.sample_positions, buffers.tokens, state.last_token, self._vocab_size,
        )  # fmt: skip
        copied, changed, filtered, _ = section.of_kind
        if copied.start < copied.stop:
            counts, masks = self._tables(section.copied_flags)
            own = rows.part(copied)
            x = self._kernels.edit_logits(own, counts, masks, words[section.where("edits")].view(-1, 3))
            own = replace(own, logits=x, rows=self._range(len(own)))
            if section.copies_filter:
                self._kernels.sample_filtered(own, counts, has_winner=False)
            else:
                self._kernels.sample_kept(own, counts)
        if changed.start < changed.stop:
            counts, masks = self._tables(section.changed_flags)
            self._kernels.sample_kept(rows.part(changed), counts, masks=masks, edits=True)
        if filtered.start < filtered.stop:
            self._kernels.sample_filtered(rows.part(filtered), None, has_winner=True)
        if section.num_scored == 0:
            return None
        scored = words[section.where("scored")]
        scored_rows = words[section.where("scored_rows")]
        where = scored_rows if self._group.size == 1 else scored
        k = top_bucket(section.num_logprobs)
        return self._kernels.token_logprobs(raw, where, buffers.tokens, scored_rows, k, self._vocab_size)

    def _tables(self, flags: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Counts and masks, where any of the rows that are about to be drawn has them."""
        return self._counts if flags & PENALTIES else None, self._masks if flags & MASK else None

    def _whole_logits(self, logits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits over the whole vocabulary, and the row of them that each general row has."""
        if self._group.size == 1:
            return logits, rows
        return self._gathered(logits.index_select(0, rows)), self._range(rows.shape[0])

    def _gathered(self, local: torch.Tensor) -> torch.Tensor:
        """[rows, this rank's ids] -> [rows, ids of all ranks, padding at the end]."""
        shards = self._group.all_gather(local)
        return shards.transpose(0, 1).reshape(local.shape[0], -1)

    def _prompt_logprobs(self, section: Section, words: torch.Tensor, hidden: torch.Tensor, model: Any) -> torch.Tensor:
        indices, targets = words[section.where("hidden")], words[section.where("targets")]
        k = top_bucket(section.num_prompt_logprobs)
        parts = []
        for begin in range(0, section.num_targets, _PROMPT_ROWS):
            own = slice(begin, begin + _PROMPT_ROWS)
            logits = model.logits(hidden.index_select(0, indices[own]))
            if self._group.size > 1:
                logits = self._gathered(logits)
            rows = self._range(logits.shape[0])
            parts.append(self._kernels.token_logprobs(logits, rows, targets[own], rows, k, self._vocab_size))
        return torch.cat(parts)

    def _range(self, size: int) -> torch.Tensor:
        if self._identity.shape[0] < size:
            self._identity = torch.arange(size, dtype=torch.int32, device=self._device)
        return self._identity[:size]

    def dry_run(self, local_ids: int, dtype: torch.dtype, buffers: StepBuffers, state: DeviceState) -> None:
        """Goes through the steps whose kernels are worth having before the first request that needs them: filters,
        penalties and log-probabilities, for few rows and for many. `local_ids`: ids of this rank's logits. To be called
        where nothing is launched (startup/dry_run.py)."""
        many = min(_MANY_ROWS, state.temperature.shape[0])
        raw = torch.empty(many, local_ids * self._group.size, dtype=dtype, device=self._device)
        self._counts = torch.empty(1, self._vocab_size, dtype=torch.int32, device=self._device)
        for kind in (FILTERED, CHANGED):
            for num_rows in (1, many):
                self._dry_step(_made_up(kind, num_rows, -1), raw, buffers, state)
        for num_logprobs in TOP_BUCKETS[1:]:
            self._dry_step(_made_up(DRAWN, 1, num_logprobs), raw, buffers, state)
        self._counts = None

    def _dry_step(self, section: Section, raw: torch.Tensor, buffers: StepBuffers, state: DeviceState) -> None:
        words = torch.from_numpy(section.words.copy()).to(self._device)
        self._sample(section, words, raw, self._range(section.num_rows), buffers, state)

    # -- what stays on the device -------------------------------------------------------------------------------

    def _take_slots(self, section: Section, words: torch.Tensor, num_slots: int) -> None:
        if section.num_resets:
            if self._counts is None:
                self._counts = torch.zeros(num_slots, self._vocab_size, dtype=torch.int32, device=self._device)
            self._counts.index_fill_(0, words[section.where("resets")].long(), 0)
            slot, token_id, count = words[section.where("counts")].view(-1, 3).unbind(1)
            self._counts[slot.long(), token_id.long()] = count
        if section.num_masks:
            if self._masks is None:
                size = mask_words(self._vocab_size)
                self._masks = torch.zeros(num_slots, size, dtype=torch.int32, device=self._device)
            masks = words[section.where("masks")].view(section.num_masks, -1)
            self._masks[words[section.where("mask_slots")].long()] = masks

    # -- in and out ---------------------------------------------------------------------------------------------

    def _upload(self, section: Section, first_chunk_row: int, num_decode_rows: int) -> torch.Tensor:
        """The section's words on the device, its rows shifted by the padding between decodes and chunks."""
        staging = self._staging("section", section.words.size)
        host = staging.numpy()
        host[:] = section.words
        rows = host[section.where("rows")]
        rows[rows >= num_decode_rows] += first_chunk_row - num_decode_rows
        host[section.where("scored_rows")] = rows[host[section.where("scored")]]
        return staging.to(self._device, non_blocking=True)

    def _download(self, name: str, result: torch.Tensor | None) -> torch.Tensor | None:
        """Starts a copy to the host, which is complete when the step's tokens are."""
        if result is None or not self._io.is_cuda:
            return result
        host = self._staging(name, result.numel()).view(result.shape)
        return host.copy_(result, non_blocking=True)

    def _staging(self, name: str, size: int) -> torch.Tensor:
        """Host memory for a copy of this step; it is used again when the step's results have been taken."""
        if not self._io.is_cuda:
            return torch.empty(size, dtype=torch.int32, device="cpu")
        key = (name, self._io.turn)
        found = self._pinned.get(key)
        if found is None or found.shape[0] < size:
            found = self._pinned[key] = torch.empty(2 * size, dtype=torch.int32, device="cpu", pin_memory=True)
        return found[:size]

    def collect(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Log-probabilities of the oldest step that has any and was not asked for yet, by general row and by prompt
        target; its tokens must have been collected."""
        rows, prompt = self._results.popleft()
        return tuple(None if part is None else part.numpy().copy() for part in (rows, prompt))  # type: ignore[return-value]


def _made_up(kind: int, num_rows: int, num_logprobs: int) -> Section:
    """A section whose rows are all of one kind."""
    builder = SectionBuilder(num_logprobs=num_logprobs)
    builder.rows[kind], builder.slots[kind] = list(range(num_rows)), [0] * num_rows
    builder.records[kind] = [RECORD.pack(PENALTIES, 0, 0.5, 0.0, 0.0, 0.0, 1.0)] * num_rows
    builder.changed_flags = PENALTIES
    builder.scored = [(kind, row) for row in range(num_rows)] if num_logprobs >= 0 else []
    return Section(builder.pack())
