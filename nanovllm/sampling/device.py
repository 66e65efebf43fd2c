"""One rank's general sampler: rows that filters, penalties, masks or log-probabilities set apart, after the step
itself.

The step (a CUDA graph, mostly) has drawn a token for every row by temperature; here the general rows are drawn again
from the logits it has left behind, and their tokens written over. Nothing waits for the device.

With several ranks each holds a range of the vocabulary. Filters and penalties of a row need its whole distribution, so
the general rows' logits are gathered: [G, vocab / ranks] of every rank to every rank, in the model's type. From
there all ranks compute the same from the same bits. Rows that are plain move nothing but their winners.
"""

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.kernels import Kernels
from nanovllm.kernels.logprobs import top_bucket
from nanovllm.kernels.step_input import DeviceState, StepBuffers
from nanovllm.parallel.group import TensorParallelGroup
from nanovllm.sampling.section import MASK, PENALTIES, RECORD_WORDS, Section, mask_words

if TYPE_CHECKING:
    from nanovllm.worker.device_io import DeviceIO

_PROMPT_ROWS = 256  # prompt positions whose logits exist at a time


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
            drawn = self._draw(section, words, logits, buffers, state)
        if section.num_targets:
            assert hidden is not None
            prompt = self._prompt_logprobs(section, words, hidden, model)
        if self._group.rank == 0 and (section.num_logprobs >= 0 or section.num_targets):
            self._results.append((self._download("rows", drawn), self._download("prompt", prompt)))

    def _draw(
        self, section: Section, words: torch.Tensor, logits: torch.Tensor, buffers: StepBuffers, state: DeviceState
    ) -> torch.Tensor | None:
        """Draws the general rows; their log-probabilities (see kernels/logprobs.py) where any row wants them."""
        rows, slots = words[section.where("rows")], words[section.where("slots")]
        records = words[section.where("records")].view(-1, RECORD_WORDS)
        raw, raw_rows = self._whole_logits(logits, rows)
        x, x_rows = raw, raw_rows
        counts = self._counts if section.flags & PENALTIES else None
        masks = self._masks if section.flags & MASK else None
        if section.flags or section.num_edits:
            edits = words[section.where("edits")].view(-1, 3)
            x = self._kernels.edit_logits(raw, raw_rows, slots, records, counts, masks, edits, self._vocab_size)
            x_rows = self._range(section.num_rows)
        thresholds = None
        if section.filters:
            thresholds = self._kernels.find_thresholds(x, x_rows, slots, records, state.temperature, self._vocab_size)
        positions = buffers.sample_positions.index_select(0, rows)
        self._kernels.draw_survivors(
            x, x_rows, slots, records, state.temperature, state.seed, positions, thresholds, rows, buffers.tokens,
            state.last_token, counts, self._vocab_size,
        )  # fmt: skip
        if section.num_logprobs < 0:
            return None
        tokens = buffers.tokens.index_select(0, rows)
        return self._kernels.token_logprobs(raw, raw_rows, tokens, top_bucket(section.num_logprobs), self._vocab_size)

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
            parts.append(self._kernels.token_logprobs(logits, rows, targets[own], k, self._vocab_size))
        return torch.cat(parts)

    def _range(self, size: int) -> torch.Tensor:
        if self._identity.shape[0] < size:
            self._identity = torch.arange(size, dtype=torch.int32, device=self._device)
        return self._identity[:size]

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
            return torch.empty(size, dtype=torch.int32)
        key = (name, self._io.turn)
        found = self._pinned.get(key)
        if found is None or found.shape[0] < size:
            found = self._pinned[key] = torch.empty(2 * size, dtype=torch.int32, pin_memory=True)
        return found[:size]

    def collect(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Log-probabilities of the oldest step that has any and was not asked for yet, by general row and by prompt
        target; its tokens must have been collected."""
        rows, prompt = self._results.popleft()
        return tuple(None if part is None else part.numpy().copy() for part in (rows, prompt))  # type: ignore[return-value]
