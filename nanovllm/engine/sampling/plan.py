"""Rank 0's part of a step's sampling: the section that goes out with it, and what comes back beside the tokens. No
torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nanovllm.engine.sequence import Sequence as Row
from nanovllm.engine.step_plan import StepPlan
from nanovllm.wire.sampling import CHANGED, COPIED, DRAWN, SectionBuilder


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
    scored: list[Row]
    """Whose log-probabilities are wanted, in the order of their lines."""
    prompt_parts: list[PromptPart]

    @property
    def brings_logprobs(self) -> bool:
        return bool(self.scored or self.prompt_parts)


def plan_sampling(plan: StepPlan) -> StepSampling | None:
    """The section of a scheduled step; None where all of its rows are plain."""
    builder = SectionBuilder()
    scored = _add_rows(builder, plan)
    _add_slots(builder, plan)
    parts = _add_prompts(builder, plan)
    if not (builder.num_rows or builder.resets or builder.mask_slots or parts):
        return None
    return StepSampling(builder.pack(), scored, parts)


def _add_rows(builder: SectionBuilder, plan: StepPlan) -> list[Row]:
    """The general rows; returns those that want log-probabilities. A loop over all rows of every step: kept lean."""
    scored, constrained = [], []
    rows, slots, records = builder.rows, builder.slots, builder.records
    for row, seq in enumerate(plan.seqs[: plan.num_sample_rows]):
        sampling = seq.sampling
        if sampling is None:
            continue
        kind = sampling.kind
        if sampling.has_edits:
            num_output_tokens = seq.num_tokens + seq.num_inflight_tokens - seq.num_prompt_tokens - 1
            if not sampling.is_general(num_output_tokens):
                continue
            edits = sampling.edits(seq.token_ids, num_output_tokens)
            if edits is not None:
                kind = COPIED
                builder.edit_rows.append(len(rows[COPIED]))
                builder.edits.append(edits)
        elif not sampling.always_general:
            continue
        if sampling.num_logprobs >= 0:
            if sampling.num_logprobs > builder.num_logprobs:
                builder.num_logprobs = sampling.num_logprobs
            builder.scored.append((kind, len(rows[kind])))
            scored.append(seq)
        elif kind == DRAWN:
            continue  # a bad word that does not begin here
        if kind == COPIED:
            builder.copies_filter |= sampling.filters
            builder.copied_flags |= sampling.flags
        elif kind == CHANGED:
            builder.changed_flags |= sampling.flags
        if sampling.matcher is not None:
            constrained.append(seq)
        rows[kind].append(row)
        slots[kind].append(seq.slot)
        records[kind].append(sampling.record)
    if constrained:
        _add_grammar_masks(builder, constrained)
    return scored


def _add_grammar_masks(builder: SectionBuilder, seqs: list[Row]) -> None:
    matchers = [seq.sampling.matcher for seq in seqs if seq.sampling is not None and seq.sampling.matcher is not None]
    masks = matchers[0].owner.fill_masks(matchers)
    for seq, mask in zip(seqs, masks, strict=True):
        allowed = seq.sampling.allowed_mask() if seq.sampling is not None else None
        if allowed is not None:
            mask &= allowed
    builder.mask_slots += [seq.slot for seq in seqs]
    builder.masks.append(masks)


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
            builder.masks.append(mask[None])


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
    """Hands a step's log-probabilities to the rows that asked: `rows` int32 [P, 3 + 2 k] by scored row, `prompt` int32
    [T, 3 + 2 k] by target. `gained`: who gained which token in it; others have ended meanwhile."""
    if step.scored:
        assert rows is not None
        alive = {seq for seq, _ in gained}
        for line, seq in enumerate(step.scored):
            if seq in alive:
                seq.sampling.logprob_rows.append(rows, line)  # type: ignore[union-attr]
    begin = 0
    for part in step.prompt_parts:
        assert prompt is not None and part.seq.sampling is not None
        part.seq.sampling.take_prompt_logprobs(part.first_position, prompt, range(begin, begin + part.count))
        begin += part.count
