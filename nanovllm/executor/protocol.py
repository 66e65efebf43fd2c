"""Executor: what an engine needs of its ranks, all as one object."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nanovllm.config import EngineConfig
from nanovllm.wire.sampling import StepScores
from nanovllm.wire.state import StateSize

if TYPE_CHECKING:
    import torch

    from nanovllm.models.adapter_files import Adapter

    Weights = Iterable[tuple[str, torch.Tensor]] | str | Path
    """New values: tensors by their checkpoint names, or a folder with *.safetensors."""


class Executor(Protocol):
    """Runs packed steps on every rank, in the order of their launches, and rare calls between two steps. Any failure
    ends it: then every method raises."""

    config: EngineConfig
    """The options, with no "auto" left."""
    state_size: StateSize
    """Memory that each rank has for rows."""
    tokens_per_step: int
    """Maximum tokens that a sequence gains in one step."""
    shares_weights: bool
    """Whether the weights are a live module's, whose owner writes to them."""
    owner: int
    """The process that can use it."""

    @property
    def failed(self) -> bool:
        """Whether every further call raises."""

    def check(self) -> None:
        """Raises where a rank has failed, and says how."""

    def launch(self, packed: np.ndarray) -> None:
        """Starts a packed step (wire/step.py); does not wait for it."""

    def has_result(self) -> bool:
        """Whether `collect` would not wait."""

    def collect(self) -> tuple[list[int], StepScores | None]:
        """Waits for the oldest step not yet collected: the tokens that its first rows gained (Scheduler.apply), and
        behind them, where tokens_per_step is not 1, how many were drafted for later; and what it brings beside these,
        if anything."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every rank's runner, or of a part of it ("weights.refresh"); returns what they return, in
        rank order."""

    def check_weights(self, weights: "Weights") -> None:
        """Raises ValueError where these cannot replace all weights. What can be read only once is not looked at."""

    def update_weights(self, weights: "Weights") -> None:
        """Writes tensors, whole ones or those of a folder, in place. Raises ValueError naming what cannot be loaded;
        what came before it is written."""

    def finish_weight_update(self) -> None:
        """Raises ValueError naming the weights that are missing."""

    def read_adapter(self, given: "Path | Adapter") -> None:
        """Has all ranks begin to read an adapter, which then say "adapters.is_reading"."""

    def weights_changed(self) -> bool:
        """Whether a module's weights were written to since the last call of "weights.refresh"."""

    def checksum(self) -> dict[str, str]:
        """A checksum of each checkpoint tensor, the same at every number of ranks."""

    def sleep(self, tags: tuple[str, ...], keep_weights: bool) -> int:
        """Gives the memory of "weights" and "kv_cache" back; returns the bytes."""

    def wake_up(self, tags: tuple[str, ...]) -> None:
        """Takes the memory again."""

    def info(self) -> dict[str, Any]:
        """Facts about the ranks: devices, libraries, memory, seconds of the start."""

    def close(self) -> None:
        """Ends the ranks and frees what they hold. Does nothing the second time."""
