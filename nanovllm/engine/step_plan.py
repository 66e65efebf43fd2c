"""One step as data: what the scheduler decided, and its packed form that every rank receives (wire/step.py)."""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.wire.step import HEADER_SIZE, SLOT_RECORD

if TYPE_CHECKING:
    from nanovllm.engine.sampling.plan import StepSampling


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
            packed.frombytes(SLOT_RECORD.pack(seq.slot, seq.params.temperature, seq.seed))
        packed.fromlist(self.host_token_ids)
        return np.frombuffer(packed, dtype=np.int32)
