"""One step as data: what the scheduler decided."""

from dataclasses import dataclass, field

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.wire.step import DRAFT, ENTER, SlotRecord, pack_step


@dataclass(slots=True)
class Schedule:
    """Rows of a step, in the order of the device: decodes, prompts that finish, prompt chunks that do not.

    The first two kinds, `num_sample_rows` together, gain a token each; decodes up to `places`.
    """

    seqs: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """First position that each row computes. A decode's is the last that it may compute, since only the device knows
    where it begins."""
    counts: list[int] = field(default_factory=list)
    """Number of tokens that each row computes; one for a decode."""
    num_old_rows: int = 0
    """Number of decodes of sequences that ran before this step."""
    num_decode_rows: int = 0
    """Number of all decodes: after those of num_old_rows come rows that begin with all but one token cached."""
    num_sample_rows: int = 0
    num_tokens: int = 0
    places: int = 1
    """Tokens that the step computes for each decode: its last, and drafts of those that follow."""
    block_updates: list[int] = field(default_factory=list)
    """Flat triples slot, index in the block table, block."""
    block_copies: list[int] = field(default_factory=list)
    """Flat pairs source, destination of blocks to copy, one after another, before anything is computed."""
    keeps: dict[Sequence, tuple[int, int]] = field(default_factory=dict)
    """Line that keeps the state of a row after so many of its tokens in this step (RowMemory.keep_within); of decodes,
    after so many of their text, if they get there."""
    lines: list[list[int]] = field(default_factory=list)
    """Lines of rows with memory of fixed size, by row: to read, to write, to keep, and tokens before that."""
    new_slots: list[Sequence] = field(default_factory=list)
    """Rows that take a slot in this step, for which the packed step has a slot record."""
    adapters: list[tuple[int, str]] = field(default_factory=list)
    """Adapters to copy into slots before this step: (slot, digest)."""
    num_adapted: int = 0
    """Rows that have an adapter."""
    host_token_ids: list[int] = field(default_factory=list)
    """Tokens of all rows that are not decodes, in row order."""
    following_ids: list[int] = field(default_factory=list)
    """Token after the last of each row, or whether it may have drafts, where a model that drafts takes the step in."""
    drafts: int = 0
    """Work of such a model after this step: 0 (none), ENTER or DRAFT."""

    @property
    def num_rows(self) -> int:
        return len(self.seqs)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_old_rows * self.places

    def enter(self, enters: bool, drafts: bool) -> None:
        """Says whether a model that drafts takes the step in, and drafts then. Rows that it misses a token of have no
        drafts any more."""
        if not enters:
            for seq in self.seqs:
                seq.prefix.has_entries = False
            return
        self.drafts = DRAFT if drafts else ENTER
        self.following_ids = [seq.prefix.has_entries for seq in self.seqs[: self.num_sample_rows]]
        for row in range(self.num_sample_rows, self.num_rows):
            self.following_ids.append(self.seqs[row].token_ids[self.starts[row] + self.counts[row]])

    def sort_decodes(self) -> None:
        """Rows that are decodes alone come to stand by adapter, since a tile of rows multiplies by each that it has."""
        order = sorted(range(len(self.seqs)), key=lambda row: self.seqs[row].adapter_slot)
        self.seqs, self.starts = [self.seqs[row] for row in order], [self.starts[row] for row in order]

    def pack(self, max_num_seqs: int) -> np.ndarray:
        """The step as every rank receives it (wire/step.py)."""
        return pack_step(
            max_num_seqs, slots=[seq.slot for seq in self.seqs], starts=self.starts, counts=self.counts,
            num_decode_rows=self.num_decode_rows, num_sample_rows=self.num_sample_rows, num_tokens=self.num_tokens,
            block_updates=self.block_updates,
            slot_records=[
                SlotRecord(seq.slot, seq.constants, seq.token_ids[-1], seq.num_cached_tokens, seq.adapter_slot)
                for seq in self.new_slots
            ],
            token_ids=self.host_token_ids, block_copies=self.block_copies, lines=self.lines, places=self.places,
            following_ids=self.following_ids, drafts=self.drafts, num_adapted=self.num_adapted,
        )  # fmt: skip
