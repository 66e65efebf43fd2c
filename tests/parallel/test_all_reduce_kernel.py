"""All-reduce through peer memory: the protocol between concurrent ranks (Triton's interpreter over shared host memory),
and its bounded waits. On GPUs: the benchmark's check."""

import itertools
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import run_interpreted
from sums import sum_reference

from nanovllm.kernels.pointwise.norm import Norm, add_norms, add_up
from nanovllm.parallel.peer.memory import Layout, fill_with_sentinels

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, CAPACITY, PROGRAMS, CALLS, EPS = 24, 7, 3, 21, 1e-6


def run_ranks(mode: str, world_size: int, folder: Path, script: str = __file__) -> None:
    """Has all ranks of a script of this room do something, at once."""
    pytest.importorskip("triton")
    run_interpreted(script, *((mode, str(world_size), str(folder), str(rank)) for rank in range(world_size)))


def make_blocks(folder: Path, layout: Layout) -> None:
    for rank in range(layout.world_size):
        block = torch.empty(layout.nbytes, dtype=torch.uint8)
        fill_with_sentinels(block, layout)
        (folder / f"block{rank}").write_bytes(block.numpy().tobytes())


@pytest.mark.parametrize(
    ("mode", "world_size"),
    [
        ("interpret", 2),
        pytest.param("programs", 2, marks=pytest.mark.slow),
        pytest.param("interpret", 3, marks=pytest.mark.slow),
        pytest.param("interpret", 4, marks=pytest.mark.slow),
    ],
)
def test_concurrent_ranks_agree_with_float64_and_bit_for_bit(mode: str, world_size: int, tmp_path: Path) -> None:
    layout = layout_of(world_size)
    make_blocks(tmp_path, layout)
    run_ranks(mode, world_size, tmp_path)
    results = [torch.load(tmp_path / f"result{rank}.pt") for rank in range(world_size)]
    for rank in range(1, world_size):
        for mine, first in zip(results[rank], results[0], strict=True):
            assert torch.equal(mine.view(torch.int32), first.view(torch.int32))
    clean = torch.empty(layout.nbytes, dtype=torch.uint8)
    fill_with_sentinels(clean, layout)
    for rank in range(world_size):
        assert (tmp_path / f"block{rank}").read_bytes() == clean.numpy().tobytes(), "a place was left dirty"


@pytest.mark.slow
def test_addends_in_parts(tmp_path: Path) -> None:
    make_blocks(tmp_path, layout_of(2, torch.float16))
    run_ranks("parts", 2, tmp_path)


def test_waits_end_by_abort_and_by_their_bound(tmp_path: Path) -> None:
    run_ranks("alone", 1, tmp_path)


def test_normalised_rows_may_be_rounded_to_e4m3(tmp_path: Path) -> None:
    run_ranks("rounds", 1, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_on_gpus(world_size: int) -> None:
    """Against float64, and 20,000 calls from graphs with ranks delayed at random; two ranks take turns on a GPU where
    there are too few."""
    count, options = torch.cuda.device_count(), ["--iterations", "20000"]
    if 2 * count < world_size:
        pytest.skip(f"needs {world_size // 2} GPUs")
    if count < world_size:
        options = ["--share-gpus", "--iterations", "2000"]
    command = [sys.executable, str(ROOT / "scripts" / "bench_kernels.py"), "all_reduce", "--check-only", *options]
    done = subprocess.run([*command, "--ranks", str(world_size)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


# ---- what the processes do (this file run as a script) ----


def shared_memory_rank(rank: int, folder: Path, layout: Layout) -> SimpleNamespace:
    """Stand-in for PeerMemory over files mapped by all processes (at different addresses, as on a GPU)."""
    blocks = [
        torch.from_file(str(folder / f"block{peer}"), shared=True, size=layout.nbytes, dtype=torch.uint8)
        for peer in range(layout.world_size)
    ]
    return SimpleNamespace(
        rank=rank,
        layout=layout,
        block=blocks[rank],
        blocks=blocks,
        peers=torch.tensor([block.data_ptr() for block in blocks]),
        parity=torch.zeros(3, 128, dtype=torch.int32),
        abort_word=torch.zeros(1, dtype=torch.int32),
    )


def layout_of(world_size: int, dtype: torch.dtype = torch.float32) -> Layout:
    return Layout(world_size, HIDDEN, dtype, CAPACITY, CAPACITY, 300)


def interpret_rank(rank: int, world_size: int, folder: Path) -> None:
    from nanovllm.parallel.peer import all_reduce as module

    memory = shared_memory_rank(rank, folder, layout_of(world_size))
    peer = module.PeerAllReduce(memory)  # type: ignore[arg-type]
    same, delays = random.Random(5), random.Random(rank)
    outputs: list[torch.Tensor] = []
    for call in range(CALLS):
        rows, kind = same.randint(1, CAPACITY), call % 7
        generator = torch.Generator().manual_seed(call)
        partials = torch.randn(world_size, rows, HIDDEN, generator=generator)
        module.MAX_PROGRAMS = same.randint(1, PROGRAMS)  # several rows a program
        partials[:, :, 3] = -0.0  # the sentinel itself
        partials[:, 0, 5] *= 0.0
        residual, weight = (torch.randn(n, HIDDEN, generator=generator) for n in (rows, 1))
        keys = torch.randint(-(2**63), 2**63 - 1, (world_size, 290), generator=generator)
        keys[:, 7] = -(2**63)
        time.sleep(delays.random() * 0.05)
        total = partials.double().sum(0)
        if kind == 6:
            expected = keys.max(0).values.clamp(min=-(2**63) + 1)
            assert torch.equal(peer.all_reduce_max(keys[rank].clone()), expected)
            continue
        path = "one_shot" if kind % 2 == 0 else "two_shot"
        if cut(peer, same.choice((1, 1, 2, 4))) > 1:
            module.MAX_PROGRAMS = 1  # programs of a row wait for each other, and here they run one after another
        before = None if kind in (4, 5) else residual.clone()
        norm = Norm(weight[0], EPS)
        normed, after = peer.all_reduce_add_rms_norm(partials[rank].contiguous(), before, norm, path=path)
        assert len(set(memory.parity.tolist()[path == "two_shot"])) == 1, "the next call may share rows out otherwise"
        total = total if before is None else total + residual.double()
        want = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight.double()
        torch.testing.assert_close(normed.double(), want, rtol=1e-5, atol=1e-5)
        mine = slice(None) if path == "one_shot" else slice(rank, None, world_size)
        torch.testing.assert_close(after[mine].double(), total[mine], rtol=1e-5, atol=1e-5)
        assert before is None or after is before
        outputs += [normed, after] if mine == slice(None) else [normed]
        outputs.append(peer.all_reduce(partials[rank].contiguous(), path=path))
        torch.testing.assert_close(outputs[-1].double(), partials.double().sum(0), rtol=1e-5, atol=1e-5)
    assert int(memory.abort_word) == 0
    torch.save(outputs, folder / f"result{rank}.pt")


def fork_programs() -> None:
    """Makes every program of the interpreter a process of its own, so that programs may wait for each other.
    What they write must lie in shared memory."""
    from triton.runtime import interpreter

    launch, builder = interpreter.GridExecutor.__call__, interpreter.interpreter_builder

    def run(self, program: int, *args, **kwargs) -> None:
        programs, self.grid = self.grid[0], (1,)
        builder.set_grid_dim = lambda *_: setattr(builder, "grid_dim", (programs, 1, 1))
        builder.set_grid_idx = lambda *_: setattr(builder, "grid_idx", (program, 0, 0))
        self._restore_args_dev = lambda *_: None  # it would write everything again, over what others write
        launch(self, *args, **kwargs)

    def fork_and_run(self, *args, **kwargs) -> None:
        children = []
        for program in range(self.grid[0]):
            children.append(os.fork())
            if children[-1] == 0:
                try:
                    run(self, program, *args, **kwargs)
                    os._exit(0)
                finally:
                    os._exit(1)
        assert {os.waitpid(child, 0)[1] for child in children} == {0}

    interpreter.GridExecutor.__call__ = fork_and_run  # type: ignore[method-assign]


def programs_rank(rank: int, world_size: int, folder: Path) -> None:
    """Programs of one row wait for each other's sums of squares."""
    from nanovllm.parallel.peer import all_reduce as module

    fork_programs()
    module.empty_rows = lambda rows, columns, dtype, _: torch.empty(rows, columns, dtype=dtype).share_memory_()  # type: ignore[assignment]
    memory = shared_memory_rank(rank, folder, layout_of(world_size))
    memory.parity.share_memory_(), memory.abort_word.share_memory_()
    peer = module.PeerAllReduce(memory)  # type: ignore[arg-type]
    same, outputs = random.Random(6), []
    for call in range(8):
        rows, module.MAX_PROGRAMS = same.randint(1, CAPACITY), same.randint(2, 6)
        cut(peer, same.choice((2, 4)))
        generator = torch.Generator().manual_seed(call)
        partials = torch.randn(world_size, rows, HIDDEN, generator=generator)
        residual, weight = (torch.randn(n, HIDDEN, generator=generator) for n in (rows, 1))
        total = partials.double().sum(0) + residual.double()
        want = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight.double()
        got = peer.all_reduce_add_rms_norm(
            partials[rank].contiguous(), residual.share_memory_(), Norm(weight[0], EPS), path="two_shot"
        )
        torch.testing.assert_close(got[0].double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1][rank::world_size].double(), total[rank::world_size], rtol=1e-5, atol=1e-5)
        assert len(set(memory.parity[1].tolist())) == 1
        outputs.append(got[0])
    assert int(memory.abort_word) == 0
    torch.save(outputs, folder / f"result{rank}.pt")


def parts_rank(rank: int, world_size: int, folder: Path) -> None:
    """Float32 parts give the bits of their sum, rounded to the model's dtype; and what the twin says."""
    from nanovllm.parallel.peer import all_reduce as module

    module.MAX_PROGRAMS = PROGRAMS
    dtype = torch.float16
    memory = shared_memory_rank(rank, folder, layout_of(world_size, dtype))
    peer = module.PeerAllReduce(memory)  # type: ignore[arg-type]
    for path, parts, rows in itertools.product(("one_shot", "two_shot", "split"), (2, 4), (1, 5, CAPACITY)):
        module.MAX_PROGRAMS = 1 if path == "split" else PROGRAMS  # as above
        cut(peer, 4 if path == "split" else 1)
        path = "two_shot" if path == "split" else path
        generator = torch.Generator().manual_seed(rows)
        partials = torch.randn(world_size, parts, rows, HIDDEN, generator=generator)
        partials[:, :, :, 3] = -0.0
        partials[:, 0, :, 4] = 300.0  # float16 cannot hold what comes with it, so the place of the rounding shows
        residual, weight = (torch.randn(n, HIDDEN, generator=generator).to(dtype) for n in (rows, 1))
        whole = [add_up(addend, dtype) for addend in partials]
        own = slice(None) if path == "one_shot" else slice(rank, None, world_size)  # of the residual's rows
        for start in (residual, None):
            norm = Norm(weight[0], EPS)
            got, same = (
                peer.all_reduce_add_rms_norm(addend, None if start is None else start.clone(), norm, path=path)
                for addend in (partials[rank].contiguous(), whole[rank])
            )
            want = sum_reference(torch.stack(whole), start, norm)
            assert got[0].dtype == got[1].dtype == dtype
            assert torch.equal(got[0], same[0]) and torch.equal(got[1][own], same[1][own])
            assert torch.equal(got[1][own], want[1][own])
            torch.testing.assert_close(got[0], want[0], rtol=2e-3, atol=1e-5)
    tree = module.PeerAllReduce(memory, one_order=True, round_sums=True)  # type: ignore[arg-type]
    for path, rows in itertools.product(("one_shot", "two_shot"), (1, CAPACITY)):
        generator = torch.Generator().manual_seed(rows)
        leaves = torch.randn(2 * world_size, rows, HIDDEN, generator=generator).to(dtype)
        residual, gain = (torch.randn(n, HIDDEN, generator=generator).to(dtype) for n in (rows, 1))
        norm = Norm(gain[0], EPS)
        of_one = [each.clone() for each in add_norms(leaves, residual.clone(), norm, round_sums=True)]
        got = tree.all_reduce_add_rms_norm(leaves[2 * rank : 2 * rank + 2], residual, norm, path=path)
        own = slice(None) if path == "one_shot" else slice(rank, None, world_size)
        assert torch.equal(got[0], of_one[0]) and torch.equal(got[1][own], of_one[1][own])
    for bad in (partials[rank].to(dtype), partials[rank][:1], partials[rank][:, :, :8]):
        with pytest.raises(ValueError, match="need"):
            peer.all_reduce_add_rms_norm(bad, None, Norm(weight[0], EPS))
    assert int(memory.abort_word) == 0


def cut(peer: Any, split: int) -> int:
    """Has all two-shot sums cut their rows into so many parts; returns their number."""
    peer.split = lambda rows: split
    return split


def alone_rank(rank: int, world_size: int, folder: Path) -> None:
    """Rank 0 of 2 whose peer is dead."""
    from nanovllm.parallel.peer.all_reduce import PeerAllReduce

    make_blocks(folder, layout_of(2))
    partial, weight = torch.randn(3, HIDDEN), torch.randn(HIDDEN)
    for path, split in (("one_shot", 1), ("two_shot", 1), ("two_shot", 4)):
        memory = shared_memory_rank(0, folder, layout_of(2))
        reducer = PeerAllReduce(memory, max_spins=5)  # type: ignore[arg-type]
        cut(reducer, split)
        reducer.all_reduce_add_rms_norm(partial, None, Norm(weight, EPS), path=path)
        assert int(memory.abort_word) == 2
    memory = shared_memory_rank(0, folder, layout_of(2))
    threading.Timer(0.5, lambda: memory.abort_word.fill_(1)).start()
    begin = time.monotonic()
    PeerAllReduce(memory).all_reduce_max(torch.arange(5))  # type: ignore[arg-type]
    assert 0.3 < time.monotonic() - begin < 60


def rounds_rank(rank: int, world_size: int, folder: Path) -> None:
    from nanovllm.kernels.fp8.quantize import quantize_rows
    from nanovllm.parallel.peer.all_reduce import PeerAllReduce

    layout = Layout(1, 384, torch.bfloat16, CAPACITY, 0, 300)
    make_blocks(folder, layout)
    peer = PeerAllReduce(shared_memory_rank(0, folder, layout))  # type: ignore[arg-type]
    partial, residual, weight = (torch.randn(n, 384).to(torch.bfloat16) for n in (5, 5, 1))
    plain = peer.all_reduce_add_rms_norm(partial, residual.clone(), Norm(weight[0], EPS))
    found = peer.all_reduce_add_rms_norm(partial, residual.clone(), Norm(weight[0], EPS), rounds=True)
    values, scales, _ = quantize_rows(plain[0])  # not the twin: the interpreter rounds another way than a GPU
    assert torch.equal(found[0].values.float(), values.float()) and torch.equal(found[0].scales, scales)
    assert torch.equal(found[1], plain[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = {"interpret": interpret_rank, "parts": parts_rank, "alone": alone_rank}
    ranks |= {"programs": programs_rank, "rounds": rounds_rank}
    ranks[sys.argv[1]](int(sys.argv[4]), int(sys.argv[2]), Path(sys.argv[3]))
