"""Between host and device: a step in, its tokens out, and the stream that orders everything."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.errors import StepTimeout
from nanovllm.kernels.base.device import ordinary_launch
from nanovllm.runner.mailbox import RING, Mailbox
from nanovllm.wire.sampling import StepScores
from nanovllm.wire.step import StepTokens

_BUSY_WAIT = 0.002  # seconds to look for a result without pause; a longer step can afford the wake-up
_LONGEST_PAUSE = 1.0  # seconds that count between two looks: in a longer pause (Ctrl-Z) this process stood still itself


class _Result(NamedTuple):
    """Result of a running step: host memory that is complete when the event has come."""

    tokens: torch.Tensor
    event: torch.cuda.Event | None
    padding: slice
    """Rows of the tokens that are padding."""
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
        """Through which captured decode steps go; None: they are copied like all others."""
        # Of bounded length: a worker's tokens are never collected.
        self._launched: deque[_Result] = deque(maxlen=RING)

    def stream_context(self) -> AbstractContextManager[object]:
        """Everything on the device happens in this one stream, in the order of launches."""
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
        """`capacity`: int32 words of the largest packed step. `max_rows`: most tokens of a result. `mailbox`: whether
        captured decode steps fetch theirs themselves."""
        self.mailbox = Mailbox(capacity, max_rows, self.device) if mailbox else None
        if not self.is_cuda:
            return
        self._index = 0
        self._staging = [torch.empty(capacity, dtype=torch.int32, device="cpu", pin_memory=True) for _ in range(RING)]
        self._staging_views = [staging.numpy() for staging in self._staging]
        self._results = [torch.empty(max_rows, dtype=torch.int32, device="cpu", pin_memory=True) for _ in range(RING)]
        self._events = [torch.cuda.Event() for _ in range(RING)]
        self.step_buffer = torch.zeros(capacity, dtype=torch.int32, device=self.device)
        """Buffer in which a CUDA graph finds its step, unless the step comes through the mailbox."""

    def _next_index(self) -> None:
        self._index = (self._index + 1) % RING
        self._events[self._index].synchronize()  # three steps ago: long done, unless a worker is very late

    def upload(self, packed: np.ndarray) -> torch.Tensor:
        """The packed step on the device. Its copy is ordered before whatever is launched next."""
        if not self.is_cuda:
            return torch.from_numpy(packed.copy())
        self._next_index()
        size = packed.shape[0]
        self._staging_views[self._index][:size] = packed
        self.step_buffer[:size].copy_(self._staging[self._index][:size], non_blocking=True)
        return self.step_buffer

    def post(self, packed: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Posts the captured step that is launched next, in place of `upload`; see Mailbox.post."""
        assert self.mailbox is not None
        if self.is_cuda:
            self._next_index()
        return self.mailbox.post(packed)

    def download(
        self, tokens: torch.Tensor, num_decode_rows: int, first_chunk_row: int, scores: StepScores | None = None
    ) -> None:
        """Starts the copy of a step's tokens (int32 [rows]) to the host; `collect` hands them out in this order,
        without the padding rows between its `num_decode_rows` decodes and its `first_chunk_row`. `scores`: on their way
        to the host too."""
        if self.is_cuda:
            result = self._results[self._index][: tokens.shape[0]]
            result.copy_(tokens, non_blocking=True)
        else:
            result = tokens.clone()
        self.expect(result, num_decode_rows, first_chunk_row, scores)

    def expect(
        self, result: torch.Tensor, num_decode_rows: int, first_chunk_row: int, scores: StepScores | None = None
    ) -> None:
        """Registers a result that the device itself brings to `result`, on the host, by the end of the step."""
        event = None
        if self.is_cuda:
            event = self._events[self._index]
            event.record()
        self._launched.append(_Result(result, event, slice(num_decode_rows, first_chunk_row), scores))

    def forget_results(self) -> None:
        """Drops the results of steps whose tokens are not collected."""
        self._launched.clear()

    def has_result(self) -> bool:
        """Whether the oldest step not yet collected has ended."""
        event = self._launched[0].event
        return event is None or event.query()

    def collect(self, timeout: float, check: Callable[[], bool]) -> tuple[StepTokens, StepScores | None]:
        """Tokens of the oldest step not yet collected, and what it brings beside them, if anything. `check` is called
        while waiting: it may raise, or return True where the wait has a reason that does not count. Raises StepTimeout
        after `timeout` seconds that do.
        """
        tokens, event, padding, scores = self._launched.popleft()
        if event is not None:
            self._wait(event, timeout, check)
        token_ids = tokens.tolist()
        del token_ids[padding]
        return StepTokens(token_ids), None if scores is None else scores.copy()  # other steps will have that memory

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
