"""Memory of the host that captured steps read and write themselves.

A copy in and a copy out between two graphs cost some 17 us a step, most of it spent on switching between the graph and
the copies. A decode step's graph therefore fetches its packed step with its first kernel and leaves its tokens with its
last. Which line of the ring is whose, both sides count for themselves: the device counts the graphs it has run, the
host those it has launched. A step that was posted and then not launched counts on neither side.
"""

import numpy as np
import torch

RING = 3
"""Steps in flight (two), and one being filled."""


class Mailbox:
    """One rank's. A line may be posted to when the step that had it last, RING before, has ended."""

    def __init__(self, capacity: int, max_rows: int, device: torch.device) -> None:
        """`capacity`: int32 words of the largest packed step. `max_rows`: most tokens of a result."""
        pinned = device.type == "cuda"
        self.steps = torch.zeros(RING, capacity, dtype=torch.int32, device="cpu", pin_memory=pinned)
        """int32 [RING, capacity] on the host. Zeros are a step without rows: what warms a graph up."""
        self.tokens = torch.zeros(RING, max_rows, dtype=torch.int32, device="cpu", pin_memory=pinned)
        """int32 [RING, max_rows] on the host."""
        self.ring_index = torch.zeros(1, dtype=torch.int32, device=device)
        """int32 [1] on the device: the line of the next step."""
        self._views = [line.numpy() for line in self.steps]
        self._launched = 0

    def begin(self) -> None:
        """Restarts the count of lines at zero on both sides; whatever ran before had no rows."""
        self.ring_index.zero_()
        self._launched = 0

    def post(self, packed: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts a packed step where its graph will fetch it; returns that line, int32 [capacity], and where the graph
        leaves its tokens, int32 [max_rows]. `count_launch` is to follow."""
        line = self._launched % RING
        self._views[line][: packed.shape[0]] = packed
        return self.steps[line], self.tokens[line]

    def count_launch(self) -> None:
        """The graph of the step that was posted is launched."""
        self._launched += 1
