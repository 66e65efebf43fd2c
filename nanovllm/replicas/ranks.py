"""In place of an executor: what an engine asks of its ranks, of all replicas."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import ReplicaError

if TYPE_CHECKING:
    import torch

    from nanovllm.config import EngineConfig

Ask = Callable[..., list[Any]]
"""(method, arguments, weights) -> what that method of every replica's engine returns."""


class ReplicaRanks:
    """The part of LocalExecutor that changes what steps run with; the replicas launch steps themselves."""

    shares_weights = failed = False

    def __init__(self, config: "EngineConfig", num_kvcache_blocks: int, ask: Ask) -> None:
        self.config, self.num_kvcache_blocks, self._ask = config, num_kvcache_blocks, ask
        self.owner = os.getpid()

    def check(self) -> None:
        """Replicas say by themselves what has failed."""

    def check_weights(self, weights: "Iterable[tuple[str, torch.Tensor]] | str | Path") -> None:
        """Each replica looks at what comes, as it comes."""

    def update_weights(self, weights: "Iterable[tuple[str, torch.Tensor]]") -> None:
        self._ask("update", weights=weights)

    def load_folder(self, folder: Path) -> None:
        self._ask("update", str(folder))

    def finish_weight_update(self) -> None:
        self._ask("finish_update", None)

    def call(self, method: str, *args: Any) -> list[Any]:
        """`sleep` and `wake_up`, as the executor's ranks know them."""
        if method == "sleep":
            tags, keeps_weights = args
            return self._ask("sleep", 1 if keeps_weights else 2, tags)
        assert method == "wake_up"
        return self._ask(method, *args)

    def checksum(self) -> dict[str, str]:
        """Raises RuntimeError where two replicas hold different values of one tensor."""
        if not (found := self._ask("checksum")):
            raise ReplicaError("checksum: every replica was lost meanwhile")
        first, *others = found
        for other in others:
            if different := [name for name in first if other.get(name) != first[name]]:
                raise RuntimeError(f"checksum: replicas hold different values of {different[0]}")
        return first
