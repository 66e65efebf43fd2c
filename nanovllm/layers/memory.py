"""Memory that a layer needs for its rows. The layer declares it; runner/state_memory.py sums, allocates and frees
it."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Pages:
    """Keys and values of every token, in blocks, as a KVCache. Sizes are this rank's."""

    heads: int
    head_dim: int
    window: int | None = None
    """Tokens that a query sees, its own among them; None: all before it. What no later query sees may go."""

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token, with the two scales of a head where `dtype` is e4m3."""
        scales = 2 * torch.bfloat16.itemsize if dtype == torch.float8_e4m3fn else 0
        return self.heads * (2 * self.head_dim * dtype.itemsize + scales)


class Mixer(Protocol):
    """Mixer of tokens in a layer, with memory for later steps."""

    @property
    def memory(self) -> tuple[Pages, ...]:
        """Pages that it keeps."""

    def bind(self, *memory: Any) -> None:
        """Takes what it declares, in that order: a KVCache for Pages. It is called anew when memory is allocated, and
        with empty memory when the engine lets go of it."""
