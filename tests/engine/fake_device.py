"""A device that computes no attention but remembers exactly what it would have attended to.

It sees what real ranks see, the packed step and nothing else, and executes steps in the order of their launches. For
each KV position it stores which text, token by token, the entry was computed from. A row that reads anything but the KV
of its own prefix is an error at once, so that wrong sharing, blocks that are hits before their data is there, stale
blocks, slots used twice and weights changed under a cache all show. The sampled token depends on the whole prefix and
on the slot's seed: each request's output has exactly one right value.

A row that decodes may gain several tokens in a step. The device then plays one whose drafts were right up to somewhere:
it writes what wrong drafts would have written behind the tokens that it keeps.
"""

import zlib
from collections.abc import Callable

import numpy as np

from nanovllm.wire.state import PageGroup
from nanovllm.wire.step import HEADER_SIZE, NO_LINE, PLACES_WORD, RECORD_SIZE, block_copies, row_lines

VOCAB_SIZE = 16
ROOT = 0  # the empty text


def next_token(digest: int, seed: int) -> int:
    """The token that follows a text of this digest, for a request of this seed."""
    return zlib.crc32(seed.to_bytes(8, "little", signed=True), digest) % VOCAB_SIZE


def extend_digest(digest: int, token_id: int) -> int:
    return zlib.crc32(token_id.to_bytes(4, "little"), digest)


class FakeDevice:
    """State by slot, block tables and a KV store, fed by packed steps."""

    def __init__(
        self, max_num_seqs: int, num_blocks: int, block_size: int, gain: Callable[[int], int] | None = None,
        groups: tuple[PageGroup, ...] = (PageGroup(),), table_width: int = 1 << 20, num_lines: int = 0,
    ) -> None:  # fmt: skip
        """gain: how many tokens, from 1 up to the number given, a row gains that may gain so many. groups: of the
        layers; a layer of each table attends to its own blocks. num_lines: of memory of fixed size; 0: none has any."""
        self.lines: list[tuple[int, int] | None] = [None] * num_lines
        """(version of the weights, text) by line: the text whose state it holds."""
        self.windows = [group.window for group in groups for _ in range(group.num_tables)]
        """Window of each table."""
        self._table_width = table_width
        self.max_num_seqs, self._gain = max_num_seqs, gain
        self.block_size = block_size
        self.last_token: list[int | None] = [None] * max_num_seqs
        self.num_computed: list[int] = [0] * max_num_seqs
        """Position of each slot's next decode."""
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
        """Makes every entry written before wrong."""
        self.weights_version += 1

    def text(self, node: int) -> list[int]:
        """The tokens from the root to `node`."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self._token[node])
            node = self._parent[node]
        return tokens[::-1]

    def execute(self, packed: np.ndarray) -> tuple[list[int], list[int]]:
        """Runs one step; returns the tokens that its first rows gained as Scheduler.apply takes them, and by row the
        text its last position stands for."""
        assert packed.dtype == np.int32 and packed.ndim == 1
        num_rows, num_decodes, num_samples, num_tokens, _, _, max_count = packed[:7].tolist()
        assert 0 < num_rows <= self.max_num_seqs and num_decodes <= num_samples <= num_rows
        (slots, starts, counts), prompt_tokens = self._take_in(packed)
        places = int(packed[PLACES_WORD])
        assert sum(counts) + (places - 1) * num_decodes == num_tokens and max(counts) == max_count and min(counts) > 0
        assert counts[:num_decodes] == [1] * num_decodes and len(prompt_tokens) == num_tokens - places * num_decodes
        assert len(set(slots)) == len(slots), "two rows in one slot"
        for row, slot in enumerate(slots[:num_decodes]):
            end, starts[row] = starts[row] + 1, self.num_computed[slot]
            counts[row] = max(0, min(places, end - starts[row]))
            assert self._gain or counts[row] == 1
        live = counts[:num_decodes]
        # Layer by layer, all rows write before any row reads; a row therefore must not read what another writes now.
        nodes = [self._prefix(slot, start) for slot, start in zip(slots, starts, strict=True)]
        lines = row_lines(packed).tolist() if self.lines else [[]] * len(slots)
        for begun, node, start in zip(lines, nodes, starts, strict=True):
            assert not begun or self._state(begun[0]) == (self.weights_version, node), f"wrong state at {start}"
        self._check_lines(lines)
        written: set[tuple[int, int]] = set()
        gained: list[list[int]] = []
        for row, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
            if row < num_decodes:
                gained.append(self._draw(slot, nodes[row], count))
                tokens = [self.last_token[slot], *gained[row][:-1]][: len(gained[row])]
                assert None not in tokens, f"slot {slot} decodes before it sampled"
            else:
                tokens, prompt_tokens = prompt_tokens[:count], prompt_tokens[count:]
            self.num_computed[slot] = start + len(tokens)
            wrong = [VOCAB_SIZE] * (count - len(tokens))
            node = nodes[row]
            passed = [node]
            for position, token in enumerate(tokens + wrong, start):
                node = self._descend(node, token)
                if position < self.num_computed[slot]:
                    nodes[row] = node
                for table in range(len(self.windows)):
                    place = self._place(slot, position, table)
                    assert place not in written, f"two rows write {place}"
                    written.add(place)
                    self.kv[place[0]][place[1]] = (self.weights_version, node)
                passed.append(node)
            if lines[row]:
                self._write_states(lines[row], passed, nodes[row], row < num_decodes, start, len(tokens))
            if num_decodes <= row < num_samples:
                gained.append([self._sample(slot, nodes[row])])
        for slot, start in zip(slots, starts, strict=True):
            self._prefix(slot, start)  # still intact after everybody's writes
        for slot, tokens in zip(slots, gained, strict=False):
            self.last_token[slot] = tokens[-1] if tokens else self.last_token[slot]
        ids = []
        for row, tokens in enumerate(gained):
            wrong = live[row] - len(tokens) if row < num_decodes else 0
            ids += [*tokens, *[-1] * wrong, *[-2] * (places - live[row] if row < num_decodes else 0)]
        return ids, nodes

    def _take_in(self, packed: np.ndarray) -> tuple[list[list[int]], list[int]]:
        """Updates tables and slots and copies blocks, as a step says; returns the slots, starts and counts of its rows,
        and the tokens of its prompts."""
        data = packed.tolist()
        num_rows, _, _, _, num_updates, num_records, _ = data[:7]
        columns = [data[HEADER_SIZE + i * self.max_num_seqs :][:num_rows] for i in range(3)]
        at = HEADER_SIZE + 3 * self.max_num_seqs
        updates = data[at : at + 3 * num_updates]
        for slot, index, block in zip(updates[::3], updates[1::3], updates[2::3], strict=True):
            self.block_table[slot][index] = block
        at += len(updates)
        for record in range(num_records):
            self._take_record(packed[at + record * RECORD_SIZE :][:RECORD_SIZE])
        prompt_tokens = data[at + num_records * RECORD_SIZE :]
        if self.lines:
            begin = data[3] - data[1] * data[PLACES_WORD]
            del prompt_tokens[begin : begin + 4 * num_rows]
        if (where := block_copies(packed)) is not None:
            del prompt_tokens[-len(data[where]) :]
            for source, destination in zip(data[where][::2], data[where][1::2], strict=True):
                self.kv[destination] = list(self.kv[source])
        return columns, prompt_tokens

    def _state(self, line: int) -> tuple[int, int] | None:
        """State with which a row that reads this line begins; the empty text may be of any weights."""
        return (self.weights_version, ROOT) if line == NO_LINE else self.lines[line]

    def _write_states(
        self, lines: list[int], passed: list[int], last: int, decodes: bool, start: int, num_gained: int
    ) -> None:
        """Writes a row's lines. passed: texts after 0, 1, ... of its tokens; of a decode those before its last that
        holds can be kept, by their lengths."""
        _, write, keep, at = lines
        self.lines[write] = (self.weights_version, last)
        if keep != NO_LINE and (not decodes or 0 <= at - start < num_gained):
            self.lines[keep] = (self.weights_version, passed[at - start if decodes else at])

    def _check_lines(self, lines: list[list[int]]) -> None:
        """No line that a step writes is another row's, or read by another."""
        for row, of_row in enumerate(lines):
            others = {line for number, of_other in enumerate(lines) if number != row for line in of_other[:3]}
            assert not of_row or not ({*of_row[1:3]} - {NO_LINE}) & others, (of_row, others)
            assert not of_row or ((of_row[2] == NO_LINE) == (of_row[3] == 0) and of_row[1] != NO_LINE), of_row
            assert not of_row or of_row[2] == NO_LINE or of_row[2] not in of_row[:2], of_row

    def _draw(self, slot: int, node: int, most: int) -> list[int]:
        """Tokens that a decode gains, at most `most`."""
        token, tokens = self.last_token[slot], []
        for _ in range(self._gain(most) if self._gain and most else most):
            assert token is not None
            node = self._descend(node, token)
            token = self._sample(slot, node)
            tokens.append(token)
        return tokens

    def _take_record(self, record: np.ndarray) -> None:
        slot = int(record[0])
        self.temperature[slot] = float(record[1:2].view(np.float32)[0])
        self.seed[slot] = int(record[2:4].copy().view(np.int64)[0])
        self.last_token[slot] = int(record[4])
        self.num_computed[slot] = int(record[5])

    def _place(self, slot: int, position: int, table: int) -> tuple[int, int]:
        index, offset = divmod(position, self.block_size)
        assert index < self._table_width
        return self.block_table[slot][table * self._table_width + index], offset

    def _prefix(self, slot: int, length: int) -> int:
        """The text that the slot's KV holds for positions 0..length-1, the same in each table."""
        [node] = {self._prefix_in(slot, length, table, window) for table, window in enumerate(self.windows)}
        return node

    def _prefix_in(self, slot: int, length: int, table: int, window: int | None) -> int:
        """Every entry that the token at `length` sees must continue the one before."""
        first = 0 if window is None else max(0, length - window + 1)
        node = ROOT if first == 0 else None
        for position in range(first, length):
            block, offset = self._place(slot, position, table)
            entry = self.kv[block][offset]
            assert entry is not None, f"slot {slot} reads position {position} before it is written"
            version, found = entry
            assert version == self.weights_version, f"slot {slot} reads position {position} of older weights"
            goes_on = found != ROOT and node in (None, self._parent[found])
            assert goes_on, f"slot {slot} reads another text at {position}"
            node = found
        assert node is not None, "a window of one token alone does not say which text it is"
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
        return next_token(self._digest[node], seed)
