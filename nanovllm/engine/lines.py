"""Lines of memory of fixed size, in which recurrent layers keep the state of a row: who owns which line, and which
states after whole blocks of text are kept for rows to come.

In a step a row reads one line and writes one, mostly the same. A row that begins reads the line of a kept state, or
zeros; a row whose state is kept goes on in another line. So nothing is ever copied or cleared.

Where steps verify drafts, nobody knows before a step where it leaves a row. Then a decode has one line more, for the
state after its next whole block: the device swaps it in when the row gets there (kernels/step/drafts.py).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping

from nanovllm.engine.sequence import RowPages, Sequence
from nanovllm.wire.step import NO_LINE


class LinePool:
    """Owner of the lines. A line is unused, a row's, or kept: found by the key of the block that its state follows, and
    reused where no unused one is left, least recently used first.

    Steps happen on the device in the order of their launches. So what a step reads is not written in that step, and
    what it writes is found from the next one on.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._unused = list(range(count - 1, -1, -1))
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._readers: Counter[int] = Counter()
        """Number of rows that have not left a line which they begin with: it must not be written yet."""
        self._left: list[int] = []
        """Lines that rows of the step being scheduled read for the last time."""
        self._being_written: dict[bytes, int] = {}
        """Lines that get a state in the step being scheduled."""
        self._forgotten: set[int] = set()
        """Lines with readers whose states are kept no more."""
        self._lent: dict[int, RowPages] = {}
        """Rows by their keep_line, which is taken from them when it is needed otherwise."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    @property
    def has_free(self) -> bool:
        return self._has_spare or bool(self._lent)

    @property
    def _has_spare(self) -> bool:
        return bool(self._unused) or any(not self._readers[line] for line in self._kept.values())

    def begin_step(self) -> None:
        """Begins the step after the one that was launched last."""
        self._kept.update(self._being_written)
        self._being_written.clear()
        for line in self._left:
            self._drop_reader(line)
        self._left.clear()

    def columns(self, seqs: list[Sequence], keeps: Mapping[Sequence, tuple[int, int]]) -> list[list[int]]:
        """Lines that the rows of a step read, write and keep, and the tokens before these are kept (Schedule.keeps)."""
        rows, kept = [seq.memory for seq in seqs], [keeps.get(seq, (NO_LINE, 0)) for seq in seqs] if keeps else []
        found = [[row.read_line for row in rows], [row.line for row in rows]]
        for row in rows:
            if row.read_line != row.line:
                if row.read_line != NO_LINE:
                    self._left.append(row.read_line)
                row.read_line = row.line
        none = [NO_LINE] * len(rows), [0] * len(rows)
        return [*found, *(map(list, zip(*kept, strict=True)) if kept else none)]

    def admit(self, seq: Sequence, key: bytes | None) -> None:
        """Gives a row its line; one must be free. key: of the block after which it begins, whose state is kept; None:
        it begins anew."""
        memory = seq.memory
        if key is None:
            memory.line, memory.read_line = self._take(), NO_LINE
            return
        self._kept.move_to_end(key)
        memory.read_line = self._kept[key]
        self._readers[memory.read_line] += 1
        if self.has_free:
            memory.line = self._take()
        else:  # it takes the kept one over, which has no other reader
            memory.line = self._kept.pop(key)
            del self._readers[memory.line]

    def save(self, seq: Sequence, key: bytes) -> None:
        """Keeps the state that a row has now, after a block of this key, in place of the last one saved so."""
        if key in self._kept or key in self._being_written or seq.memory.read_line != seq.memory.line:
            return
        if seq.prefix.saved_key is not None:
            self.forget(seq.prefix.saved_key)
        if self.has_free:
            self._kept[key] = seq.memory.read_line
            self._readers[seq.memory.read_line] += 1
            seq.memory.line, seq.prefix.saved_key = self._take(), key

    def lend(self, memory: RowPages) -> bool:
        """Gives a row that decodes a keep_line, if it has none and one is to spare. Returns whether it has one."""
        if memory.keep_line == NO_LINE and self._has_spare:
            memory.keep_line, memory.has_passed = self._take(), False
            self._lent[memory.keep_line] = memory
        return memory.keep_line != NO_LINE

    def keep_passed(self, seq: Sequence, key: bytes) -> None:
        """Keeps the state in a row's keep_line, after a block of this key, in place of the last one saved so."""
        line = self._take_back(seq.memory)
        if key in self._kept or key in self._being_written:
            self._unused.append(line)
            return
        if seq.prefix.saved_key is not None:
            self.forget(seq.prefix.saved_key)
        self._kept[key], seq.prefix.saved_key = line, key

    def _take_back(self, memory: RowPages) -> int:
        line, memory.keep_line = memory.keep_line, NO_LINE
        del self._lent[line]
        return line

    def keep(self, key: bytes) -> int:
        """Line for a state that a row passes in the step being scheduled; NO_LINE: it is kept, or there is no room."""
        if key in self._kept:
            self._kept.move_to_end(key)
        elif key not in self._being_written and self.has_free:
            self._being_written[key] = line = self._take()
            return line
        return NO_LINE

    def release(self, seq: Sequence) -> None:
        """Takes back the line of a row."""
        memory = seq.memory
        if memory.read_line not in (memory.line, NO_LINE):
            self._drop_reader(memory.read_line)
        self._unused.append(memory.line)
        if memory.keep_line != NO_LINE:
            self._unused.append(self._take_back(memory))

    def forget(self, key: bytes) -> None:
        """Keeps the state after a block no longer, if it does."""
        if (line := self._kept.pop(key, None)) is not None:
            if self._readers[line]:
                self._forgotten.add(line)
            else:
                self._unused.append(line)

    def forget_all(self) -> None:
        """Keeps no state any longer."""
        self._kept.update(self._being_written)
        self._being_written.clear()
        for key in [*self._kept]:
            self.forget(key)

    def _take(self) -> int:
        if not self._unused and not self._has_spare:
            self._unused.append(self._take_back(next(iter(self._lent.values()))))
        elif not self._unused:
            self.forget(next(key for key, line in self._kept.items() if not self._readers[line]))
        return self._unused.pop()

    def _drop_reader(self, line: int) -> None:
        self._readers[line] -= 1
        if not self._readers[line]:
            del self._readers[line]
            if line in self._forgotten:
                self._forgotten.remove(line)
                self._unused.append(line)

    def check_integrity(self, owners: Iterable[Sequence]) -> None:
        """Asserts that each line is unused, kept, or one row's."""
        rows = [seq.memory for seq in owners]
        held = [*(row.line for row in rows), *self._kept.values(), *self._being_written.values(), *self._forgotten]
        held += [row.keep_line for row in rows if row.keep_line != NO_LINE]
        assert all(row.keep_line == line for line, row in self._lent.items()), self._lent
        assert sorted(held + self._unused) == list(range(self.count)), (held, self._unused)
        begun = Counter(row.read_line for row in rows if row.read_line not in (row.line, NO_LINE)) + Counter(self._left)
        assert +self._readers == begun, (self._readers, begun)
