"""Memory mapped between ranks: that they agree about it, what lies where, and which sum takes which way."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from threads import run_in_threads

from nanovllm.parallel.peer.memory import Layout, PeerMemory, PeerMemoryUnavailable, agree, fill_with_sentinels


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


@pytest.mark.parametrize("max_rows", [1, 64, 10**6])
@pytest.mark.parametrize("hidden", [1024, 2560, 4100, 5120])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_few_rows_go_in_one_shot_more_in_two_and_the_rest_elsewhere(
    world_size: int, hidden: int, max_rows: int
) -> None:
    """As far as the block holds them. Few rows may be cut, where their parts are whole 16-byte accesses."""
    pytest.importorskip("triton")
    from nanovllm.parallel.peer.all_reduce import PeerAllReduce

    layout = Layout.for_limits(world_size, hidden, torch.bfloat16, max_rows, 16)
    fill_with_sentinels(torch.empty(layout.nbytes, dtype=torch.uint8), layout)
    peer = PeerAllReduce(SimpleNamespace(layout=layout))  # type: ignore[arg-type]
    path = {rows: peer.path(rows) for rows in (*range(1, 2100), *range(2100, 60_000, 500))}
    assert list(path.values()) == sorted(path.values(), key=["one_shot", "two_shot", "nccl"].index)
    assert all(rows <= layout.one_shot_rows for rows in path if path[rows] == "one_shot")
    assert all(rows <= layout.two_shot_rows for rows in path if path[rows] == "two_shot")
    assert path[min(max_rows, 8)] == "one_shot" and path[max(path)] == "nccl"
    assert max_rows < 10**6 or "two_shot" in path.values()
    splits = [peer.split(rows) for rows in range(1, 1000)]
    assert splits == sorted(splits, reverse=True) and splits[-1] == 1
    assert splits[0] == 1 or 2 * hidden % (16 * splits[0]) == 0
    assert PeerAllReduce(peer.memory, one_order=True).split(1) == 1
