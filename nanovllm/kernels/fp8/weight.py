"""What FP8 kernels multiply by."""

from typing import NamedTuple

from torch import Tensor


class FP8Weight(NamedTuple):
    """A weight that x is multiplied by."""

    values: Tensor
    """e4m3 [N, K], or [experts, N, K]."""
    scale: Tensor
    """float32 [N / rows_each, groups of K], or [N, 1]; of experts [experts, ...]."""
    rows_each: int = 1
    input_scale: Tensor | None = None
    """float32 [count]: the largest is the scale of all activations; None: these are measured."""

    @property
    def in_blocks(self) -> bool:
        """Scales change along K."""
        return self.scale.shape[-1] > 1 or self.rows_each > 1
