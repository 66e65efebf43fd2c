"""Transfer between host and device: a step in, its tokens out, and the stream that orders everything."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.errors import StepTimeout
from nanovllm.kernels.base.device import ordinary_launch
from nanovllm.wire.sampling import StepScores

_BUSY_WAIT = 0.002  # seconds to look for a result without pause; a longer step can afford the wake-up
_LONGEST_PAUSE = 1.0  # seconds that count between two looks: in a longer pause (Ctrl-Z) this process stood still itself


RING = 3
"""Steps in flight (two), and one being filled."""


class _Result(NamedTuple):
    """Result of a launched step, in host memory: complete once the event has come."""

    tokens: torch.Tensor
    """int32 [rows]"""
    event: torch.cuda.Event | None
    padding: slice
    """Entries of `tokens` that are padding."""
    scores: StepScores | None


class DeviceIO:
    """Staging buffers of one rank. On a CPU nothing is copied: the step is already where it is needed."""

    def __init__(self, device: torch.device, pdl: bool = True, keeps_tokens: bool = True) -> None:
        """`pdl`: whether kernels may start while the one before ends (kernels/base/device.py). `keeps_tokens`: whether
        anybody collects the tokens of this rank, which are the same on all."""
        self.device, self._pdl, self._keeps_tokens = device, pdl, keeps_tokens
        self.is_cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.is_cuda else None
        self._launched: deque[_Result] = deque(maxlen=RING)

    def stream_context(self) -> AbstractContextManager[object]:
        """Context of the one stream in which everything on the device happens, in the order of launches."""
        if not self.is_cuda:
            return nullcontext()
        return torch.cuda.stream(self.stream) if self._pdl else self._ordinary_launches()

    @contextmanager
    def _ordinary_launches(self) -> Iterator[None]:
        with ordinary_launch(), torch.cuda.stream(self.stream):
            yield

    def synchronize(self) -> None:
        """Waits for everything on the device, in whatever stream."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def allocate(self, capacity: int, max_rows: int) -> None:
        """`capacity`: int32 words of the largest packed step. `max_rows`: most rows of a result."""

        def on_host(size: int) -> torch.Tensor:
            return torch.zeros(RING, size, dtype=torch.int32, device="cpu", pin_memory=True)

        if not self.is_cuda:
            return
        self.ring_index = 0
        """Index of the last step's staging buffer; a step's buffer is free when its tokens are here."""
        staging, self._results = on_host(capacity), on_host(max_rows).unbind()
        self._staging, self._staging_words = staging.unbind(), staging.numpy()
        self._events = [torch.cuda.Event() for _ in range(RING)]
        self.step_buffer = torch.zeros(capacity, dtype=torch.int32, device=self.device)
        """Buffer in which a CUDA graph finds its step."""

    def upload(self, packed: np.ndarray) -> torch.Tensor:
        """Copies a packed step to the device, before whatever is launched next; returns it there."""
        if not self.is_cuda:
            return torch.from_numpy(packed.copy())
        self.ring_index = (self.ring_index + 1) % RING
        self._events[self.ring_index].synchronize()  # three steps ago: long done, unless a worker is very late
        size = packed.shape[0]
        self._staging_words[self.ring_index, :size] = packed
        self.step_buffer[:size].copy_(self._staging[self.ring_index][:size], non_blocking=True)
        return self.step_buffer

    def receive(self, tokens: torch.Tensor, padding: slice, scores: StepScores | None = None) -> None:
        """Copies what a launched step leaves, `tokens` int32 [rows], to the host, where anybody wants it. `collect`
        hands tokens out in the order of launches, without those of `padding`. `scores`: results that are on their way
        to the host, too."""
        event = None
        if self._keeps_tokens:
            kept = self._results[self.ring_index][: tokens.shape[0]] if self.is_cuda else torch.empty_like(tokens)
            kept.copy_(tokens, non_blocking=True)
        if self.is_cuda:
            event = self._events[self.ring_index]
            event.record()
        if self._keeps_tokens:
            self._launched.append(_Result(kept, event, padding, scores))

    def forget_results(self) -> None:
        """Drops the results of steps whose tokens are not collected."""
        self._launched.clear()

    def has_result(self) -> bool:
        """Whether the oldest step not yet collected has ended."""
        event = self._launched[0].event
        return event is None or event.query()

    def collect(self, timeout: float, check: Callable[[], bool]) -> tuple[list[int], StepScores | None]:
        """Waits for the oldest step not yet collected; returns its tokens, and what it brings beside them, if anything.
        `check` is called while waiting: it may raise, or return True to have the time so far not counted. Raises
        StepTimeout after `timeout` seconds that count.
        """
        tokens, event, padding, scores = self._launched.popleft()
        if event is not None:
            self._wait(event, timeout, check)
        ids: list[int] = tokens.tolist()
        del ids[padding]
        # Copies: other steps will have that memory.
        return ids, None if scores is None else scores.copy()

    @staticmethod
    def _wait(event: torch.cuda.Event, timeout: float, check: Callable[[], bool]) -> None:
        waited, last_look = 0.0, time.perf_counter()
        while not event.query():
            now = time.perf_counter()
            waited, last_look = waited + min(now - last_look, _LONGEST_PAUSE), now
            if waited > _BUSY_WAIT:
                if check():
                    waited = 0.0
                time.sleep(20e-6)
            if waited > timeout and not event.query():
                raise StepTimeout(f"the device did not finish a step within step_timeout={timeout} s")
