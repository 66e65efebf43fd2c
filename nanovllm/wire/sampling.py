"""The part of a packed step that says how its general rows are sampled: what rank 0 sends, and every rank reads.

A row is plain where it is greedy or draws by temperature alone; the step's own sampler serves it. All others are
general. The section is int32 words behind those of wire/step.py; word SECTION_WORD of the step's header has
its length:

    16       G      G       G x 8     2 x P    E x 3        R        C x 3          M       M x W    T         T
    | header | rows | slots | records | scored | edits      | resets | counts       | mask  | mask   | hidden  | targets
    |        |      |       | by row  |        | g, id, add | slots  | slot, id, n  | slots | words  | indices | ids

rows: which rows of the step, and where they live; by how they are drawn, in the order of KINDS. scored: general rows
whose log-probabilities are wanted, and room for which rows of the step these are, which a rank fills in. edits: float32
`add` to the logit of `id` in general row g (-inf bans it). resets: slots whose token counts start at zero; counts: what
they hold then, 2 * (times in the output) + (1 if in the prompt); an id may come twice, with the same count. masks: new
bits of the ids that a slot may draw. hidden, targets: tokens of the step (in its exact, unpadded order) after which
the log-probability of a known prompt token is wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from struct import Struct

import numpy as np

from nanovllm.wire.step import SECTION_WORD

SECTION_HEADER = 16
RECORD_WORDS = 8
RECORD = Struct("<iifffff4x")
"""flags, top_k, top_p, log(min_p), presence, frequency, repetition penalty."""
assert RECORD.size == 4 * RECORD_WORDS

PENALTIES, MASK = 1, 2
"""Flags of a row: its logits depend on its token counts; on its mask."""

COPIED, CHANGED, FILTERED, DRAWN = KINDS = range(4)
"""How a general row is drawn: from a copy of its logits, edited (single ids, or filters after penalties or a mask);
from its logits, changed by counts and mask as they are read; from its logits, filtered; not again, the step's own draw
stands (only log-probabilities are wanted)."""


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask: bit i % 32 of word i // 32 allows token i."""
    return -(-vocab_size // 32)


@dataclass
class SectionBuilder:
    """Rank 0's side: lists that `pack` lays one behind the other."""

    rows: list[list[int]] = field(default_factory=lambda: [[] for _ in KINDS])
    """By kind, as the two lists below."""
    slots: list[list[int]] = field(default_factory=lambda: [[] for _ in KINDS])
    records: list[list[bytes]] = field(default_factory=lambda: [[] for _ in KINDS])
    scored: list[tuple[int, int]] = field(default_factory=list)
    """Kind, and place among the rows of that kind."""
    edits: list[np.ndarray] = field(default_factory=list)
    """int32 [n, 3] each, the first column empty until pack fills in the general row."""
    edit_rows: list[int] = field(default_factory=list)
    """The general row of each (of kind COPIED, whose rows come first)."""
    resets: list[int] = field(default_factory=list)
    counts: list[np.ndarray] = field(default_factory=list)
    mask_slots: list[int] = field(default_factory=list)
    masks: list[np.ndarray] = field(default_factory=list)
    """int32 [n, words] each."""
    hidden: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    copies_filter: bool = False
    """Whether any row of kind COPIED is filtered."""
    copied_flags: int = 0
    """Flags of all rows of kind COPIED."""
    changed_flags: int = 0
    num_logprobs: int = -1
    """Most of `logprobs` among the rows; -1: none asks."""
    num_prompt_logprobs: int = -1

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
        header += [len(self.targets), len(self.scored), *sizes[:3], int(self.copies_filter), self.copied_flags]
        header += [self.changed_flags, self.num_logprobs, self.num_prompt_logprobs]
        assert len(header) == SECTION_HEADER
        begins = [sum(sizes[:kind]) for kind in KINDS]
        parts: list[np.ndarray] = [
            np.array([*header, *chain(*self.rows, *self.slots)], np.int32),
            np.frombuffer(b"".join(chain(*self.records)), np.int32),
            np.array([begins[kind] + place for kind, place in self.scored] + [0] * len(self.scored), np.int32),
            edits.ravel(),
            np.array(self.resets, np.int32),
            counts.ravel(),
            np.array(self.mask_slots, np.int32),
            *[masks.ravel() for masks in self.masks],
            np.array(self.hidden + self.targets, np.int32),
        ]
        return np.concatenate(parts)


class Section:
    """Any rank's side: counts as numbers, lists as slices of the words (of an array or a tensor)."""

    def __init__(self, words: np.ndarray) -> None:
        header = words[:SECTION_HEADER].tolist()
        self.words = words
        self.num_rows, self.num_edits, self.num_resets, self.num_counts, self.num_masks, self.mask_words = header[:6]
        self.num_targets, self.num_scored = header[6:8]
        sizes = [*header[8:11], self.num_rows - sum(header[8:11])]
        self.of_kind = [slice(sum(sizes[:kind]), sum(sizes[: kind + 1])) for kind in KINDS]
        """Where the rows of each kind lie among all."""
        copies_filter, self.copied_flags, self.changed_flags, self.num_logprobs, self.num_prompt_logprobs = header[11:]
        self.copies_filter = bool(copies_filter)
        self._slices: dict[str, slice] = {}
        begin = SECTION_HEADER
        for name, size in self._sizes():
            self._slices[name] = slice(begin, begin + size)
            begin += size
        assert begin == words.size, (begin, words.size)

    def _sizes(self) -> Sequence[tuple[str, int]]:
        return (
            ("rows", self.num_rows),
            ("slots", self.num_rows),
            ("records", self.num_rows * RECORD_WORDS),
            ("scored", self.num_scored),
            ("scored_rows", self.num_scored),
            ("edits", self.num_edits * 3),
            ("resets", self.num_resets),
            ("counts", self.num_counts * 3),
            ("mask_slots", self.num_masks),
            ("masks", self.num_masks * self.mask_words),
            ("hidden", self.num_targets),
            ("targets", self.num_targets),
        )

    def where(self, name: str) -> slice:
        """Where a list of that name lies among the words."""
        return self._slices[name]


def append_section(packed: np.ndarray, section: np.ndarray) -> np.ndarray:
    """A packed step with its section behind it."""
    whole = np.concatenate([packed, section])
    whole[SECTION_WORD] = section.size
    return whole


def split_section(packed: np.ndarray) -> tuple[np.ndarray, Section | None]:
    """The step's own words, and its section where it has one."""
    size = int(packed[SECTION_WORD])
    if size == 0:
        return packed, None
    return packed[:-size], Section(packed[-size:])
