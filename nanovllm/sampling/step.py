"""Rank 0's part of a step's sampling: the section that goes out with it, and what comes back beside the tokens. No
torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nanovllm.engine.sequence import Sequence as Row
from nanovllm.engine.step_plan import StepPlan
from nanovllm.outputs import LogprobRow
from nanovllm.sampling.section import SectionBuilder
from nanovllm.sampling.structured import fill_masks


@dataclass
class PromptPart:
    """Prompt tokens of one row whose log-probabilities a step computes."""

    seq: Row
    first_position: int
    count: int


@dataclass
class StepSampling:
    """What a launched step will bring back."""

    section: np.ndarray
    logprob_rows: list[tuple[int, Row]]
    """General row, and whose it is, where log-probabilities are wanted."""
    prompt_parts: list[PromptPart]
    prompt_targets: list[int]

    @property
    def brings_logprobs(self) -> bool:
        return bool(self.logprob_rows or self.prompt_parts)


def plan_sampling(plan: StepPlan) -> StepSampling | None:
    """The section of a scheduled step; None where all of its rows are plain."""
    builder = SectionBuilder()
    logprob_rows = _add_rows(builder, plan)
    _add_slots(builder, plan)
    parts = _add_prompts(builder, plan)
    if not (builder.rows or builder.resets or builder.mask_slots or parts):
        return None
    return StepSampling(builder.pack(), logprob_rows, parts, builder.targets)


def _add_rows(builder: SectionBuilder, plan: StepPlan) -> list[tuple[int, Row]]:
    """The general rows; returns those that want log-probabilities. A loop over all rows of every step: kept lean."""
    logprob_rows, constrained = [], []
    rows, slots, records = builder.rows, builder.slots, builder.records
    for row, seq in enumerate(plan.seqs[: plan.num_sample_rows]):
        sampling = seq.sampling
        if sampling is None:
            continue
        num_output_tokens = seq.num_tokens + seq.num_inflight_tokens - seq.num_prompt_tokens - 1
        if not sampling.is_general(num_output_tokens):
            continue
        if sampling.has_edits:
            edits = sampling.edits(seq, num_output_tokens)
            if edits is not None:
                builder.edit_rows.append(len(rows))
                builder.edits.append(edits)
        if sampling.matcher is not None:
            constrained.append(seq)
        if sampling.num_logprobs >= 0:
            builder.num_logprobs = max(builder.num_logprobs, sampling.num_logprobs)
            logprob_rows.append((len(rows), seq))
        builder.filters |= sampling.filters
        builder.flags |= sampling.flags
        rows.append(row)
        slots.append(seq.slot)
        records.append(sampling.record)
    if constrained:
        _add_grammar_masks(builder, constrained)
    return logprob_rows


def _add_grammar_masks(builder: SectionBuilder, seqs: list[Row]) -> None:
    fill_masks([seq.sampling.matcher for seq in seqs if seq.sampling is not None and seq.sampling.matcher is not None])
    for seq in seqs:
        mask = seq.sampling.mask() if seq.sampling is not None else None
        assert mask is not None
        builder.mask_slots.append(seq.slot)
        builder.masks.append(mask)


def _add_slots(builder: SectionBuilder, plan: StepPlan) -> None:
    """What stays on the device by slot, of rows that took theirs in this step."""
    for seq in plan.new_slots:
        sampling = seq.sampling
        if sampling is None:
            continue
        if sampling.penalizes:
            builder.resets.append(seq.slot)
            builder.counts.append(sampling.counts(seq.slot, seq.token_ids, seq.num_prompt_tokens))
        if sampling.has_mask and sampling.matcher is None:
            mask = sampling.allowed_mask()
            assert mask is not None
            builder.mask_slots.append(seq.slot)
            builder.masks.append(mask)


def _add_prompts(builder: SectionBuilder, plan: StepPlan) -> list[PromptPart]:
    parts = []
    begin = plan.num_decode_rows
    for row in range(plan.num_decode_rows, plan.num_rows):
        seq, start, count = plan.seqs[row], plan.starts[row], plan.counts[row]
        sampling = seq.sampling
        if sampling is not None and sampling.num_prompt_logprobs_missing:
            end = min(start + count, seq.num_prompt_tokens - 1)
            if end > start:
                builder.hidden += range(begin, begin + end - start)
                builder.targets += seq.token_ids[start + 1 : end + 1]
                builder.num_prompt_logprobs = max(builder.num_prompt_logprobs, sampling.params.prompt_logprobs or 0)
                parts.append(PromptPart(seq, start + 1, end - start))
        begin += count
    return parts


def take_logprobs(
    step: StepSampling, gained: Sequence[tuple[Row, int]], rows: np.ndarray | None, prompt: np.ndarray | None
) -> None:
    """Hands a step's log-probabilities to the rows that asked: `rows` int32 [G, 2 + 2 k] by general row, `prompt` int32
    [T, 2 + 2 k] by target. `gained`: who gained which token in it; others have ended meanwhile."""
    if step.logprob_rows:
        assert rows is not None
        token_of = dict(gained)
        for general_row, seq in step.logprob_rows:
            if seq in token_of and seq.sampling is not None and seq.sampling.logprob_rows is not None:
                seq.sampling.logprob_rows.append(LogprobRow(token_of[seq], rows, general_row))
    begin = 0
    for part in step.prompt_parts:
        assert prompt is not None and part.seq.sampling is not None
        targets = step.prompt_targets[begin : begin + part.count]
        found = [LogprobRow(target, prompt, begin + i) for i, target in enumerate(targets)]
        part.seq.sampling.take_prompt_logprobs(part.first_position, found)
        begin += part.count
