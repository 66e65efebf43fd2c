"""Rank 0's part of a step's sampling: the section that goes out with it, and what comes back beside the tokens. No
torch."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanovllm.engine.sampling.row import SamplingRow
from nanovllm.engine.sampling.structured import Matcher
from nanovllm.engine.schedule import Schedule
from nanovllm.engine.sequence import Sequence as Row
from nanovllm.wire.sampling import (
    CHANGED,
    COPIED,
    EDITED_FEW,
    MAX_FEW,
    SCORES,
    UNCHANGED,
    SectionBuilder,
    StepScores,
    placed,
)


@dataclass
class PromptPart:
    """Prompt tokens of one row whose log-probabilities a step computes."""

    seq: Row
    first_position: int
    count: int


class Constrained(NamedTuple):
    """An option row under a grammar."""

    seq: Row
    place: int
    """Place among those of the sequence in the step."""
    sampling: SamplingRow


@dataclass
class StepSampling:
    """Sampling section of a launched step, and the rows that its results belong to."""

    section: np.ndarray
    scored: list[list[Row]]
    """Rows whose log-probabilities are wanted, in the order of SCORES and of their lines."""
    kept: list[Row]
    """Rows whose ids that could be sampled are wanted, in the order of their lines."""
    prompt_parts: list[list[PromptPart]]
    """Prompt parts of rows that want few likeliest ids, and of those that want many."""
    drafted: list[Row]
    """Rows that want to know their drafts, in the order of their lines."""


def sampling_of(schedule: Schedule, max_num_seqs: int, speculates: bool = False) -> StepSampling | None:
    """The section of a scheduled step; None where all of its rows are plain. speculates: rows may have drafts."""
    builder = SectionBuilder()
    scored, kept, constrained = _add_rows(builder, schedule, max_num_seqs)
    rows = schedule.seqs[: schedule.num_sample_rows] if speculates else []
    drafted = [seq for seq in rows if seq.needs_last_token]
    builder.drafted = [seq.slot for seq in drafted]
    if constrained:
        _add_grammar_masks(builder, constrained, max_num_seqs)
    _add_slots(builder, schedule)
    parts = _add_prompts(builder, schedule)
    if not (any(builder.rows) or builder.resets or builder.mask_slots or any(parts) or drafted):
        return None
    return StepSampling(builder.pack(), scored, kept, parts, drafted)


def _add_rows(
    builder: SectionBuilder, schedule: Schedule, max_num_seqs: int
) -> tuple[list[list[Row]], list[Row], list[Constrained]]:
    """The option rows; returns those that want log-probabilities, those that want the ids that could be sampled, and
    those under a grammar. A loop over all rows of every step: kept lean."""
    scored: list[list[Row]] = [[] for _ in SCORES]
    constrained: list[Constrained] = []
    kept: list[Row] = []
    rows, slots, records = builder.rows, builder.slots, builder.records
    sampled: Iterator[tuple[int, Row]] = enumerate(schedule.seqs[: schedule.num_sample_rows])
    places, num_wide = schedule.places, 0
    if places > 1:
        sampled, num_wide = _drawn_rows(schedule), schedule.num_decode_rows * places
    for row, seq in sampled:
        sampling = seq.sampling
        if sampling is None:
            continue
        kind, record, place = sampling.kind, sampling.record, row % places if row < num_wide else 0
        if sampling.has_edits:
            edits = sampling.edits(seq.token_ids, seq.num_least_tokens - seq.num_prompt_tokens - 1, place)
            if edits is not None:
                kind = COPIED
                builder.edit_rows.append(len(rows[COPIED]))
                builder.edits.append(edits)
        if sampling.num_logprobs >= 0:
            score = (sampling.num_logprobs > MAX_FEW) + EDITED_FEW * (kind == COPIED and sampling.is_processed)
            if sampling.num_logprobs > builder.num_logprobs[score]:
                builder.num_logprobs[score] = sampling.num_logprobs
            builder.is_tempered |= sampling.is_processed
            builder.scored[score].append((kind, len(rows[kind])))
            scored[score].append(seq)
        elif kind == UNCHANGED:
            continue  # no option concerns this token
        if kind == COPIED:
            builder.copies_filter |= sampling.filters
            builder.copied_flags |= sampling.flags
            if sampling.kept_ids is not None:
                builder.kept.append(len(rows[COPIED]))
                kept.append(seq)
        elif kind == CHANGED:
            builder.changed_flags |= sampling.flags
        if sampling.matcher is not None:
            constrained.append(Constrained(seq, place, sampling))
        if place:
            record = placed(record, place, place * max_num_seqs if sampling.matcher is not None else 0)
        rows[kind].append(row)
        slots[kind].append(seq.slot)
        records[kind].append(record)
    return scored, kept, constrained


def _drawn_rows(schedule: Schedule) -> Iterator[tuple[int, Row]]:
    """Rows on the device that may bring a token, of a step with several places a decode; and whose they are."""
    places, num_decodes = schedule.places, schedule.num_decode_rows
    for row, seq in enumerate(schedule.seqs[:num_decodes]):
        for place in range(places):
            yield row * places + place, seq
    yield from enumerate(schedule.seqs[num_decodes : schedule.num_sample_rows], num_decodes * places)


def _add_grammar_masks(builder: SectionBuilder, constrained: list[Constrained], max_num_seqs: int) -> None:
    """The masks of rows, one after another those of the places of each: behind a draft that the grammar does not admit
    none is needed, for no token is drawn that equals it."""
    matchers: list[Matcher] = []
    rows, current = [], None
    for one in constrained:
        if one.place == 0:
            current = one.sampling.matcher
        elif current is not None:
            current = current.after(draft) if (draft := one.sampling.draft(one.place)) >= 0 else None
        if current is not None:
            builder.mask_slots.append(one.seq.slot + one.place * max_num_seqs)
            matchers.append(current)
            rows.append(one.sampling)
    masks = matchers[0].owner.fill_masks(matchers)
    for row, mask in zip(rows, masks, strict=True):
        if (allowed := row.allowed_mask()) is not None:
            mask &= allowed
    builder.masks.append(masks)


def _add_slots(builder: SectionBuilder, schedule: Schedule) -> None:
    """Adds the state that stays on the device by slot, for rows that took their slot in this step."""
    for seq in schedule.new_slots:
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


def _add_prompts(builder: SectionBuilder, schedule: Schedule) -> list[list[PromptPart]]:
    parts: list[list[PromptPart]] = [[], []]
    begin = schedule.num_decode_rows * schedule.places
    for row in range(schedule.num_decode_rows, schedule.num_rows):
        seq, start, count = schedule.seqs[row], schedule.starts[row], schedule.counts[row]
        sampling = seq.sampling
        if sampling is not None and sampling.num_prompt_logprobs_missing:
            first = max(start, sampling.prompt_logprob_start - 1)
            end = min(start + count, seq.num_prompt_tokens - 1)
            if end > first:
                many = sampling.num_prompt_logprobs > MAX_FEW
                builder.hidden[many] += range(begin + first - start, begin + end - start)
                builder.targets[many] += seq.token_ids[first + 1 : end + 1]
                most = builder.num_prompt_logprobs
                most[many] = max(most[many], sampling.num_prompt_logprobs)
                parts[many].append(PromptPart(seq, first + 1, end - first))
        begin += count
    return parts


def take_scores(step: StepSampling, gained: Sequence[tuple[Row, int]], found: StepScores) -> None:
    """Hands what a step brings beside its tokens to the sequences that asked. `gained`: who gained which token in it;
    others have ended meanwhile."""
    for seqs, table in zip(step.scored, found.scored, strict=True):
        for line, seq in _lines_of_gained(seqs, gained):
            assert table is not None and seq.sampling is not None and seq.sampling.logprob_rows is not None
            seq.sampling.logprob_rows.append(table, line)
    for line, seq in _lines_of_gained(step.kept, gained):
        assert found.kept is not None and seq.sampling is not None and seq.sampling.kept_ids is not None
        seq.sampling.kept_ids.append(found.kept, line)
    for line, seq in enumerate(step.drafted):
        assert found.drafts is not None and seq.sampling is not None
        seq.sampling.drafts = found.drafts[line].tolist()
    for parts, table in zip(step.prompt_parts, found.prompt, strict=True):
        begin = 0
        for part in parts:
            assert table is not None and part.seq.sampling is not None
            part.seq.sampling.take_prompt_logprobs(part.first_position, table, range(begin, begin + part.count))
            begin += part.count


def _lines_of_gained(seqs: Sequence[Row], gained: Sequence[tuple[Row, int]]) -> Iterator[tuple[int, Row]]:
    """Lines of a table with a line for each of `seqs`, and whose these are; of several of one sequence the first, as
    many as it gained."""
    left = Counter(seq for seq, _ in gained) if seqs else Counter()
    for line, seq in enumerate(seqs):
        if left[seq]:
            left[seq] -= 1
            yield line, seq
