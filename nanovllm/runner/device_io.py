"""Transfer between host and device: a step in, its tokens out, and the stream that orders everything.

A copy in and a copy out between two graphs cost some 17 us a step, most of it spent on switching between the graph and
the copies. A decode step's graph therefore fetches its packed step from memory of the host with its first kernel and
leaves its tokens there with its last: the mailbox, a ring whose lines both sides count for themselves.
"""

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


class Mailbox(NamedTuple):
    """Memory of one rank's host that captured decode steps read and write themselves. A line may be posted to when the
    step that had it last, RING before, has ended."""

    steps: torch.Tensor
    """int32 [RING, capacity] on the host. Zeros are a step without rows: what warms a graph up."""
    tokens: torch.Tensor
    """int32 [RING, max_rows] on the host."""
    ring_index: torch.Tensor
    """int32 [1] on the device: the line of the next step."""


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

    def __init__(self, device: torch.device, pdl: bool = True) -> None:
        """`pdl`: whether kernels may start while the one before ends (kernels/base/device.py)."""
        self.device = device
        self._pdl = pdl
        self.is_cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.is_cuda else None
        self.mailbox: Mailbox | None = None
        """Pinned memory through which captured decode steps go; None: they are copied like all others."""
        # Of bounded length: a worker's tokens are never collected.
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

    @property
    def ring_index(self) -> int:
        """Index of the last step's staging buffer; a step's buffer is free when its tokens are here."""
        return self._index

    def allocate(self, capacity: int, max_rows: int, mailbox: bool = True) -> None:
        """`capacity`: int32 words of the largest packed step. `max_rows`: most rows of a result. `mailbox`: whether
        captured decode steps fetch theirs themselves."""

        def on_host(size: int) -> torch.Tensor:
            return torch.zeros(RING, size, dtype=torch.int32, device="cpu", pin_memory=self.is_cuda)

        if mailbox:
            line = torch.zeros(1, dtype=torch.int32, device=self.device)
            self.mailbox = Mailbox(on_host(capacity), on_host(max_rows), line)
            self._posts, self._answers = self.mailbox.steps.unbind(), self.mailbox.tokens.unbind()
            self._post_words = self.mailbox.steps.numpy()
            self.begin_mailbox()
        if not self.is_cuda:
            return
        self._index = 0
        staging, self._results = on_host(capacity), on_host(max_rows).unbind()
        self._staging, self._staging_words = staging.unbind(), staging.numpy()
        self._events = [torch.cuda.Event() for _ in range(RING)]
        self.step_buffer = torch.zeros(capacity, dtype=torch.int32, device=self.device)
        """Buffer in which a CUDA graph finds its step, unless the step comes through the mailbox."""

    def begin_mailbox(self) -> None:
        """Lets host and device count the mailbox's lines from zero. No step before this had rows."""
        if self.mailbox is not None:
            self.mailbox.ring_index.zero_()
            self._posted = -1

    def _next_index(self) -> None:
        self._index = (self._index + 1) % RING
        self._events[self._index].synchronize()  # three steps ago: long done, unless a worker is very late

    def upload(self, packed: np.ndarray) -> torch.Tensor:
        """Copies a packed step to the device, before whatever is launched next; returns it there."""
        if not self.is_cuda:
            return torch.from_numpy(packed.copy())
        self._next_index()
        size = packed.shape[0]
        self._staging_words[self._index, :size] = packed
        self.step_buffer[:size].copy_(self._staging[self._index][:size], non_blocking=True)
        return self.step_buffer

    def post(self, packed: np.ndarray) -> torch.Tensor:
        """Puts a packed step where its graph, which must be launched next, will fetch it: the counterpart of `upload`.
        Returns that line, int32 [capacity]."""
        assert self.mailbox is not None
        if self.is_cuda:
            self._next_index()
        self._posted = (self._posted + 1) % RING
        self._post_words[self._posted, : packed.shape[0]] = packed
        return self._posts[self._posted]

    def receive(
        self, tokens: torch.Tensor, padding: slice, scores: StepScores | None = None, posted: bool = False
    ) -> None:
        """Notes a launched step that leaves `tokens`, int32 [rows]. `collect` hands them out in the order of launches,
        without those of `padding`. `posted`: the step brings them to the host itself, through the mailbox; else they
        are copied. `scores`: results that are on their way to the host, too."""
        rows, event = tokens.shape[0], None
        if posted:
            result = self._answers[self._posted][:rows]
        elif self.is_cuda:
            result = self._results[self._index][:rows].copy_(tokens, non_blocking=True)
        else:
            result = tokens.clone()
        if self.is_cuda:
            event = self._events[self._index]
            event.record()
        self._launched.append(_Result(result, event, padding, scores))

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
