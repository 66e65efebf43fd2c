"""Sums moved by copies: the protocol between concurrent ranks (Triton's interpreter over shared host memory, copies by
memmove), its kernels against their twins, and waits that end."""

import ctypes
import random
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_all_reduce_kernel import make_blocks, run_ranks, shared_memory_rank

from nanovllm.kernels.pointwise.norm import Norm
from nanovllm.parallel.peer.memory import Layout

HIDDEN, CAPACITY, CALLS, EPS = 24, 11, 24, 1e-6


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_concurrent_ranks(world_size: int, tmp_path: Path) -> None:
    make_blocks(tmp_path, layout_of(world_size))
    run_ranks("concurrent", world_size, tmp_path, script=__file__)
    results = [torch.load(tmp_path / f"result{rank}.pt") for rank in range(world_size)]
    for mine in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(mine, results[0], strict=True))


def test_kernels_alone(tmp_path: Path) -> None:
    """Against the twin, with the rows of simulated peers; and waits that end by abort and by their bound."""
    make_blocks(tmp_path, layout_of(3))
    run_ranks("alone", 1, tmp_path, script=__file__)


def test_owners_share_out_every_row() -> None:
    pytest.importorskip("triton")
    from nanovllm.parallel.peer.copy_engine import owned_rows

    for world_size in (2, 3, 4, 8):
        for rows in range(1, 40):
            blocks = owned_rows(rows, world_size)
            assert [row for own in blocks for row in range(rows)[own]] == list(range(rows))
            assert max(own.stop - own.start for own in blocks) == -(-rows // world_size)


# ---- what the processes do (this file run as a script) ----


def layout_of(world_size: int) -> Layout:
    return Layout(world_size, HIDDEN, torch.float32, 2, 2, 8, half_rows=CAPACITY)


def copying_rank(rank: int, world_size: int, folder: Path, delays: random.Random) -> Any:
    """A rank whose copies take their time."""
    memory = shared_memory_rank(rank, folder, layout_of(world_size))
    memory.sent = 0

    def send(peer: int, source: torch.Tensor, place: torch.Tensor) -> None:
        memory.sent += source.nbytes
        offset = place.data_ptr() - memory.block.data_ptr()
        assert peer != rank and source.is_contiguous() and 0 <= offset <= memory.layout.nbytes - source.nbytes
        time.sleep(delays.random() * 0.01)
        ctypes.memmove(memory.blocks[peer].data_ptr() + offset, source.data_ptr(), source.nbytes)

    memory.send = send
    return memory


def concurrent_rank(rank: int, world_size: int, folder: Path) -> None:
    """Calls of both halves as a step makes them, the second started while the first is under way; any rows. Nothing is
    shared between ranks but the blocks, so a reused place that is overwritten early shows as a wrong sum."""
    from sums import sum_reference

    from nanovllm.parallel.peer.copy_engine import CopyEngineSums, owned_rows

    delays = random.Random(rank)
    sums = CopyEngineSums(copying_rank(rank, world_size, folder, delays))
    sums.programs = 2  # several rows a program
    same, outputs = random.Random(world_size), []
    generator = torch.Generator().manual_seed(7)
    rows, residuals, expected_residuals = [0, 0], [None, None], [None, None]
    for call in range(CALLS):
        wanted, waits = [], []
        for half in range(2):
            if call % 6 == 0:  # a step of other halves begins
                rows[half], residuals[half], expected_residuals[half] = same.randint(1, CAPACITY), None, None
            partials = torch.randn(world_size, rows[half], HIDDEN, generator=generator)
            norm = Norm(torch.randn(HIDDEN, generator=generator), EPS)
            mine = partials[rank].clone()
            time.sleep(delays.random() * 0.02)
            waits.append(sums.start(half, mine, residuals[half], norm))
            mine.fill_(float("nan"))  # on the device it is free only after the wait: here all copies are done
            normed, expected_residuals[half] = sum_reference(partials, expected_residuals[half], norm)
            wanted.append(normed)
        for half in range(2):
            time.sleep(delays.random() * 0.02)
            before = residuals[half]
            got, residuals[half] = waits[half]()
            assert before is None or residuals[half] is before
            torch.testing.assert_close(got, wanted[half], rtol=1e-5, atol=1e-6)
            own = owned_rows(rows[half], world_size)[rank]
            assert torch.equal(residuals[half], expected_residuals[half][own])  # the order of ranks
            outputs.append(got.clone())
    assert int(sums.memory.abort_word) == 0
    torch.save(outputs, folder / f"result{rank}.pt")


def alone_rank(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 of 3, whose peers are this test."""
    from sums import sum_reference

    from nanovllm.parallel.peer.copy_engine import CopyEngineSums

    memory = copying_rank(1, 3, folder, random.Random(0))
    sums = CopyEngineSums(memory)
    inbox, flags = (memory.layout.regions[name].of(memory.block) for name in ("inbox", "flags"))
    for half in range(2):
        for epoch, with_residual in ((1, False), (2, True)):
            partials, before = torch.randn(3, 8, HIDDEN), torch.randn(3, HIDDEN)
            norm = Norm(torch.randn(HIDDEN), EPS)
            for peer in (0, 2):
                inbox[half, peer, :3] = partials[peer, 3:6]
                flags[half, :, peer] = epoch
            residual = before if with_residual else None
            normed, expected = sum_reference(partials[:, 3:6], residual, norm)
            mine = partials[1].clone()
            used, wait = weakref.ref(mine), sums.start(half, mine, residual, norm)
            del mine  # else the allocator gave it to the main stream, which knows nothing of the side stream's progress
            assert used() is not None
            got, kept = wait()
            del wait
            assert used() is None
            torch.testing.assert_close(got[3:6], normed, rtol=1e-5, atol=1e-6)
            assert torch.equal(kept, expected) and int(memory.abort_word) == 0
    assert memory.sent == 4 * ((3 + 2 + 3 + 3) * HIDDEN * 4 + 4 * 4)  # rows to 0 and 2, finished ones to both; flags
    flags[0, :, 0] = 3  # rank 2 is dead
    partial, norm = torch.randn(8, HIDDEN), Norm(torch.randn(HIDDEN), EPS)
    threading.Timer(0.5, lambda: memory.abort_word.fill_(1)).start()
    begin = time.monotonic()
    sums.start(0, partial, None, norm)()
    assert 0.3 < time.monotonic() - begin < 60
    memory.abort_word.zero_()
    sums.max_spins, sums.enabled, memory.sent = 5, False, 0
    wait = sums.start(1, partial, None, norm)
    assert int(memory.abort_word) == 2 and memory.sent == 0
    memory.abort_word.zero_()
    wait()
    assert int(memory.abort_word) == 2
    check_streams(sums, partial, norm)


def check_streams(sums: Any, partial: torch.Tensor, norm: Norm) -> None:
    """The side stream begins behind what the main stream has launched, and that goes on behind what was sent. (Waits
    end at once here, after an abort.)"""
    order: list[str] = []
    main = SimpleNamespace(wait_event=lambda event: order.append(f"main awaits {event}"))
    side = SimpleNamespace(wait_stream=lambda other: order.append("side awaits main" if other is main else "?"))
    side.record_event = lambda: order.append("done") or "it"
    torch.cuda.current_stream = lambda: main
    torch.cuda.stream = lambda stream: nullcontext(order.append("to side" if stream is side else "?"))
    sums._stream, sums.enabled, sums.memory.send = side, True, lambda *_: order.append("sent")
    wait = sums.start(0, partial, None, norm)
    assert order == ["side awaits main", "to side", *["sent"] * 8, "done"]
    wait()
    assert order[-1] == "main awaits it"


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = {"concurrent": concurrent_rank, "alone": alone_rank}
    ranks[sys.argv[1]](int(sys.argv[4]), int(sys.argv[2]), Path(sys.argv[3]))
