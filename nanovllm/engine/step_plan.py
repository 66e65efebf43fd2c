"""One step as data: what the scheduler decided, and its packed form that every rank receives.

Packed int32 layout (S = max_num_seqs; see kernels/step/input.py for the device side):

    0            HEADER_SIZE     +S            +2S             +3S
    | header     | row_slot      | row_start   | row_count     | block updates   | slot records   | token ids of
    | counts     | per row       | 1st position| tokens        | slot,index,block| RECORD_SIZE    | prompt chunks
"""

import struct
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from nanovllm.engine.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.engine.sampling.plan import StepSampling

HEADER_SIZE = 16
RECORD_SIZE = 8


def most_block_updates(num_blocks: int, max_num_seqs: int) -> int:
    """Block updates of one step, at most. A row that comes in has its whole block table announced, hits included, so
    that rows with one long prefix could bring any number: the scheduler lets those that are too many wait a step."""
    return num_blocks + max_num_seqs


def packed_capacity(num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """int32 words of the largest packed step."""
    fixed = HEADER_SIZE + (3 + RECORD_SIZE) * max_num_seqs
    return fixed + 3 * most_block_updates(num_blocks, max_num_seqs) + max_num_batched_tokens


@dataclass(slots=True)
class StepPlan:
    """Rows of a step, in the order of the device: decodes, prompts that finish, prompt chunks that do not.

    The first two kinds, `num_sample_rows` together, gain a token.
    """

    seqs: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """First position that is computed, by row."""
    counts: list[int] = field(default_factory=list)
    """Tokens that are computed, by row."""
    epochs: list[int] = field(default_factory=list)
    """Sequence.epoch when the row was scheduled."""
    num_decode_rows: int = 0
    num_sample_rows: int = 0
    num_tokens: int = 0
    block_updates: list[int] = field(default_factory=list)
    """Flat triples slot, index in the block table, block."""
    new_slots: list[Sequence] = field(default_factory=list)
    """Rows that took a slot in this step: their sampling parameters travel along."""
    host_token_ids: list[int] = field(default_factory=list)
    """Tokens of all rows that are not decodes, in row order."""
    sampling: "StepSampling | None" = None
    """What rows need beyond greedy and temperature; it travels as a section of its own (wire/sampling.py)."""

    @property
    def num_rows(self) -> int:
        return len(self.seqs)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decode_rows

    def pack(self, max_num_seqs: int) -> np.ndarray:
        """The step as one int32 array."""
        counts = (
            len(self.seqs),
            self.num_decode_rows,
            self.num_sample_rows,
            self.num_tokens,
            len(self.block_updates) // 3,
            len(self.new_slots),
            max(self.counts, default=0),
        )
        packed = array("i", counts)  # an array takes lists of ints in several times faster than numpy does
        packed.fromlist([0] * (HEADER_SIZE - len(counts)))
        padding = [0] * (max_num_seqs - len(self.seqs))
        for column in ([seq.slot for seq in self.seqs], self.starts, self.counts):
            packed.fromlist(column)
            packed.fromlist(padding)
        packed.fromlist(self.block_updates)
        for seq in self.new_slots:
            packed.frombytes(_SLOT_RECORD.pack(seq.slot, seq.params.temperature, seq.seed))
        packed.fromlist(self.host_token_ids)
        return np.frombuffer(packed, dtype=np.int32)


_SLOT_RECORD = struct.Struct("<ifq16x")
"""slot, temperature (float32), seed (int64: low word first), 4 reserved words."""
assert _SLOT_RECORD.size == 4 * RECORD_SIZE


def dummy_step(max_num_seqs: int, num_tokens: int, max_model_len: int) -> np.ndarray:
    """The packed form of the largest step: `num_tokens` prompt tokens (id 0) over as many rows as can be, all sampled.

    No blocks are handed out: every row reads and writes what its slot's block table happens to hold.
    """
    num_rows = min(max_num_seqs, num_tokens)
    counts = np.full(num_rows, num_tokens // num_rows, dtype=np.int32)
    counts[: num_tokens % num_rows] += 1
    counts = np.minimum(counts, max_model_len)
    fixed = HEADER_SIZE + 3 * max_num_seqs
    packed = np.zeros(fixed + int(counts.sum()), dtype=np.int32)
    packed[:7] = (num_rows, 0, num_rows, counts.sum(), 0, 0, counts.max())
    packed[HEADER_SIZE : HEADER_SIZE + num_rows] = np.arange(num_rows)
    packed[fixed - max_num_seqs : fixed - max_num_seqs + num_rows] = counts
    return packed
