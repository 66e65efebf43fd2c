"""Slots of the devices: those of running rows, and those of the adapters that they have. Pure.

A row begins where its adapter has a slot, or another slot has no running row. Else others pass it. An adapter whose
rows were passed for PATIENCE steps becomes heir of a slot: no more rows of the adapter there begin, so that the slot
is free when those that run have ended.
"""

from collections.abc import Iterable, Set

from nanovllm.engine.schedule import Schedule
from nanovllm.engine.sequence import Sequence

PATIENCE = 32


class RowSlots:
    """Slots of `count` running rows, and of `adapters` adapters."""

    def __init__(self, count: int, adapters: int) -> None:
        self.count, self.adapters = count, AdapterSlots(adapters)
        self._free = list(range(count - 1, -1, -1))
        self.passed: set[str] = set()
        """Adapters of rows that were passed in this step's admissions, for want of a slot."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def begin_admissions(self, any_running: bool) -> None:
        if not any_running:
            self.adapters.heirs.clear()  # one that is held would keep a slot from rows that are not

    def passes(self, seq: Sequence) -> bool:
        """Whether a row must wait for a slot for its adapter, and let others pass."""
        adapter = seq.prompt.adapter
        if adapter is None or (adapter not in self.passed and self.adapters.find(adapter) is not None):
            return False
        self.passed.add(adapter)
        return True

    def end_admissions(self, waiting: Set[str]) -> None:
        """waiting: adapters of all rows that wait."""
        if self.passed:
            self.adapters.note_passed(self.passed, waiting)
            self.passed = set()

    def take(self, seq: Sequence, schedule: Schedule) -> None:
        """Gives a row that begins a slot, and one for its adapter, which the step copies there if it is missing."""
        seq.slot = self._free.pop()
        schedule.new_slots.append(seq)
        if (adapter := seq.prompt.adapter) is not None:
            seq.adapter_slot, is_missing = self.adapters.take(adapter)
            if is_missing:
                schedule.adapters.append((seq.adapter_slot, adapter))

    def num_adapted(self, seqs: Iterable[Sequence]) -> int:
        """Number of these running rows that have an adapter."""
        return sum(seq.adapter_slot >= 0 for seq in seqs) if self.adapters.running else 0

    def release(self, seq: Sequence) -> None:
        """Takes a row's slots back."""
        self._free.append(seq.slot)
        if seq.adapter_slot >= 0:
            self.adapters.release(seq.adapter_slot)
        seq.slot = seq.adapter_slot = -1

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Asserts that these rows have all slots that are not free."""
        rows = list(running)
        slots = sorted([seq.slot for seq in rows] + self._free)
        assert slots == list(range(self.count)), slots
        self.adapters.check_integrity([(seq.adapter_slot, seq.prompt.adapter) for seq in rows])


class AdapterSlots:
    def __init__(self, count: int) -> None:
        self._held: list[str | None] = [None] * count
        self._users, self._last_used = [0] * count, [0] * count
        self._clock = 0
        self.heirs: dict[int, str] = {}
        """Adapter that gets a slot next, by slot."""
        self._passed: dict[str, int] = {}
        """Steps in which rows of an adapter without slot were passed."""

    @property
    def running(self) -> list[str]:
        """Adapters of running rows."""
        return [digest for digest, users in zip(self._held, self._users, strict=True) if digest is not None and users]

    def find(self, digest: str) -> int | None:
        """Slot for a row with this adapter; None: it has to wait."""
        open_slots = [slot for slot in range(len(self._held)) if self.heirs.get(slot, digest) == digest]
        if (held := next((slot for slot in open_slots if self._held[slot] == digest), None)) is not None:
            return held
        if digest in self.running:  # in a slot that has an heir: it waits, as others do
            return None
        free = (slot for slot in open_slots if not self._users[slot])
        return min(free, key=lambda slot: (digest != self.heirs.get(slot), self._last_used[slot]), default=None)

    def take(self, digest: str) -> tuple[int, bool]:
        """Counts a row that begins with this adapter: its slot, and whether the adapter must be copied there."""
        slot = self.find(digest)
        assert slot is not None, digest
        is_missing = self._held[slot] != digest
        self._held[slot] = digest
        self._users[slot] += 1
        self._passed.pop(digest, None)
        if self.heirs.get(slot) == digest:
            del self.heirs[slot]
        return slot, is_missing

    def release(self, slot: int) -> None:
        """A row with the adapter in this slot runs no longer."""
        self._users[slot] -= 1
        self._clock += 1
        self._last_used[slot] = self._clock

    def check_integrity(self, rows: list[tuple[int, str | None]]) -> None:
        """Asserts that rows have these slots and adapters, and nobody else."""
        assert all((slot < 0) == (digest is None) for slot, digest in rows), rows
        assert all(self._held[slot] == digest for slot, digest in rows if slot >= 0), (rows, self._held)
        users = [sum(slot == taken for taken, _ in rows) for slot in range(len(self._users))]
        assert users == self._users, (users, self._users)

    def note_passed(self, digests: Set[str], waiting: Set[str]) -> None:
        """Ends a step's admissions, in which rows of `digests` found no slot. waiting: adapters of all that wait."""
        self.heirs = {slot: heir for slot, heir in self.heirs.items() if heir in waiting}
        self._passed = {digest: count for digest, count in self._passed.items() if digest in waiting}
        for digest in sorted(digests, key=lambda digest: -self._passed.get(digest, 0)):
            self._passed[digest] = self._passed.get(digest, 0) + 1
            without = [slot for slot in range(len(self._held)) if slot not in self.heirs]
            if self._passed[digest] >= PATIENCE and without and digest not in self.heirs.values():
                self.heirs[min(without, key=self._users.__getitem__)] = digest
