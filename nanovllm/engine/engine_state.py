"""State of an engine that calls change, and the kinds of its memory that can sleep."""

from collections.abc import Sequence
from typing import Literal

import msgspec

Tag = Literal["weights", "kv_cache"]
TAGS = ("weights", "kv_cache")
"""Kinds of memory that can sleep."""


class EngineState(msgspec.Struct, array_like=True):
    """State of an engine that calls change: paused, asleep, being updated."""

    paused: bool = False
    asleep: list[str] = []
    level: int = 0
    """Level of the sleep."""
    lacks_weights: bool = False
    weight_version: int = 0
    incomplete: str = ""
    """Reason why there are no weights to step with; "" where there are."""

    @property
    def weights_replaced(self) -> bool:
        """Whether the weights are others than those of the checkpoint, or are to be."""
        return self.weight_version > 0 or self.lacks_weights


def state_of_all(states: Sequence[EngineState]) -> EngineState:
    """State of several engines as that of one."""
    return EngineState(
        any(state.paused for state in states),
        sorted({tag for state in states for tag in state.asleep}),
        max(state.level for state in states),
        any(state.lacks_weights for state in states),
        max(state.weight_version for state in states),
        next((state.incomplete for state in states if state.incomplete), ""),
    )
