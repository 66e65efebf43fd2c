"""Ranks on a CPU exchange numbers through memory that they share; here they are threads."""

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from threads import run_in_threads

from nanovllm.parallel import host_memory
from nanovllm.parallel.group import TensorParallelGroup

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def run_ranks(size: int, work: Callable[[TensorParallelGroup], Any]) -> list[Any]:
    """Results of `work` on each rank, or the error that it raises."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        return work(TensorParallelGroup(rank, size, torch.device("cpu"), store))

    return run_in_threads(*(partial(run, rank) for rank in range(size)))


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_what_all_put_in(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in the order of ranks, to the last bit; largest values; everything. Also of tensors that need several slots,
    one call after the other, by ranks that come late at random."""
    monkeypatch.setattr(host_memory, "SLOT", 64)
    draw, generator = random.Random(size), torch.Generator().manual_seed(size)
    shapes = [(draw.randrange(5), draw.randrange(1, 40)) for _ in range(60)]
    values = [1000 * torch.randn(size, *shape, generator=generator) for shape in shapes]
    calls = [[value.to(dtype) for dtype in DTYPES] for value in values]

    def work(group: TensorParallelGroup) -> list[torch.Tensor]:
        late, found = random.Random(group.rank), []
        for call in calls:
            if late.random() < 0.1:
                time.sleep(0.002)
            found += [group.all_reduce(mine[group.rank].clone()) for mine in call]
            found += [group.all_gather(mine[group.rank]) for mine in call]
            found.append(group.all_reduce_max(call[2][group.rank].clone()))
        return found

    expected = []
    for call in calls:
        for every in call:
            total = every[0] + every[1]
            for one in every[2:]:
                total = total + one
            expected.append(total)
        expected += [*call, call[2].amax(0) if call[2].numel() else call[2][0]]
    for found in run_ranks(size, work):
        assert not isinstance(found, BaseException), found
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


class _OnGpu(torch.Tensor):
    """Stand-in for a tensor on a GPU: host memory cannot look into it."""

    is_cuda = True

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()

    def view(self, *_: Any) -> torch.Tensor:
        raise AssertionError("read on the host")


def test_ranks_that_share_a_gpu_exchange_copies() -> None:
    """Each operation gives every rank the values, in the rank's own tensor where that is reduced in place."""
    values = torch.tensor([[5, -2, 1 << 40], [3, 9, 7]])

    def work(group: TensorParallelGroup) -> list[torch.Tensor]:
        total, most, mine = (values[group.rank].clone().as_subclass(_OnGpu) for _ in range(3))
        assert group.all_reduce(total) is total and group.all_reduce_max(most) is most
        return [one.as_subclass(torch.Tensor) for one in (total, most, group.all_gather(mine))]

    for found in run_ranks(2, work):
        assert not isinstance(found, BaseException), found
        assert all(torch.equal(a, b) for a, b in zip(found, (values.sum(0), values.amax(0), values), strict=True))


def test_a_wait_for_a_rank_that_is_gone_ends() -> None:
    def work(group: TensorParallelGroup) -> None:
        if group.rank == 0:
            threading.Timer(0.2, group.abort).start()
            group.all_reduce(torch.ones(5))

    begin = time.monotonic()
    error, nothing = run_ranks(2, work)
    assert "another rank has died" in str(error) and nothing is None
    assert time.monotonic() - begin < 60
