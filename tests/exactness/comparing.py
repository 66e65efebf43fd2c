"""Token by token against a reference, as far as the reference itself is sure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MARGIN = 1e-3
"""Float32 sums in another order move a score by some 1e-5. Where the best two are closer than this bound, either token
is right, and what follows is another text."""
SURE_SHARE = 0.95


@dataclass(frozen=True)
class Expected:
    """A request's tokens, and for each by how much its score led the second."""

    token_ids: list[int]
    margins: list[float]
    finish_reason: str | None = None

    @property
    def num_sure(self) -> int:
        """Tokens before the first near tie."""
        unsure = (i for i, margin in enumerate(self.margins) if margin < MARGIN)
        return next(unsure, len(self.token_ids))


def assert_same(actual: Sequence[int], expected: Expected, what: object = "") -> None:
    """`actual` follows `expected` up to its first near tie, and has its length where there is none."""
    sure = expected.num_sure
    assert list(actual[:sure]) == expected.token_ids[:sure], what
    if sure == len(expected.token_ids):
        assert len(actual) == sure, what


def assert_mostly_sure(expected: Iterable[Expected]) -> None:
    """The comparison means something: nearly all positions of the reference are no near ties."""
    all_margins = [margin for one in expected for margin in one.margins]
    sure = sum(1 for margin in all_margins if margin >= MARGIN)
    assert sure >= SURE_SHARE * len(all_margins), f"{sure} of {len(all_margins)} positions lead by {MARGIN}"
