"""Where tensors of a trainer in another process come in: what /init_weight_transfer_engine opens and /update_weights
uses."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine


class WeightFeed(Protocol):
    """A way from a trainer to the engine."""

    def update(self, update_info: dict[str, Any]) -> None:
        """Writes what the trainer sends now, with engine.update. `update_info`: names, dtypes, shapes and the like, as
        the trainer says them. Raises ValueError naming what is wrong with it."""

    def close(self) -> None: ...


FEEDS: dict[str, Callable[["LLMEngine", dict[str, Any]], WeightFeed]] = {}
"""What opens a feed, by a name that its `init_info` has."""


def open_feed(engine: "LLMEngine", init_info: dict[str, Any]) -> WeightFeed:
    """Meets the trainer. Raises ValueError where `init_info` describes no way that there is."""
    for name, opener in FEEDS.items():
        if name in init_info:
            return opener(engine, init_info)
    known = ", ".join(FEEDS) or "none in this build; weights come by weight_dir"
    raise ValueError(f"init_info: must have one of: {known}")
