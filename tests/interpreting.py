"""Where there is no GPU, Triton's interpreter computes, some thousand times slower: fewer cases there, all nightly."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()


def nightly(*values: Any) -> Any:
    """A case of a parametrised test; in the interpreter it is left to nightly runs."""
    return pytest.param(*values, marks=[pytest.mark.slow] if INTERPRETED else [])


def some_nightly(cases: Iterable[tuple[Any, ...]], always: Collection[tuple[Any, ...]]) -> list[Any]:
    """All of `cases`, in the interpreter those of `always` by day."""
    return [case if case in always else nightly(*case) for case in cases]


def fewer(interpreted: int, compiled: int) -> int:
    """How much to draw."""
    return interpreted if INTERPRETED else compiled
