"""State of an engine that calls change, the kinds of its memory that can sleep, and what becomes of requests when it
gets new weights."""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, get_args

import msgspec

from nanovllm.errors import EngineAsleep, WeightsIncomplete

Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = get_args(Tag)
"""Kinds of memory that can sleep."""
InFlight = Literal["recompute", "keep", "wait", "abort"]
IN_FLIGHT: tuple[InFlight, ...] = get_args(InFlight)
"""Modes for requests in flight when new weights come. "recompute": they start over from their tokens so far. "keep":
they go on with the KV that the old weights computed. "wait": they end first, while no other begins. "abort": they are
aborted."""


class LoadedAdapter(msgspec.Struct, array_like=True, frozen=True):
    digest: str
    """Digest of the bytes of its files, or of none where it came from memory: what rows know it by."""
    path: str
    """Folder that it was read from; "": it came from memory."""


class EngineState(msgspec.Struct, array_like=True):
    """State of an engine that calls change. Each engine has one, written by its control and its book; a fleet has one
    for all of its engines. Answers to calls carry copies."""

    pause_mode: str | None = None
    """Mode of the current pause; None: not paused."""
    asleep: list[str] = []
    """Tags (of TAGS) whose memory sleeps, sorted. The list is replaced, never changed in place."""
    level: int = 0
    """Level of the last sleep."""
    incomplete: str = ""
    """Reason why the weights are incomplete, so that no step can run; "" where they are complete."""
    weight_version: int = 0
    """Version of the weights that the next step runs with."""
    adapters: dict[str, LoadedAdapter] = {}
    """Adapters that requests may name, by name. The dict is replaced, never changed in place."""

    kept_adapters: list[str] = []
    """Digests of adapters that have no name any more, but that requests on their way here have."""

    def held_adapters(self) -> set[str]:
        """Digests of the adapters that requests which come now may have."""
        return {*self.kept_adapters, *(one.digest for one in self.adapters.values())}

    def require_adapter(self, digest: str | None) -> None:
        """Raises ValueError where a request has an adapter that is not loaded."""
        if digest is not None and digest not in self.held_adapters():
            raise ValueError("lora_request: its adapter is not loaded; it was removed or replaced meanwhile")

    def adapter_names(self, digests: Collection[str]) -> tuple[str, ...]:
        """Names of these adapters, sorted; of one that has none any more, its digest."""
        if not digests:
            return ()
        named = [(one.digest, name) for name, one in self.adapters.items() if one.digest in digests]
        return tuple(sorted({name for _, name in named} | ({*digests} - {digest for digest, _ in named})))

    @property
    def is_paused(self) -> bool:
        return self.pause_mode is not None

    @property
    def lacks_weights(self) -> bool:
        """Whether an update has begun and not finished, or sleep has dropped the weights."""
        return self.incomplete != ""

    @property
    def weights_replaced(self) -> bool:
        """Whether the checkpoint's weights were replaced, or are being replaced."""
        return self.weight_version > 0 or self.lacks_weights

    def require_awake(self, tags: Iterable[str] = TAGS) -> None:
        """Raises EngineAsleep where some of this memory sleeps."""
        if asleep := sorted({*tags}.intersection(self.asleep)):
            raise EngineAsleep(f"this engine is asleep ({', '.join(asleep)}): call wake_up first")

    def require_weights(self) -> None:
        """Raises WeightsIncomplete where there are none to step with."""
        if self.incomplete:
            until = "no step can run until load_weights, or begin_update and finish_update, succeed"
            raise WeightsIncomplete(f"{self.incomplete}: {until}")

    def sum_up(self, states: Sequence["EngineState"]) -> None:
        """Sets this state to the summary of several engines' states. The version never decreases."""
        self.pause_mode = next((state.pause_mode for state in states if state.is_paused), None)
        self.asleep = sorted({tag for state in states for tag in state.asleep})
        self.level = max(state.level for state in states)
        self.incomplete = next((state.incomplete for state in states if state.incomplete), "")
        first, *others = (state.adapters for state in states)
        self.adapters = {name: one for name, one in first.items() if all(other.get(name) == one for other in others)}
        self.weight_version = max(self.weight_version, *(state.weight_version for state in states))
