"""A device that computes no attention but remembers exactly what it would have attended to.

It sees what real ranks see, the packed step and nothing else, and executes steps in the order of their launches. For
each KV position it stores which text, token by token, the entry was computed from. A row that reads anything but the KV
of its own prefix is an error at once, so that wrong sharing, blocks that are hits before their data is there, stale
blocks, slots used twice and weights changed under a cache all show. The sampled token depends on the whole prefix and
on the slot's seed: each request's output has exactly one right value.
"""

import zlib

import numpy as np

from nanovllm.wire.step import HEADER_SIZE, RECORD_SIZE, block_copies

VOCAB_SIZE = 16
ROOT = 0  # the empty text


def next_token(digest: int, seed: int) -> int:
    """The token that follows a text of this digest, for a request of this seed."""
    return zlib.crc32(seed.to_bytes(8, "little", signed=True), digest) % VOCAB_SIZE


def extend_digest(digest: int, token_id: int) -> int:
    return zlib.crc32(token_id.to_bytes(4, "little"), digest)


class FakeDevice:
    """State by slot, block tables and a KV store, fed by packed steps."""

    def __init__(self, max_num_seqs: int, num_blocks: int, block_size: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.last_token: list[int | None] = [None] * max_num_seqs
        self.seed: list[int | None] = [None] * max_num_seqs
        self.temperature: list[float | None] = [None] * max_num_seqs
        self.block_table: list[dict[int, int]] = [{} for _ in range(max_num_seqs)]
        self.kv: list[list[tuple[int, int] | None]] = [[None] * block_size for _ in range(num_blocks)]
        """(version of the weights, text) by block and offset. A text is a node of the tree below."""
        self.weights_version = 0
        self._child: dict[tuple[int, int], int] = {}
        self._parent: list[int] = [ROOT]
        self._token: list[int] = [-1]
        self._digest: list[int] = [0]

    def load_weights(self) -> None:
        """From here on every entry written before is wrong."""
        self.weights_version += 1

    def text(self, node: int) -> list[int]:
        """The tokens from the root to `node`."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self._token[node])
            node = self._parent[node]
        return tokens[::-1]

    def execute(self, packed: np.ndarray) -> tuple[list[int], list[int]]:
        """Runs one step; returns the sampled tokens and, by row, the text its last computed position stands for."""
        assert packed.dtype == np.int32 and packed.ndim == 1
        data = packed.tolist()
        num_rows, num_decodes, num_samples, num_tokens, num_updates, num_records, max_count = data[:7]
        assert 0 < num_rows <= self.max_num_seqs and num_decodes <= num_samples <= num_rows
        columns = [data[HEADER_SIZE + i * self.max_num_seqs :][:num_rows] for i in range(3)]
        at = HEADER_SIZE + 3 * self.max_num_seqs
        self._update_block_tables(data[at : at + 3 * num_updates])
        at += 3 * num_updates
        for record in range(num_records):
            self._take_record(packed[at + record * RECORD_SIZE :][:RECORD_SIZE])
        prompt_tokens = data[at + num_records * RECORD_SIZE :]
        if (where := block_copies(packed)) is not None:
            del prompt_tokens[-len(data[where]) :]
            for source, destination in zip(data[where][::2], data[where][1::2], strict=True):
                self.kv[destination] = list(self.kv[source])

        slots, starts, counts = columns
        assert len(set(slots)) == num_rows, "two rows in one slot"
        assert sum(counts) == num_tokens and max(counts) == max_count and counts[:num_decodes] == [1] * num_decodes
        assert len(prompt_tokens) == num_tokens - num_decodes
        # Layer by layer, all rows write before any row reads; a row therefore must not read what another writes now.
        nodes = [self._prefix(slot, start) for slot, start in zip(slots, starts, strict=True)]
        written: set[tuple[int, int]] = set()
        for row, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
            if row < num_decodes:
                last = self.last_token[slot]
                assert last is not None, f"slot {slot} decodes before it sampled"
                tokens = [last]
            else:
                tokens, prompt_tokens = prompt_tokens[:count], prompt_tokens[count:]
            for position, token in enumerate(tokens, start):
                nodes[row] = self._descend(nodes[row], token)
                place = self._place(slot, position)
                assert place not in written, f"two rows write {place}"
                written.add(place)
                self.kv[place[0]][place[1]] = (self.weights_version, nodes[row])
        for slot, start, _ in zip(slots, starts, counts, strict=True):
            self._prefix(slot, start)  # still intact after everybody's writes
        sampled = [self._sample(slots[row], nodes[row]) for row in range(num_samples)]
        return sampled, nodes

    def _update_block_tables(self, updates: list[int]) -> None:
        for slot, index, block in zip(updates[::3], updates[1::3], updates[2::3], strict=True):
            self.block_table[slot][index] = block

    def _take_record(self, record: np.ndarray) -> None:
        slot = int(record[0])
        self.temperature[slot] = float(record[1:2].view(np.float32)[0])
        self.seed[slot] = int(record[2:4].copy().view(np.int64)[0])
        self.last_token[slot] = int(record[4])

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.block_size)
        return self.block_table[slot][index], offset

    def _prefix(self, slot: int, length: int) -> int:
        """The text that the slot's KV holds for positions 0..length-1; every entry must continue the one before."""
        node = ROOT
        for position in range(length):
            entry = self.kv[self._place(slot, position)[0]][position % self.block_size]
            assert entry is not None, f"slot {slot} reads position {position} before it is written"
            version, found = entry
            assert version == self.weights_version, f"slot {slot} reads position {position} of older weights"
            assert self._parent[found] == node and found != ROOT, f"slot {slot} reads another text at {position}"
            node = found
        return node

    def _descend(self, node: int, token: int) -> int:
        child = self._child.get((node, token))
        if child is None:
            child = self._child[node, token] = len(self._parent)
            self._parent.append(node)
            self._token.append(token)
            self._digest.append(extend_digest(self._digest[node], token))
        return child

    def _sample(self, slot: int, node: int) -> int:
        seed = self.seed[slot]
        assert seed is not None, f"slot {slot} has no record"
        token = next_token(self._digest[node], seed)
        self.last_token[slot] = token
        return token
