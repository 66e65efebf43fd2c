"""The part of a packed step that says how its option rows are sampled: what rank 0 sends, and every rank reads.

A row is plain where it is greedy or sampled by temperature alone; the step's own sampler serves it. All others are
option rows. The section is int32 words after those of wire/step.py; word SECTION_WORD of the step's header has its
length. It has a header (the words of each of LISTS, then NUMBERS) and the lists, one after another.

rows, slots, records: which rows of the step, their slots, and a RECORD each; by how they are sampled, in the order of
KINDS. scored: option rows whose log-probabilities are wanted, in the order of SCORES; scored_rows: room for which rows
of the step these are, which a rank fills in. kept: option rows of which the ids that could be sampled are wanted.
edits: (g, id, float32 `add`, n) to the logit of `id` in option row g (-inf bans it), where n > 0 at positions below n
alone, else from -n on: two entries of one id share the positions. resets: slots whose token counts
start at zero; counts: (slot, id, n) that they hold then, 2 * (times in the output) + (1 if in the prompt); an id may
come twice, with the same count. hidden, targets: tokens of the step (in its exact, unpadded order) after which the
log-probability of a known prompt token is wanted, and that token; those that want many likeliest ids come last.
mask_slots, masks: new bits of the ids that a slot may sample; of place p of a step with several the line is slot + p *
max_num_seqs. drafted: slots whose drafts the host wants to know, of rows under a grammar or with bad words.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice
from struct import Struct
from typing import Any

import numpy as np

from nanovllm.wire.step import SECTION_WORD

LISTS = (
    "rows", "slots", "records", "scored", "scored_rows", "kept", "edits", "resets", "counts", "hidden", "targets",
    "mask_slots", "drafted", "masks",
)  # fmt: skip
NUMBERS = 20
"""Rows of each of KINDS, and scored ones of each of SCORES; targets that want few likeliest ids, and many; how many
likeliest ids at most, of each of SCORES and of these two; and four about all rows (Section)."""
RECORD_WORDS = 8
RECORD = Struct("<iifffff4x")
"""flags, top_k, top_p, log(min_p), presence, frequency, repetition penalty; and MASK_WORD, 0 unless `placed` says
otherwise."""
EDIT_WORDS = 4
MASK_WORD = 7
"""Word of a record that has the number of lines from the mask of the row's slot to its own."""
assert RECORD.size == 4 * RECORD_WORDS

PENALTIES, MASK, TEMPERED = 1, 2, 4
"""Flags of a row: its logits depend on its token counts; on its mask; its log-probabilities are those after
temperature."""
PLACE_SHIFT = 8
"""First bit in the word of the flags of the row's place among those of its decode."""

COPIED, CHANGED, FILTERED, UNCHANGED = KINDS = range(4)
"""Ways of sampling an option row. COPIED: from an edited copy of its logits (single ids, or filters after penalties or
a mask). CHANGED: from its logits, changed by counts and mask as they are read. FILTERED: from its logits, filtered.
UNCHANGED: the step's own token is kept (only log-probabilities are wanted)."""
MAX_FEW = 20
"""Maximum number of likeliest ids that come from the one-pass kernel; more are sorted out in another way."""
RAW_FEW, RAW_MANY, EDITED_FEW, EDITED_MANY = SCORES = range(4)
"""Sources of log-probabilities: the raw logits, or the edited and filtered copies of COPIED rows; FEW: at most MAX_FEW
likeliest ids are wanted beside the token. A row's values do not depend on its neighbours."""


def placed(record: bytes, place: int, mask_line: int) -> bytes:
    """The RECORD, of place 0, for another place of its decode, whose mask is so many lines behind that of its slot."""
    flags = int.from_bytes(record[:4], "little") | place << PLACE_SHIFT
    return flags.to_bytes(4, "little") + record[4 : 4 * MASK_WORD] + mask_line.to_bytes(4, "little")


@dataclass
class StepScores:
    """Results of a step beside its tokens; tables are int32, None where nothing was asked for."""

    scored: list[np.ndarray | None]
    """Log-probability tables in the order of SCORES, [rows, 3 + 2 k] each (kernels/sampling/logprobs.py)."""
    prompt: list[np.ndarray | None]
    """Log-probability tables of prompt targets: of those that want few likeliest ids, and of those that want many."""
    kept: np.ndarray | None
    """[rows, mask_words]: bits of the ids that could be sampled."""
    pooled: np.ndarray | None = None
    """float32 [rows, hidden]: final hidden states of the step's first rows, of a model without a head."""
    drafts: np.ndarray | None = None
    """[rows, k]: what was drafted for the rows that want to know, -1 where nothing was."""

    def copy(self) -> "StepScores":
        tables = [*map(_copied, self.scored)], [*map(_copied, self.prompt)], _copied(self.kept)
        return StepScores(*tables, _copied(self.pooled), _copied(self.drafts))


def _copied(table: np.ndarray | None) -> np.ndarray | None:
    return None if table is None else table.copy()


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask: bit i % 32 of word i // 32 allows token i."""
    return -(-vocab_size // 32)


@dataclass
class SectionBuilder:
    """Section in the making, on rank 0: lists that `pack` lays one after the other."""

    rows: list[list[int]] = field(default_factory=lambda: [[] for _ in KINDS])
    """Rows by kind, in the order of KINDS; entries as in the two lists below."""
    slots: list[list[int]] = field(default_factory=lambda: [[] for _ in KINDS])
    records: list[list[bytes]] = field(default_factory=lambda: [[] for _ in KINDS])
    scored: list[list[tuple[int, int]]] = field(default_factory=lambda: [[] for _ in SCORES])
    """Scored rows in the order of SCORES: (kind, place among the rows of that kind)."""
    kept: list[int] = field(default_factory=list)
    """Places among the rows of kind COPIED."""
    edits: list[np.ndarray] = field(default_factory=list)
    """int32 [n, EDIT_WORDS] each, the first column empty until pack fills in the option row."""
    edit_rows: list[int] = field(default_factory=list)
    """The option row of each (of kind COPIED, whose rows come first)."""
    resets: list[int] = field(default_factory=list)
    counts: list[np.ndarray] = field(default_factory=list)
    mask_slots: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    masks: list[np.ndarray] = field(default_factory=list)
    """int32 [n, words] each."""
    hidden: list[list[int]] = field(default_factory=lambda: [[], []])
    """Places of prompt targets: those that want few likeliest ids, and those that want many; parallel to `targets`."""
    targets: list[list[int]] = field(default_factory=lambda: [[], []])
    copies_filter: bool = False
    """Whether any row of kind COPIED is filtered."""
    copied_flags: int = 0
    """Flags of all rows of kind COPIED."""
    changed_flags: int = 0
    is_tempered: bool = False
    """Whether any row has the flag TEMPERED."""
    num_logprobs: list[int] = field(default_factory=lambda: [0 for _ in SCORES])
    """Maximum of `logprobs` among the rows, in the order of SCORES."""
    num_prompt_logprobs: list[int] = field(default_factory=lambda: [0, 0])

    def pack(self) -> np.ndarray:
        edits = np.concatenate([np.empty((0, EDIT_WORDS), np.int32), *self.edits])
        edits[:, 0] = np.repeat(self.edit_rows, [len(entries) for entries in self.edits])
        begins = [*accumulate(map(len, self.rows), initial=0)]
        scored = [begins[kind] + place for kind, place in chain(*self.scored)]
        lists: list[Any] = [
            [*chain(*self.rows)],
            [*chain(*self.slots)],
            np.frombuffer(b"".join(chain(*self.records)), np.int32),
            scored,
            [0] * len(scored),
            self.kept,
            edits.ravel(),
            self.resets,
            np.concatenate([np.empty((0, 3), np.int32), *self.counts]).ravel(),
            [*chain(*self.hidden)],
            [*chain(*self.targets)],
            self.mask_slots,
            self.drafted,
        ]
        numbers = [*map(len, self.rows), *map(len, self.scored), *map(len, self.targets)]
        numbers += [*self.num_logprobs, *self.num_prompt_logprobs]
        numbers += [self.copies_filter, self.copied_flags, self.changed_flags, self.is_tempered]
        assert len(numbers) == NUMBERS
        header = [*map(len, lists), sum(masks.size for masks in self.masks), *numbers]
        words = [np.asarray(each, np.int32) for each in (header, *lists)]
        return np.concatenate([*words, *(masks.ravel() for masks in self.masks)])


class Section:
    """Section as any rank reads it: numbers, and lists by name."""

    def __init__(self, words: np.ndarray) -> None:
        header = words[: len(LISTS) + NUMBERS].tolist()
        self.words: Any = words
        """Words of the section: an array, or a tensor (see `on`)."""
        slices = _consecutive([len(header), *header[: len(LISTS)]])[1:]
        self._slices = dict(zip(LISTS, slices, strict=True))
        numbers = iter(header[len(LISTS) :])
        self.of_kind, self.of_score, self.of_prompt = (
            _consecutive([*islice(numbers, count)]) for count in (len(KINDS), len(SCORES), 2)
        )
        """Slices: the rows of each kind among all rows; the scored rows of each of SCORES; the targets that want few
        and many ids."""
        self.num_logprobs, self.num_prompt_logprobs = ([*islice(numbers, count)] for count in (len(SCORES), 2))
        self.copies_filter, self.copied_flags, self.changed_flags, self.is_tempered = numbers
        assert slices[-1].stop == words.size, (slices, words.size)

    def on(self, words: Any) -> "Section":
        """Returns this section over a copy of its words in another array or tensor."""
        other = copy(self)
        other.words = words
        return other

    def __getitem__(self, name: str) -> Any:
        """The list of that name, of LISTS."""
        return self.words[self._slices[name]]

    def size(self, name: str) -> int:
        """Number of words of the list `name`."""
        found = self._slices[name]
        return found.stop - found.start


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
