"""The part of a packed step that says how its option rows are sampled: what rank 0 sends, and every rank reads.

A row is plain where it is greedy or sampled by temperature alone; the step's own sampler serves it. All others are
option rows. The section is int32 words after those of wire/step.py; word SECTION_WORD of the step's header has its
length:

    26       G      G       G x 8     2 x P    K      E x 3        R        C x 3         M
    | header | rows | slots | records | scored | kept | edits      | resets | counts      | mask
    |        |      |       | by row  |        |      | g, id, add | slots  | slot, id, n | slots ...

        M x W   T         T
    ... | mask  | hidden  | targets
        | words | indices | ids

rows: which rows of the step, and their slots; by how they are sampled, in the order of KINDS. scored: option rows
whose log-probabilities are wanted, in the order of SCORES, and room for which rows of the step these are, which a rank
fills in. kept: option rows of which the ids that could be sampled are wanted. edits: float32 `add`
to the logit of `id` in option row g (-inf bans it). resets: slots whose token counts start at zero; counts: what they
hold then, 2 * (times in the output) + (1 if in the prompt); an id may come twice, with the same count. masks: new
bits of the ids that a slot may sample. hidden, targets: tokens of the step (in its exact, unpadded order) after which
the log-probability of a known prompt token is wanted; those that want many likeliest ids come last.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from struct import Struct

import numpy as np

from nanovllm.wire.step import SECTION_WORD

SECTION_HEADER = 26
RECORD_WORDS = 8
RECORD = Struct("<iifffff4x")
"""flags, top_k, top_p, log(min_p), presence, frequency, repetition penalty."""
assert RECORD.size == 4 * RECORD_WORDS

PENALTIES, MASK, TEMPERED = 1, 2, 4
"""Flags of a row: its logits depend on its token counts; on its mask; its log-probabilities are those after
temperature."""

COPIED, CHANGED, FILTERED, UNCHANGED = KINDS = range(4)
"""How an option row is sampled: from a copy of its logits, edited (single ids, or filters after penalties or a mask);
from its logits, changed by counts and mask as they are read; from its logits, filtered; not again, the step's own
token is kept (only log-probabilities are wanted)."""
MAX_FEW = 20
"""Most likeliest ids that come from the one-pass kernel; more are sorted out in another way."""
RAW_FEW, RAW_MANY, EDITED_FEW, EDITED_MANY = SCORES = range(4)
"""Where log-probabilities come from: the raw logits, or the copies of rows of kind COPIED, edited and filtered; and
whether at most MAX_FEW likeliest ids are wanted beside the token. What a row gets does not depend on its neighbours."""


@dataclass
class StepScores:
    """What a step brings back beside its tokens; tables are int32, None where nothing was asked for."""

    scored: list[np.ndarray | None]
    """In the order of SCORES, [rows, 3 + 2 k] each: kernels/sampling/logprobs.py."""
    prompt: list[np.ndarray | None]
    """The same of prompt targets: of those that want few likeliest ids, and of those that want many."""
    kept: np.ndarray | None
    """[rows, mask_words]: bits of the ids that could be sampled."""

    def copy(self) -> "StepScores":
        return StepScores([*map(_copied, self.scored)], [*map(_copied, self.prompt)], _copied(self.kept))


def _copied(table: np.ndarray | None) -> np.ndarray | None:
    return None if table is None else table.copy()


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask: bit i % 32 of word i // 32 allows token i."""
    return -(-vocab_size // 32)


@dataclass
class SectionBuilder:
    """Rank 0's side: lists that `pack` lays one after the other."""

    rows: list[list[int]] = field(default_factory=lambda: [[] for _ in KINDS])
    """By kind, as the two lists below."""
    slots: list[list[int]] = field(default_factory=lambda: [[] for _ in KINDS])
    records: list[list[bytes]] = field(default_factory=lambda: [[] for _ in KINDS])
    scored: list[list[tuple[int, int]]] = field(default_factory=lambda: [[] for _ in SCORES])
    """In the order of SCORES: kind, and place among the rows of that kind."""
    kept: list[int] = field(default_factory=list)
    """Places among the rows of kind COPIED."""
    edits: list[np.ndarray] = field(default_factory=list)
    """int32 [n, 3] each, the first column empty until pack fills in the option row."""
    edit_rows: list[int] = field(default_factory=list)
    """The option row of each (of kind COPIED, whose rows come first)."""
    resets: list[int] = field(default_factory=list)
    counts: list[np.ndarray] = field(default_factory=list)
    mask_slots: list[int] = field(default_factory=list)
    masks: list[np.ndarray] = field(default_factory=list)
    """int32 [n, words] each."""
    hidden: list[list[int]] = field(default_factory=lambda: [[], []])
    """Of prompts that want few likeliest ids, and of those that want many; as `targets`."""
    targets: list[list[int]] = field(default_factory=lambda: [[], []])
    copies_filter: bool = False
    """Whether any row of kind COPIED is filtered."""
    copied_flags: int = 0
    """Flags of all rows of kind COPIED."""
    changed_flags: int = 0
    is_tempered: bool = False
    """Whether any row has the flag TEMPERED."""
    num_logprobs: list[int] = field(default_factory=lambda: [0 for _ in SCORES])
    """Most of `logprobs` among the rows, in the order of SCORES."""
    num_prompt_logprobs: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.rows))

    def pack(self) -> np.ndarray:
        nothing = np.empty((0, 3), np.int32)
        edits = np.concatenate([nothing, *self.edits])
        edits[:, 0] = np.repeat(self.edit_rows, [len(entries) for entries in self.edits])
        counts = np.concatenate([nothing, *self.counts])
        sizes = [len(rows) for rows in self.rows]
        num_words = self.masks[0].shape[1] if self.masks else 0
        header = [sum(sizes), len(edits), len(self.resets), len(counts), len(self.mask_slots), num_words]
        header += [*map(len, self.targets), *map(len, self.scored), len(self.kept), *sizes[:3], int(self.copies_filter)]
        header += [self.copied_flags, self.changed_flags, int(self.is_tempered)]
        header += [*self.num_logprobs, *self.num_prompt_logprobs]
        assert len(header) == SECTION_HEADER
        begins = [sum(sizes[:kind]) for kind in KINDS]
        scored = [begins[kind] + place for kind, place in chain(*self.scored)]
        parts: list[np.ndarray] = [
            np.array([*header, *chain(*self.rows, *self.slots)], np.int32),
            np.frombuffer(b"".join(chain(*self.records)), np.int32),
            np.array(scored + [0] * len(scored) + self.kept, np.int32),
            edits.ravel(),
            np.array(self.resets, np.int32),
            counts.ravel(),
            np.array(self.mask_slots, np.int32),
            *[masks.ravel() for masks in self.masks],
            np.array([*chain(*self.hidden, *self.targets)], np.int32),
        ]
        return np.concatenate(parts)


class Section:
    """Any rank's side: counts as numbers, lists as slices of the words (of an array or a tensor)."""

    def __init__(self, words: np.ndarray) -> None:
        header = words[:SECTION_HEADER].tolist()
        self.words = words
        self.num_rows, self.num_edits, self.num_resets, self.num_counts, self.num_masks, self.mask_words = header[:6]
        self.of_prompt, self.of_score = _consecutive(header[6:8]), _consecutive(header[8:12])
        """Where the targets that want few and many ids lie among all; where the scored rows of each of SCORES do."""
        self.num_targets, self.num_scored, self.num_kept = sum(header[6:8]), sum(header[8:12]), header[12]
        self.of_kind = _consecutive([*header[13:16], self.num_rows - sum(header[13:16])])
        """Where the rows of each kind lie among all."""
        copies_filter, self.copied_flags, self.changed_flags, is_tempered = header[16:20]
        self.copies_filter, self.is_tempered = bool(copies_filter), bool(is_tempered)
        self.num_logprobs, self.num_prompt_logprobs = header[20:24], header[24:]
        sizes = {
            "rows": self.num_rows,
            "slots": self.num_rows,
            "records": self.num_rows * RECORD_WORDS,
            "scored": self.num_scored,
            "scored_rows": self.num_scored,
            "kept": self.num_kept,
            "edits": self.num_edits * 3,
            "resets": self.num_resets,
            "counts": self.num_counts * 3,
            "mask_slots": self.num_masks,
            "masks": self.num_masks * self.mask_words,
            "hidden": self.num_targets,
            "targets": self.num_targets,
        }
        lists = _consecutive([SECTION_HEADER, *sizes.values()])[1:]
        self._slices = dict(zip(sizes, lists, strict=True))
        assert lists[-1].stop == words.size, (lists, words.size)

    def where(self, name: str) -> slice:
        """Where a list of that name is among the words."""
        return self._slices[name]


def _consecutive(sizes: Sequence[int]) -> list[slice]:
    ends = [*accumulate(sizes)]
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def append_section(packed: np.ndarray, section: np.ndarray) -> np.ndarray:
    """A packed step with its section after it."""
    whole = np.concatenate([packed, section])
    whole[SECTION_WORD] = section.size
    return whole


def split_section(packed: np.ndarray) -> tuple[np.ndarray, Section | None]:
    """The step's own words, and its section where it has one."""
    size = int(packed[SECTION_WORD])
    if size == 0:
        return packed, None
    return packed[:-size], Section(packed[-size:])
