"""Memory mapped between ranks: that they agree about it, what lies where, and which sum takes which way."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from threads import run_in_threads

from nanovllm.parallel.peer.limits import one_shot_rows
from nanovllm.parallel.peer.memory import (
    Layout,
    PeerMemory,
    PeerMemoryUnavailable,
    agree,
)


def test_all_ranks_give_up_together() -> None:
    store = dist.HashStore()

    def work(rank: int) -> None:
        layout = Layout.for_limits(2, 64, torch.bfloat16, 8, 16)
        PeerMemory(store, rank, torch.device("cpu"), layout, timeout=10)

    for failure in run_in_threads(*(partial(work, rank) for rank in range(2))):
        assert isinstance(failure, PeerMemoryUnavailable)
        assert "rank 0" in str(failure) and "rank 1" in str(failure) and "cpu" in str(failure)


def test_an_error_of_one_rank_reaches_all() -> None:
    store = dist.HashStore()

    def work(rank: int) -> None:
        assert agree(store, "first", rank, 3, lambda: bytes([rank])) == [b"\0", b"\1", b"\2"]
        agree(store, "second", rank, 3, lambda: {0: b"", 2: b""}[rank])

    for failure in run_in_threads(*(partial(work, rank) for rank in range(3))):
        assert isinstance(failure, PeerMemoryUnavailable) and "second: rank 1: KeyError: 1" in str(failure)


def test_a_silent_rank_is_noticed() -> None:
    with pytest.raises(PeerMemoryUnavailable, match="did not answer"):
        agree(dist.HashStore(), "first", 0, 2, lambda: b"", timeout=0.2)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_layout_regions_are_apart_aligned_and_large_enough(world_size: int) -> None:
    layout = Layout.for_limits(world_size, 5120, torch.bfloat16, 1024, 512, half_rows=1000)
    regions, block = layout.regions.values(), torch.empty(layout.nbytes, dtype=torch.uint8)
    assert all(region.offset % 512 == 0 and region.of(block).is_contiguous() for region in regions)
    assert all(one.offset + one.of(block).nbytes <= other.offset for one, other in pairwise(regions))
    assert layout.half_units * world_size >= layout.half_rows == 1000
    assert layout.units * world_size >= layout.two_shot_rows
    assert max(layout.one_shot_rows, layout.two_shot_rows) == 1024


def test_path_by_size() -> None:
    pytest.importorskip("triton")
    from nanovllm.parallel.peer.all_reduce import PeerAllReduce

    def paths(world_size: int, max_rows: int) -> dict[int, str]:
        layout = Layout.for_limits(world_size, 5120, torch.bfloat16, max_rows, 16)
        memory = SimpleNamespace(layout=layout)
        return {rows: PeerAllReduce(memory).path(rows) for rows in (1, 16, 17, 102, 8192, 8193)}  # type: ignore[arg-type]

    def cuts(world_size: int, hidden: int) -> list[int]:
        layout = Layout.for_limits(world_size, hidden, torch.bfloat16, 1024, 16)
        memory = SimpleNamespace(layout=layout)
        peer = PeerAllReduce(memory)  # type: ignore[arg-type]
        return [rows for rows in (1, 256, 257) if peer.split(rows) > 1]

    one, two = "one_shot", "two_shot"
    assert paths(4, 10**6) == {1: one, 16: one, 17: two, 102: two, 8192: two, 8193: "nccl"}
    assert paths(2, 10**6) == {1: one, 16: one, 17: one, 102: one, 8192: two, 8193: "nccl"}
    assert paths(4, 64)[102] == "nccl"
    assert cuts(4, 5120) == cuts(2, 4096) == [1, 256]
    assert cuts(4, 1024) == cuts(8, 5120) == cuts(4, 4100) == cuts(2, 2560) == []
    # Where nothing is cut, one-shot serves as far as it does beside whole rows.
    assert [one_shot_rows(2, row) * row for row in (2048, 4096, 8192)] == [2 << 20, 2 << 20, 1 << 20]
    assert one_shot_rows(4, 8200) == (640 << 10) // 8200
    assert [one_shot_rows(ranks, 10240) for ranks in (2, 3, 4, 8)] == [102, 16, 16, 14]
    assert [one_shot_rows(ranks, 10240, rounds=True) for ranks in (2, 4)] == [307, 16]
    assert [one_shot_rows(ranks, 2048) for ranks in (2, 3, 4, 8)] == [1024, 128, 128, 72]
