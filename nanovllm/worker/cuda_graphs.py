"""CUDA graphs of whole steps, from the packed input to the sampled tokens, by padded shape."""

import bisect
from collections.abc import Callable
from typing import NamedTuple

import torch


class StepShape(NamedTuple):
    """The padded shape of a step: rows that decode, and prompt-chunk tokens (of at most MAX_CHUNK_ROWS rows)."""

    decode_rows: int
    chunk_tokens: int


MAX_CHUNK_ROWS = 32
CHUNK_BUCKETS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
"""Padded prompt tokens of a captured step. Longer ones would need much memory for their activations a second time; they
keep the device busy while the host launches them kernel by kernel."""


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Padded row counts of steps that only decode, ascending; the last is max_num_seqs, so every batch finds a graph.

    Fine where a step is short and a padding row would show, coarse where weights or KV dominate it.
    """
    sizes = [1, 2, 4, 8, 12, 16, *range(24, 65, 8), *range(80, 257, 16), *range(288, 513, 32)]
    sizes += range(576, max_num_seqs, 64)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def mixed_decode_buckets(max_num_seqs: int) -> list[int]:
    """Padded decode rows of steps that also compute prompt chunks."""
    return [0] + [size for size in (64,) if size < max_num_seqs] + [max_num_seqs]


class StepGraphs:
    """Graphs by shape, sharing one memory pool."""

    def __init__(
        self, run: Callable[[StepShape], None], max_num_seqs: int, max_tokens: int, stream: torch.cuda.Stream
    ) -> None:
        """`run(shape)`: the work of a step of that padded shape, on static buffers, in `stream`. `max_tokens`: the
        largest chunk worth capturing."""
        self._run = run
        self._stream = stream
        self._decode_buckets = decode_buckets(max_num_seqs)
        self._mixed_buckets = mixed_decode_buckets(max_num_seqs)
        self._chunk_buckets = [size for size in CHUNK_BUCKETS if size <= max_tokens]
        mixed = [StepShape(d, t) for d in self._mixed_buckets for t in self._chunk_buckets]
        shapes = [*mixed, *(StepShape(d, 0) for d in self._decode_buckets)]
        # Largest first: smaller ones then find their memory in the pool.
        self._shapes = sorted(shapes, key=lambda shape: -sum(shape))
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def shapes(self) -> list[StepShape]:
        """All that are captured, largest first."""
        return self._shapes

    def capture_all(self) -> None:
        for shape in self._shapes:
            self._capture(shape)

    def measure(self, used_bytes: Callable[[], int]) -> int:
        """Bytes that all graphs will take, from capturing the two largest and throwing them away."""
        before = used_bytes()
        readings = []
        for shape in self._shapes[:2]:
            self._capture(shape)
            readings.append(used_bytes())
        more = max(0, readings[-1] - readings[0])
        self.clear()
        self._pool = torch.cuda.graph_pool_handle()
        return readings[0] - before + more * (len(self._shapes) - 1)

    def _capture(self, shape: StepShape) -> None:
        self._run(shape)  # compiles, and lets libraries allocate what they keep
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (NCCL's watchdog, another engine) may use CUDA meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            self._run(shape)
        self._graphs[shape] = graph

    def shape_for(self, decode_rows: int, chunk_rows: int, chunk_tokens: int) -> StepShape | None:
        """The smallest captured shape that holds such a step; None: run it eagerly."""
        if chunk_rows == 0:
            return StepShape(_at_least(self._decode_buckets, decode_rows), 0)
        if chunk_rows > MAX_CHUNK_ROWS or not self._chunk_buckets or chunk_tokens > self._chunk_buckets[-1]:
            return None
        return StepShape(_at_least(self._mixed_buckets, decode_rows), _at_least(self._chunk_buckets, chunk_tokens))

    def replay(self, shape: StepShape) -> None:
        self._graphs[shape].replay()

    def clear(self) -> None:
        """Frees the graphs; they must go before the communicators that they captured."""
        self._graphs.clear()


def _at_least(buckets: list[int], size: int) -> int:
    return buckets[bisect.bisect_left(buckets, size)]
