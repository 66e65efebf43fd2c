"""State of an engine that calls change, and the kinds of its memory that can sleep."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from nanovllm.errors import EngineAsleep, WeightsIncomplete

Tag = Literal["weights", "kv_cache"]
TAGS = ("weights", "kv_cache")
"""Kinds of memory that can sleep."""


class EngineState(msgspec.Struct, array_like=True):
    """State of an engine that calls change. An engine has one, which its control and its book write; a fleet has one of
    all its engines. Answers carry copies."""

    pause_mode: str | None = None
    """Mode of the pause that lasts; None: not paused."""
    asleep: list[str] = []
    """Memory that sleeps, of TAGS, sorted. Replaced, never changed."""
    level: int = 0
    """Level of the last sleep."""
    incomplete: str = ""
    """Reason why there are no weights to step with; "" where there are."""
    weight_version: int = 0
    """Version of the weights that the next step runs with."""

    @property
    def is_paused(self) -> bool:
        return self.pause_mode is not None

    @property
    def lacks_weights(self) -> bool:
        """Whether an update has begun and not finished, or sleep has dropped the weights."""
        return self.incomplete != ""

    @property
    def weights_replaced(self) -> bool:
        """Whether the weights are others than those of the checkpoint, or are to be."""
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
        """Becomes the state of several engines as that of one, whose version never goes down."""
        self.pause_mode = next((state.pause_mode for state in states if state.is_paused), None)
        self.asleep = sorted({tag for state in states for tag in state.asleep})
        self.level = max(state.level for state in states)
        self.incomplete = next((state.incomplete for state in states if state.incomplete), "")
        self.weight_version = max(self.weight_version, *(state.weight_version for state in states))
