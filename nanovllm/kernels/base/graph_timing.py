"""Device time of launches, as they run in a CUDA graph."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 4) -> float:
    """Device microseconds of one call: the best replay of a CUDA graph of all the calls, over their number."""
    graph = captured(calls)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(marks)]
    return min(times) * 1000 / len(calls)


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of all the calls, one after the other."""
    current = torch.cuda.current_stream()
    # The default stream cannot be captured, and a workspace belongs to the stream that it was made in.
    stream = torch.cuda.Stream() if current == torch.cuda.default_stream() else current
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        calls[0]()  # compiles and makes workspaces
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for call in calls:
                call()
    return graph
