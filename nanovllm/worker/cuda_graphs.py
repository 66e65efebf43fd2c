"""CUDA graphs of decode steps: one per batch bucket, each a whole step from packed input to sampled tokens."""

import bisect
from collections.abc import Callable

import torch


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending; the last is max_num_seqs, so every batch finds a graph.

    Fine where a step is short and a padding row would show, coarse where weights or KV dominate it.
    """
    sizes = [1, 2, 4, 8, 12, 16, *range(24, 65, 8), *range(80, 257, 16), *range(288, 513, 32)]
    sizes += range(576, max_num_seqs, 64)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Graphs by bucket, sharing one memory pool."""

    def __init__(self, run: Callable[[int], None], max_num_seqs: int, stream: torch.cuda.Stream) -> None:
        """`run(bucket)`: the work of a decode step padded to `bucket` rows, on static buffers, in `stream`."""
        self._run = run
        self._stream = stream
        self._buckets = decode_buckets(max_num_seqs)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._graphs)

    def capture_all(self) -> None:
        """Largest first: smaller ones then find their memory in the pool."""
        for bucket in reversed(self._buckets):
            self._capture(bucket)

    def measure(self, used_bytes: Callable[[], int]) -> int:
        """Bytes that all graphs will take, from capturing the two largest and throwing them away."""
        sizes = list(reversed(self._buckets))[:2]
        before = used_bytes()
        readings = []
        for bucket in sizes:
            self._capture(bucket)
            readings.append(used_bytes())
        first = readings[0] - before
        more = max(0, readings[-1] - readings[0])
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()
        return first + more * (len(self._buckets) - 1)

    def _capture(self, bucket: int) -> None:
        self._run(bucket)  # compiles and lets libraries allocate what they keep
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (NCCL's watchdog, another engine) may use CUDA meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            self._run(bucket)
        self._graphs[bucket] = graph

    def replay(self, num_rows: int) -> None:
        """Runs the smallest graph that holds `num_rows` rows."""
        bucket = self._buckets[bisect.bisect_left(self._buckets, num_rows)]
        self._graphs[bucket].replay()

    def clear(self) -> None:
        """Frees the graphs; they must go before the communicators that they captured."""
        self._graphs.clear()
