"""One rank's sampler of option rows: those with filters, penalties, masks or log-probabilities.

The step (a CUDA graph, mostly) has sampled a token for every row by temperature. Here option rows whose token does not
hold are sampled again from the logits that the step has left. Nothing waits for the device but log-probabilities of a
prompt with more than MAX_FEW ids.

With several ranks each holds a range of the vocabulary. Filters and penalties of a row need its whole distribution, so
the option rows' logits are gathered: [G, vocab / ranks] of every rank to every rank, in the model's type. From
there all ranks compute the same from the same bits. Rows that are plain move nothing but their winners.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.kernels import Kernels
from nanovllm.kernels.sampling.candidates import list_bytes
from nanovllm.kernels.sampling.gumbel import MIN_TEMPERATURE
from nanovllm.kernels.sampling.logprobs import LIST_DEPTH, TOP_BUCKETS, Scored, token_logprobs_reference, top_bucket
from nanovllm.kernels.sampling.rows import Rows
from nanovllm.kernels.step.state import DeviceState, StepBuffers
from nanovllm.model_config import ModelConfig
from nanovllm.parallel.group import TensorParallelGroup
from nanovllm.wire.sampling import (
    CHANGED,
    EDIT_WORDS,
    EDITED_FEW,
    FILTERED,
    MASK,
    MAX_FEW,
    PENALTIES,
    RAW_FEW,
    RECORD,
    RECORD_WORDS,
    SCORES,
    TEMPERED,
    UNCHANGED,
    Section,
    SectionBuilder,
    StepScores,
    mask_words,
)

if TYPE_CHECKING:
    from nanovllm.runner.device_io import DeviceIO

_PROMPT_ROWS = 256  # prompt positions whose logits exist at a time
_MANY_ROWS = 64  # option rows that are sampled as any larger number is
_SORTED_ROWS = 16  # whose likeliest ids, where many are wanted, are sorted at a time


def option_bytes(model: ModelConfig, ranks: int, max_num_seqs: int, dtype: torch.dtype, places: int = 1) -> int:
    """Device memory that the most general steps over a model's vocabulary may take: counts and masks, which stay, and
    while such a step runs edited copies and lists of all rows, their gathered logits, and logits of prompt tokens. None
    where the model embeds, for it samples nothing."""
    ids = model.vocab_size if model.pooling is None else 0
    stays = 4 * max_num_seqs * (ids + places * mask_words(ids))
    kept = 3 * max_num_seqs * ids  # bits on their way to be packed
    many = 8 * max_num_seqs * ids + 40 * _SORTED_ROWS * ids  # the whole vocabulary by likelihood, and sorting it
    rows = 4 * max_num_seqs * ids + list_bytes(max_num_seqs, ids, LIST_DEPTH) + max(kept, many)
    gathers = 2 if ranks > 1 else 0  # as they arrive, and in the order of ids
    whole = (gathers * max_num_seqs + (1 + gathers) * _PROMPT_ROWS) * ids * dtype.itemsize
    return stays + rows + whole


class OptionSampler:
    """Counts and masks by slot, and the work of one step's option rows."""

    def __init__(
        self, kernels: Kernels, group: TensorParallelGroup, io: "DeviceIO", device: torch.device, vocab_size: int
    ) -> None:
        self._kernels, self._group, self._io, self._device = kernels, group, io, device
        self._vocab_size = vocab_size
        self._counts: torch.Tensor | None = None
        """int32 [S, vocab_size]; None until a request has penalties."""
        self._masks: torch.Tensor | None = None
        """int32 [places * S, vocab_size / 32]; None until a request has a mask."""
        self._drafted = torch.empty(0, dtype=torch.int32, device=device)
        """Slots whose drafts the host wants to know after this step."""
        self._counted: Rows | None = None
        """Rows of this step that may have penalties."""
        self._identity = torch.empty(0, dtype=torch.int32, device=device)
        self._pinned: dict[tuple[str, int], torch.Tensor] = {}

    # -- one step -----------------------------------------------------------------------------------------------

    def run(
        self, section: Section, logits: torch.Tensor | None, first_chunk_row: int, num_decode_rows: int,
        buffers: StepBuffers, state: DeviceState, hidden: torch.Tensor | None, model: Any,
    ) -> StepScores | None:  # fmt: skip
        """Does what `section` asks after a step whose sampled rows left `logits` [rows, this rank's ids]; `hidden`
        [tokens, hidden size]: of all tokens of the step, where prompt log-probabilities are wanted. Returns, on rank 0,
        what is there on the host when the step's tokens are."""
        section = self._upload(section, first_chunk_row, num_decode_rows)
        places = 1 if state.drafts is None else 1 + state.drafts.shape[1]
        self._take_slots(section, state.temperature.shape[0], places)
        self._drafted, self._counted = section["drafted"], None
        scored: list[torch.Tensor | None] = [None] * len(SCORES)
        prompt: list[torch.Tensor | None] = [None, None]
        kept = None
        if section.size("rows"):
            assert logits is not None
            scored, kept = self._sample(section, *self._whole_logits(logits, section["rows"]), buffers, state)
        if section.size("targets"):
            assert hidden is not None
            prompt = self._prompt_logprobs(section, hidden, model)
        asked = ("scored", "targets", "kept", "drafted")
        if self._group.rank == 0 and any(section.size(name) for name in asked):
            return StepScores(
                [self._download(f"rows {kind}", table) for kind, table in enumerate(scored)],
                [self._download(f"prompt {kind}", table) for kind, table in enumerate(prompt)],
                self._download("kept", kept),
            )
        return None

    def finish(self, scores: StepScores | None, state: DeviceState) -> None:
        """Last in the step: counts the tokens that hold, and adds what was drafted for rows that want to know to
        `scores`, which `run` has returned."""
        if self._counted is not None and self._counts is not None:
            self._kernels.count_tokens(self._counted, self._counts)
        if scores is not None and self._drafted.shape[0] and state.drafts is not None:
            scores.drafts = self._download("drafts", state.drafts.index_select(0, self._drafted))

    def hand_out(self, hidden: torch.Tensor) -> StepScores | None:
        """Sends the final hidden states [rows, hidden] of rows that end to the host, as float32; on rank 0."""
        if self._group.rank != 0:
            return None
        words = self._download("pooled", hidden.float().view(torch.int32))
        assert words is not None
        return StepScores([], [], None, words.view(np.float32))

    def _sample(
        self, section: Section, raw: torch.Tensor, raw_rows: torch.Tensor, buffers: StepBuffers, state: DeviceState
    ) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:  # fmt: skip
        """Samples the option rows, each kind in its way; log-probabilities (see logprobs.py) of rows that want them,
        and the ids that could be sampled. A row's kind is its own, so that what is computed for it does not depend on
        the others."""
        records = section["records"].view(-1, RECORD_WORDS)
        rows = Rows(
            raw, raw_rows, section["slots"], records, section["rows"], state.temperature, state.seed,
            buffers.sample_positions, buffers.input_ids, buffers.tokens, state.last_token, self._vocab_size,
        )  # fmt: skip
        copied, changed, filtered, _ = section.of_kind
        if (section.copied_flags | section.changed_flags) & PENALTIES:
            self._counted = rows.part(slice(copied.start, changed.stop))
        x = least = kept = None
        if copied.start < copied.stop:
            counts, masks = self._tables(section.copied_flags)
            edited = rows.part(copied)
            x = self._kernels.edit_logits(edited, counts, masks, section["edits"].view(-1, EDIT_WORDS))
            edited = replace(edited, logits=x, rows=self._range(len(edited)))
            if section.copies_filter:
                least = self._kernels.sample_filtered(edited, has_winner=False)
            else:
                self._kernels.sample_kept(edited)
                least = torch.full_like(x[:, 0], -torch.inf)
        if changed.start < changed.stop:
            counts, masks = self._tables(section.changed_flags)
            self._kernels.sample_kept(rows.part(changed), None, counts, masks)
        if filtered.start < filtered.stop:
            self._kernels.sample_filtered(rows.part(filtered), has_winner=True)
        if section.size("kept"):
            assert x is not None and least is not None
            kept = _kept_bits(x, least, section["kept"])
        return [self._scores(kind, section, rows, x, least) for kind in SCORES], kept

    def _scores(
        self, kind: int, section: Section, rows: Rows, x: torch.Tensor | None, least: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Log-probabilities of one of SCORES. x, least: edited logits and thresholds of the rows of kind COPIED."""
        which = section.of_score[kind]
        if which.start == which.stop:
            return None
        scored, scored_rows = section["scored"][which], section["scored_rows"][which]
        logits, where = rows.logits, scored_rows if self._group.size == 1 else scored
        scale = None
        if kind >= EDITED_FEW or section.is_tempered:
            index = scored.long()
            heat = rows.temperature[rows.slots[index].long()]
            tempered = ((rows.records[index, 0] & TEMPERED) != 0) & (heat >= MIN_TEMPERATURE)
            scale = torch.where(tempered, 1 / heat, 1.0)
            floor = torch.full_like(scale, -torch.inf)
            if kind >= EDITED_FEW:
                assert x is not None and least is not None
                logits, where, floor = x, scored, least[index]
        given = Scored(logits, where, rows.tokens, scored_rows, scale, None if scale is None else floor)
        return self._token_logprobs(given, section.num_logprobs[kind])

    def _token_logprobs(self, scored: Scored, k: int) -> torch.Tensor:
        """Computes token_logprobs (kernels/sampling/logprobs.py) for any k: int32 [N, 3 + 2 k]."""
        if k <= MAX_FEW:
            return self._kernels.token_logprobs(scored, top_bucket(k), self._vocab_size)
        parts = scored.split(_SORTED_ROWS)
        return torch.cat([token_logprobs_reference(part, k, self._vocab_size) for part in parts])

    def _tables(self, flags: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Counts and masks, each None where no row that is about to be sampled has any."""
        return self._counts if flags & PENALTIES else None, self._masks if flags & MASK else None

    def _whole_logits(self, logits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits over the whole vocabulary, and the row of them that each option row has."""
        if self._group.size == 1:
            return logits, rows
        return self._gathered(logits.index_select(0, rows)), self._range(rows.shape[0])

    def _gathered(self, local: torch.Tensor) -> torch.Tensor:
        """[rows, this rank's ids] -> [rows, ids of all ranks, padding at the end]."""
        shards = self._group.all_gather(local)
        return shards.transpose(0, 1).reshape(local.shape[0], -1)

    def _prompt_logprobs(self, section: Section, hidden: torch.Tensor, model: Any) -> list[torch.Tensor | None]:
        """Tables of prompt targets: of those that want few likeliest ids, and of those that want many, which leave the
        device piece by piece."""
        indices, targets = section["hidden"], section["targets"]
        tables: list[torch.Tensor | None] = []
        for which, k in zip(section.of_prompt, section.num_prompt_logprobs, strict=True):
            parts = []
            for begin in range(which.start, which.stop, _PROMPT_ROWS):
                piece = slice(begin, min(begin + _PROMPT_ROWS, which.stop))
                logits = model.logits(hidden.index_select(0, indices[piece]))
                if self._group.size > 1:
                    logits = self._gathered(logits)
                rows = self._range(logits.shape[0])
                part = self._token_logprobs(Scored(logits, rows, targets[piece], rows), k)
                parts.append(part if k <= MAX_FEW else part.cpu())
            tables.append(torch.cat(parts) if parts else None)
        return tables

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
            self._dry_step(_made_up(UNCHANGED, 1, num_logprobs), raw, buffers, state)
        for num_logprobs in TOP_BUCKETS[:2]:
            self._dry_step(_made_up(UNCHANGED, 1, num_logprobs, TEMPERED), raw, buffers, state)
        self._counts = None

    def _dry_step(self, section: Section, raw: torch.Tensor, buffers: StepBuffers, state: DeviceState) -> None:
        section = section.on(torch.from_numpy(section.words.copy()).to(self._device))
        self._sample(section, raw, self._range(section.size("rows")), buffers, state)
        self.finish(None, state)

    # -- what stays on the device -------------------------------------------------------------------------------

    def _take_slots(self, section: Section, num_slots: int, places: int) -> None:
        if section.size("resets"):
            if self._counts is None:
                self._counts = torch.zeros(num_slots, self._vocab_size, dtype=torch.int32, device=self._device)
            self._counts.index_fill_(0, section["resets"].long(), 0)
            slot, token_id, count = section["counts"].view(-1, 3).unbind(1)
            self._counts[slot.long(), token_id.long()] = count
        if section.size("masks"):
            if self._masks is None:
                size = mask_words(self._vocab_size)
                self._masks = torch.zeros(places * num_slots, size, dtype=torch.int32, device=self._device)
            masks = section["masks"].view(section.size("mask_slots"), -1)
            self._masks[section["mask_slots"].long()] = masks

    # -- in and out ---------------------------------------------------------------------------------------------

    def _upload(self, section: Section, first_chunk_row: int, num_decode_rows: int) -> Section:
        """The section on the device, its rows shifted by the padding between decodes and chunks."""
        staging = self._staging("section", section.words.size)
        host = section.on(staging.numpy())
        host.words[:] = section.words
        rows = host["rows"]
        rows[rows >= num_decode_rows] += first_chunk_row - num_decode_rows
        host["scored_rows"][:] = rows[host["scored"]]
        return section.on(staging.to(self._device, non_blocking=True))

    def _download(self, name: str, result: torch.Tensor | None) -> np.ndarray | None:
        """Starts a copy to the host, which is complete when the step's tokens are."""
        if result is None or not result.is_cuda:
            return None if result is None else result.numpy()
        host = self._staging(name, result.numel()).view(result.shape)
        return host.copy_(result, non_blocking=True).numpy()

    def _staging(self, name: str, size: int) -> torch.Tensor:
        """Host memory for a copy of this step, which is used again once the step's results have been taken."""
        if not self._io.is_cuda:
            return torch.empty(size, dtype=torch.int32, device="cpu")
        key = (name, self._io.ring_index)
        found = self._pinned.get(key)
        if found is None or found.shape[0] < size:
            found = self._pinned[key] = torch.empty(2 * size, dtype=torch.int32, device="cpu", pin_memory=True)
        return found[:size]


def _kept_bits(x: torch.Tensor, least: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
    """int32 [lines, mask_words]: bits of the ids of these lines of x [any, ids] that are at least `least` [any]."""
    x = x.index_select(0, lines)
    kept = ((x >= least[lines.long()].unsqueeze(1)) & (x > -torch.inf)).to(torch.uint8)
    kept = torch.nn.functional.pad(kept, (0, 32 * mask_words(x.shape[1]) - x.shape[1])).view(len(x), -1, 8)
    places = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device="cpu").to(x.device)
    return (kept * places).sum(2, dtype=torch.uint8).view(torch.int32)


def _made_up(kind: int, num_rows: int, num_logprobs: int, flags: int = PENALTIES) -> Section:
    """Section of rows of one kind, for a dry run."""
    builder = SectionBuilder(is_tempered=bool(flags & TEMPERED))
    builder.num_logprobs[RAW_FEW] = num_logprobs
    builder.rows[kind], builder.slots[kind] = list(range(num_rows)), [0] * num_rows
    builder.records[kind] = [RECORD.pack(flags, 0, 0.5, 0.0, 0.0, 0.0, 1.0)] * num_rows
    builder.changed_flags = PENALTIES
    builder.scored[RAW_FEW] = [(kind, row) for row in range(num_rows)] if num_logprobs >= 0 else []
    return Section(builder.pack())
