"""The packed form of one step, as the host writes it and every rank reads it. No torch.

int32 words (S = max_num_seqs, R rows, T tokens, U block updates, N slot records):

    0            16            16 + S         16 + 2 S       16 + 3 S
    | header     | row_slot    | row_start    | row_count    | U block updates   | N slot records   | token ids of the
    | counts     |             | 1st position | tokens       | slot,index,block  | 8 words each     | non-decode rows

    header: 0 rows R, 1 decode rows, 2 rows that sample a token, 3 tokens T, 4 block updates U, 5 slot records N, 6 most
            tokens of a row
    slot record: slot, temperature (float32 bits), seed low word, seed high word, 4 reserved

Decode rows come first and have one token, whose id is not in the buffer: it is last_token[slot], which only the device
need know. Within a step each (slot, index) and each slot record appears once.
"""

import struct

import numpy as np

HEADER_SIZE = 16
UPDATE_SIZE = 3
RECORD_SIZE = 8

SLOT_RECORD = struct.Struct("<ifq16x")
"""slot, temperature (float32), seed (int64: low word first), 4 reserved words."""
assert SLOT_RECORD.size == 4 * RECORD_SIZE


def most_block_updates(num_blocks: int, max_num_seqs: int) -> int:
    """Block updates of one step, at most. A row that comes in has its whole block table announced, hits included, so
    that rows with one long prefix could bring any number: the scheduler lets those that are too many wait a step."""
    return num_blocks + max_num_seqs


def packed_capacity(num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """int32 words of the largest packed step."""
    fixed = HEADER_SIZE + (3 + RECORD_SIZE) * max_num_seqs
    return fixed + 3 * most_block_updates(num_blocks, max_num_seqs) + max_num_batched_tokens


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
