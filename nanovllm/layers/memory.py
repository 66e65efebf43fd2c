"""Memory that a layer needs for its rows. The layer declares it; runner/state_memory.py sums, allocates and frees
it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Pages:
    """Memory that grows with the tokens, keys and values mostly: in blocks, as a KVCache. Sizes are this rank's."""

    heads: int
    widths: tuple[int, ...]
    """Elements of a head in each tensor: of keys and of values; of both together where values are keys."""
    window: int | None = None
    """Tokens that a query sees, its own among them; None: all before it. What no later query sees may go."""
    takes_fp8: bool = False
    """Whether the mixer can keep them in e4m3, with the cache's scales (kv_cache_dtype="fp8")."""

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token, with the two scales of a head where `dtype` is e4m3."""
        scales = 2 * torch.bfloat16.itemsize if dtype == torch.float8_e4m3fn else 0
        return self.heads * (sum(self.widths) * dtype.itemsize + scales)


@dataclass(frozen=True)
class Slot:
    """A tensor of fixed size for each row, its state: zeros before the first token, then what its mixer writes. Sizes
    are this rank's.

    A step's `rows` say in which line of it each row finds its state, in which it leaves it, and which one gets the
    state as it is in between, for rows to come that begin with the same text (kernels/recurrent/rows.py). With drafts a
    decode has a row for each of its places, of which each reads the line that the one before writes (`has_places`).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Mixer(Protocol):
    """Module that mixes tokens in a layer, and remembers something of them for later steps."""

    can_capture: bool
    """Whether its work can be captured in CUDA graphs: it reads no tensor on the host."""

    @property
    def memory(self) -> tuple[Pages | Slot, ...]:
        """Declarations of all that it remembers."""

    def bind(self, *memory: Any) -> None:
        """Takes what it declares, in that order: a KVCache for Pages; for a Slot a tensor [lines, *shape]. It
        is called anew when memory is allocated, and with empty memory when the engine lets go of it."""


def pages_of(mixers: Iterable[Mixer]) -> list[Pages]:
    """Returns all Pages that these declare, in order."""
    return [one for mixer in mixers for one in mixer.memory if isinstance(one, Pages)]


def slots_of(mixers: Iterable[Mixer]) -> list[Slot]:
    """Returns all Slots that these declare, in order."""
    return [one for mixer in mixers for one in mixer.memory if isinstance(one, Slot)]
