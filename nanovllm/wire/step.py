"""The packed step: what the host decided, as one int32 array that every rank reads. The only owner of its layout.

    S = max_num_seqs, R rows, U block updates, N slot records

    0            16             16 + S          16 + 2 S      16 + 3 S
    | header     | row_slot     | row_start     | row_count   | block updates     | slot records     | token ids of the
    | counts     | per row      | 1st position  | tokens      | U x (slot, index, | N x 8 words      | rows that are no
    |            | S words      | S words       | S words     |      block)       |                  | decodes

    ... | lines                    | ids that | block copies             |   The copies happen first of all, one after
        | 4 x R words, if any      | follow   | C x (source, destination)|   another.

    header: 0 rows R, 1 decode rows, 2 rows that sample a token, 3 tokens, 4 block updates U, 5 slot records N,
            6 most tokens of a row, 7 words of the sampling section after all this (wire/sampling.py),
            8 block copies C, 9 rows with lines (R, or 0 where layers have no memory of fixed size),
            10 places of each decode, 11 what a model that drafts does: 0 nothing, 1 it takes the step in (ENTER), 2 and
            drafts (DRAFT), 12 rows with an adapter, 13.. reserved
    lines: the line that each row reads, + 1; that it writes, + 1; that keeps its state, + 1; and after how many of its
           tokens (0: no line), of decodes where steps verify drafts: of their text, if the step brings them there
    slot record: slot, temperature (float32 bits), seed low word, seed high word, last token id, tokens computed,
                 slot of its adapter (-1: none), 1 reserved

Decode rows come first, one token each. Its id is the last of the slot: that of its record, where it has one in this
step, else the one sampled last, which only the device need know. Its position is where the slot is, again by its record
or by the step before: `start` is the last that this can be. In a step with several places each decode becomes as many
rows of one token on the device, for one position after another: the first has the last token, the others what was
drafted for the slot. Behind `start`, or where nothing was drafted, they compute nothing. Word 3 counts all places.
Where a model that drafts takes the step in, the ids that follow are a word for each row: the token after its last where
it samples none, else whether it may have drafts. Within a step each slot, each (slot, index) and each slot record
appears once.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from nanovllm.wire.state import StateSize

HEADER_SIZE = 16
"""Words, as all sizes here."""
SECTION_WORD = 7
COPIES_WORD = 8
LINES_WORD = 9
PLACES_WORD = 10
DRAFTS_WORD = 11
ADAPTERS_WORD = 12
ENTER, DRAFT = 1, 2
"""Values of DRAFTS_WORD: see the drawing."""
NO_LINE = -1
UPDATE_SIZE = 3
COPY_SIZE = 2
RECORD_SIZE = 8
_RECORD = struct.Struct("<ifqiii4x")
assert _RECORD.size == 4 * RECORD_SIZE


class SlotConstants(NamedTuple):
    """Constant numbers of a row that each rank keeps in the row's slot. To add one takes a field here, a word of the
    slot record, and its reader in kernels/step/input.py."""

    temperature: float
    seed: int


class SlotRecord(NamedTuple):
    """A row that takes a slot, as each rank learns of it."""

    slot: int
    constants: SlotConstants
    last_token: int
    num_computed: int
    adapter: int = -1
    """Slot of its adapter; -1: none."""


class StepCounts(NamedTuple):
    """First words of a step's header."""

    num_rows: int
    num_decode_rows: int
    num_sample_rows: int
    num_tokens: int
    num_updates: int
    num_records: int
    most_row_tokens: int

    @classmethod
    def of(cls, packed: np.ndarray) -> "StepCounts":
        return cls(*packed[: len(cls._fields)].tolist())

    def on_device(self, places: int) -> "StepCounts":
        """Counts with a row for each place of a decode."""
        rows, decodes, samples, *others = self
        more = (places - 1) * decodes
        return StepCounts(rows + more, decodes + more, samples + more, *others)


def most_block_updates(size: StateSize, max_num_seqs: int) -> int:
    """Block updates of one step, at most. An admitted row has its whole block table announced, hits included, so that
    rows with one long prefix could bring any number: the scheduler lets those that are too many wait a step."""
    return size.num_blocks + max_num_seqs * size.num_tables


def packed_capacity(size: StateSize, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """int32 words of the largest packed step, without its sampling section."""
    lines = 4 if size.num_lines else 0
    fixed = HEADER_SIZE + (4 + RECORD_SIZE + COPY_SIZE * size.num_tables + lines) * max_num_seqs
    return fixed + UPDATE_SIZE * most_block_updates(size, max_num_seqs) + max_num_batched_tokens


def pack_step(
    max_num_seqs: int, *, slots: list[int], starts: list[int], counts: list[int], num_decode_rows: int,
    num_sample_rows: int, num_tokens: int, block_updates: list[int], slot_records: Iterable[SlotRecord],
    token_ids: list[int], block_copies: Sequence[int] = (), lines: Sequence[list[int]] = (), places: int = 1,
    following_ids: Sequence[int] = (), drafts: int = 0, num_adapted: int = 0,
) -> np.ndarray:  # fmt: skip
    """Packs a step into the int32 array of the drawing. slot_records: of each row that took a slot; block_copies: flat
    pairs; lines: the four of the drawing, each by row, less 1. following_ids, drafts: as in the drawing. num_adapted:
    rows with an adapter."""
    records = [
        _RECORD.pack(slot, *constants, last_token, num_computed, adapter)
        for slot, constants, last_token, num_computed, adapter in slot_records
    ]
    num_updates, num_copies = len(block_updates) // UPDATE_SIZE, len(block_copies) // COPY_SIZE
    longest = max(counts, default=0)
    header = StepCounts(len(slots), num_decode_rows, num_sample_rows, num_tokens, num_updates, len(records), longest)
    # An array takes lists in several times faster than numpy, unsigned numbers faster than signed ones (none here is
    # negative), and bytes faster still.
    packed = array("I", (*header, 0, num_copies, len(slots) if lines else 0, places, drafts, num_adapted))
    packed.frombytes(bytes(4 * (HEADER_SIZE - len(packed))))
    padding = bytes(4 * (max_num_seqs - len(slots)))
    for column in (slots, starts, counts):
        packed.fromlist(column)
        packed.frombytes(padding)
    packed.fromlist(block_updates)
    packed.frombytes(b"".join(records))
    packed.fromlist(token_ids)
    for number, column in enumerate(lines):
        packed.fromlist(column if number == 3 else [line + 1 for line in column])
    packed.extend(following_ids)
    packed.extend(block_copies)
    return np.frombuffer(packed, dtype=np.int32)


def row_lengths(packed: np.ndarray, max_num_seqs: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 [rows on the device] each: the first position of each row's tokens in a packed step, at most, and how many
    these are."""
    columns = packed[HEADER_SIZE : HEADER_SIZE + 3 * max_num_seqs].reshape(3, max_num_seqs)
    _, starts, counts = columns[:, : int(packed[0])]
    if (places := int(packed[PLACES_WORD])) > 1:
        times = np.where(np.arange(len(starts)) < packed[1], places, 1)
        starts, counts = starts.repeat(times), counts.repeat(times)
    return starts, counts


def row_lines(packed: np.ndarray) -> np.ndarray:
    """int32 [R, 4]: the lines that each row of a packed step (without a section) reads, writes and keeps, and tokens
    before that; NO_LINE for none. No ids follow them."""
    end = packed.size - COPY_SIZE * int(packed[COPIES_WORD])
    lines = packed[end - 4 * int(packed[LINES_WORD]) : end].reshape(4, -1)
    return (lines - np.array([[1], [1], [1], [0]], dtype=np.int32)).T


def block_copies(packed: np.ndarray) -> slice | None:
    """Slice of a packed step (without a section) that holds its block copies; None: it has none."""
    num_words = COPY_SIZE * int(packed[COPIES_WORD])
    return slice(packed.size - num_words, packed.size) if num_words else None


def dummy_step(
    max_num_seqs: int, num_tokens: int, max_model_len: int, has_lines: bool = False, has_adapters: bool = False
) -> np.ndarray:
    """The largest step, packed: `num_tokens` prompt tokens (id 0) over as many rows as can be, all sampled.

    No blocks are handed out: every row reads and writes what its slot's block table happens to hold; and the first is
    copied to itself. has_adapters: it runs as one where rows have adapters.
    """
    num_rows = min(max_num_seqs, num_tokens)
    counts = np.full(num_rows, num_tokens // num_rows)
    counts[: num_tokens % num_rows] += 1
    counts = np.minimum(counts, max_model_len)
    total = int(counts.sum())
    return pack_step(
        max_num_seqs, slots=list(range(num_rows)), starts=[0] * num_rows, counts=counts.tolist(), num_decode_rows=0,
        num_sample_rows=num_rows, num_tokens=total, block_updates=[], slot_records=(), token_ids=[0] * total,
        block_copies=(0, 0),
        lines=[[NO_LINE] * num_rows, [0] * num_rows, [NO_LINE] * num_rows, [0] * num_rows] if has_lines else (),
        num_adapted=num_rows if has_adapters else 0,
    )  # fmt: skip
