"""CUDA graphs of whole steps, from the packed input to the sampled tokens, by padded shape."""

import bisect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.config import EngineConfig
from nanovllm.kernels import Kernels
from nanovllm.kernels.plan.config import STREAM_ROWS
from nanovllm.layers.memory import Mixer
from nanovllm.wire.shapes import LARGE_CHUNKS, MAX_PREFILL_ROWS, StepShape, decode_buckets, mixed_shapes

_GRAPH, _FIRST_GRAPH = 8 << 20, 64 << 20
"""Bytes that a graph usually takes outside of torch's allocator, and the first with the kernels that it loads."""

Run = Callable[[StepShape], None]

_HIDES_LAUNCHES = 5.5e12
"""Weights x tokens whose products take an H200 some 20 ms."""


def why_no_graphs(
    device: torch.device, enforce_eager: bool, kernels: Kernels, backend: AttentionBackend, mixers: Iterable[Mixer]
) -> str | None:
    """Reason why steps are not captured in CUDA graphs; None where they are."""
    if device.type != "cuda":
        return f"device {device.type!r}"
    if enforce_eager:
        return "enforce_eager=True"
    if not kernels.fused:
        return "plain kernels read a step's header on the host"
    if not backend.can_capture:
        return f"attention backend {backend.name!r} cannot be captured"
    for mixer in mixers:
        if not mixer.can_capture:
            return f"mixer {type(mixer).__name__} cannot be captured"
    return None


def largest_chunk(max_num_batched_tokens: int, backend: AttentionBackend, num_weights: int) -> int:
    """Maximum prompt tokens of a step that is worth capturing. num_weights: that this rank multiplies a token by. A
    backend may be faster where it is launched kernel by kernel; that takes the host some 10 ms, which a device hides
    behind the multiplications of the largest chunk where it has enough of them."""
    is_busy = num_weights * LARGE_CHUNKS[-1] >= _HIDES_LAUNCHES
    if backend.prefers_eager_prompts and is_busy:
        return min(max_num_batched_tokens, LARGE_CHUNKS[-1] - 1)
    return max_num_batched_tokens


class LogitsView:
    """The logits that a captured graph writes, without owning their memory, which is the graphs' pool's."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._pointer, self._dtype = logits.data_ptr(), logits.dtype
        self._shape, self._stride, self._item = tuple(logits.shape), logits.stride(), logits.element_size()
        self._device = logits.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = tuple(step * self._item for step in self._stride)
        return {"shape": self._shape, "strides": strides, "typestr": f"<i{self._item}", "data": (self._pointer, False),
                "version": 3}  # fmt: skip

    def tensor(self) -> torch.Tensor:
        """Returns the logits, which are valid until another graph is replayed."""
        return torch.as_tensor(self, device=self._device).view(self._dtype)


def captured_shapes(max_num_seqs: int, max_tokens: int, adapters: bool = False) -> list[StepShape]:
    """Shapes that are captured, of chunks of up to `max_tokens`; largest first, so that smaller ones find their memory
    in the pool. adapters: rows may have adapters."""
    shapes = [*mixed_shapes(max_num_seqs, max_tokens), *(StepShape(d, 0) for d in decode_buckets(max_num_seqs))]
    shapes += [shape._replace(has_adapters=True) for shape in shapes] if adapters else []
    return sorted(shapes, key=lambda shape: -sum(shape))


def most_step_tokens(config: EngineConfig) -> int:
    """Maximum tokens of a step with its padding: a graph may have room for more than max_num_batched_tokens."""
    [largest, *_] = captured_shapes(config.most_places, config.max_num_batched_tokens)
    return max(config.max_num_batched_tokens, sum(largest))


class StepGraphs:
    """Graphs by shape, sharing one memory pool."""

    def __init__(
        self, run: Run, max_num_seqs: int, max_tokens: int, stream: torch.cuda.Stream,
        progress: Callable[[], None] = lambda: None,
        before_capture: Callable[[StepShape], AbstractContextManager[None]] = lambda _: nullcontext(),
        see: Run | None = None, draft: Run | None = None, max_drafting: int = 0, adapters: bool = False,
    ) -> None:  # fmt: skip
        """`run(shape)`: the work of a step of that padded shape, on static buffers, in `stream`. `max_tokens`: the
        largest chunk worth capturing. `progress`: called after each graph. `before_capture`: `run` is called within
        it first, where it launches every kernel that the graph will. `see` and `draft`: what a model that drafts does
        after a step of that shape, and then for up to `max_drafting` decode rows; graphs of their own, for what draws
        by options comes before. `adapters`: rows may have adapters."""
        self._progress = progress
        self._run = run
        self._before_capture = before_capture
        self._stream = stream
        self._decode_buckets = decode_buckets(max_num_seqs)
        self._mixed = mixed_shapes(max_num_seqs, max_tokens)
        self.shapes = captured_shapes(max_num_seqs, max_tokens, adapters)
        """Captured, largest first."""
        self._works = [run] if see is None else [run, see]
        """Works of a step of some shape, each in a graph of its own."""
        self._drafts = [] if draft is None else [(draft, StepShape(rows, 0)) for rows in decode_buckets(max_drafting)]
        self._graphs: dict[tuple[Run, StepShape], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def usual_bytes(self) -> int:
        """Bytes that all graphs usually take outside of torch's allocator."""
        return _FIRST_GRAPH + (len(self.shapes) * len(self._works) + len(self._drafts)) * _GRAPH

    def capture_all(self) -> None:
        for shape in self.shapes:
            self._capture(shape)
        for draft, shape in reversed(self._drafts):
            self._capture_one(draft, shape)

    def run_all(self) -> None:
        """Runs all that is captured once: first as many rows as stream, whose kernels compile longest, then fewer."""
        for shape in sorted(self.shapes, key=lambda shape: abs(sum(shape) - STREAM_ROWS)):
            for run in self._works:
                run(shape)
        for draft, shape in self._drafts:
            draft(shape)

    def measure(self, growth: Callable[[Callable[[], object], int], int]) -> int:
        """Estimates the bytes that all graphs will take, by capturing the three largest and throwing them away. The
        smaller of the last two stands for each further graph: the other may hold a library's kernels, loaded but once.

        `growth(work, usual)`: bytes that `work` takes, of which libraries usually take `usual`."""
        usual = (_FIRST_GRAPH, _GRAPH, _GRAPH)
        first, *more = [
            growth(partial(self._capture, shape), size) for shape, size in zip(self.shapes, usual, strict=False)
        ]
        self.clear()
        self._pool = torch.cuda.graph_pool_handle()
        return first + sum(more) + max(0, min(more, default=0)) * (len(self.shapes) - 1 - len(more))

    def _capture(self, shape: StepShape) -> None:
        for run in self._works:
            self._capture_one(run, shape)

    def _capture_one(self, run: Run, shape: StepShape) -> None:
        with self._before_capture(shape):
            run(shape)  # compiles, and lets libraries load kernels and allocate what they keep
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (NCCL's watchdog, another engine) may use CUDA meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run(shape)
        # Once on what `run` has read: a new graph's first replay may be wrong (docs/notebook.md), and it is slower.
        graph.replay()
        self._stream.synchronize()  # it may be thrown away at once
        self._graphs[run, shape] = graph
        self._progress()

    def shape_for(
        self, decode_rows: int, prefill_rows: int, chunk_tokens: int, has_adapters: bool = False
    ) -> StepShape | None:
        """The smallest captured shape that holds such a step; None: run it eagerly."""
        if prefill_rows == 0:
            buckets = self._decode_buckets
            return StepShape(buckets[bisect.bisect_left(buckets, decode_rows)], 0, has_adapters)
        if prefill_rows > MAX_PREFILL_ROWS:
            return None
        holding = (s for s in self._mixed if s.decode_rows >= decode_rows and s.chunk_tokens >= chunk_tokens)
        found = next(holding, None)
        return None if found is None else found._replace(has_adapters=has_adapters)

    def replay(self, shape: StepShape) -> None:
        self._replay(self._run, shape)

    def replay_see(self, shape: StepShape) -> None:
        """Replays `see` after the step of this shape that was replayed."""
        self._replay(self._works[1], shape)

    def replay_draft(self, num_rows: int) -> None:
        """Replays `draft` after that, for so many rows."""
        at = bisect.bisect_left(self._drafts, num_rows, key=lambda one: one[1].decode_rows)
        self._replay(*self._drafts[at])

    def _replay(self, run: Run, shape: StepShape) -> None:
        self._graphs[run, shape].replay()

    def clear(self) -> None:
        """Frees the graphs; they must go before the communicators that they captured."""
        self._graphs.clear()
