"""The contract between the engine and what runs its steps: all ranks as one object, wherever they are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanovllm.config import EngineConfig
from nanovllm.wire.sampling import StepScores

Report = Callable[[str, float], None]
"""Takes a stage of the start and the share of it that is done: "load", "compile", "warm-up", "choose kernels" or
"capture", in this order, not all of them on every device."""


class Executor(ABC):
    """Runs packed steps on every rank, and rare calls. Any failure ends it: then every method raises."""

    config: EngineConfig
    """The options, with no "auto" left."""
    num_kvcache_blocks: int
    """KV blocks that requests can use: the least that any rank has."""
    shares_weights: bool = False
    """The weights are a live module's, whose owner writes to them."""
    owner: int
    """The process that it belongs to; a fork of that process cannot use it."""

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether every further call raises."""

    def check(self) -> None:
        """Raises where a rank has failed, and says how."""
        if self.failed:
            raise RuntimeError("a rank has failed")

    @abstractmethod
    def launch(self, packed: np.ndarray) -> None:
        """Starts a packed step on every rank (wire/step.py), without waiting for the device."""

    def has_result(self) -> bool:
        """Whether `collect` would not wait."""
        return True

    @abstractmethod
    def collect(self) -> list[int]:
        """Tokens of the oldest step not yet collected, one for each row that samples; waits for it."""

    @abstractmethod
    def collect_logprobs(self) -> StepScores:
        """What the step last collected brings beside its tokens, where it brings any."""

    @abstractmethod
    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every rank's runner; returns what they return, in rank order."""

    @abstractmethod
    def begin_weight_update(self, partial: bool) -> None:
        """New values come for all weights, or with `partial` for some. An update that has begun starts over."""

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Writes whole tensors under their checkpoint names, in place. Raises ValueError naming what cannot be loaded;
        what came before it is written."""

    @abstractmethod
    def load_folder(self, folder: Path) -> None:
        """The same from *.safetensors; each rank reads its own byte ranges. Raises as loading a model does."""

    @abstractmethod
    def finish_weight_update(self) -> None:
        """Raises ValueError naming the weights that are missing."""

    @abstractmethod
    def checksum(self) -> dict[str, str]:
        """A checksum of each checkpoint tensor, the same at every number of ranks. Raises RuntimeError where ranks hold
        different values of one tensor."""

    def weights_changed(self) -> bool:
        """Where it shares_weights: whether they were written to since the last call of refresh_weights on the ranks.
        Raises RuntimeError where the module has other tensors by now."""
        return False

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """What the ranks run on and with."""

    @abstractmethod
    def close(self) -> None:
        """Ends all ranks and frees what they hold. Does nothing the second time."""


def to_send(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the CPU, in memory of its own: a view, pickled, takes along all that it is a view of. Numbers of a
    byte go as bytes, since torch does not read them back."""
    tensor = tensor.detach().cpu().contiguous()
    tensor = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
