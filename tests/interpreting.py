"""Cases for Triton's interpreter, which computes where there is no GPU, slowly: few by day, all nightly."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()


def nightly(*values: Any) -> Any:
    """A case of a parametrised test; in the interpreter it is left to nightly runs."""
    return pytest.param(*values, marks=[pytest.mark.slow] if INTERPRETED else [])


def some_nightly(cases: Iterable[tuple[Any, ...]], always: Collection[tuple[Any, ...]]) -> list[Any]:
    """Marks `cases` but those of `always` as nightly, in the interpreter alone."""
    return [case if case in always else nightly(*case) for case in cases]


def fewer(interpreted: int, compiled: int) -> int:
    """Number of examples to draw, by what computes."""
    return interpreted if INTERPRETED else compiled
