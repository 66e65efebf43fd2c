"""All-reduce + residual + RMSNorm through peer memory: checked under random delays, then timed against NCCL.

The check asks for a float64 result, equal bits on all ranks, the same bits in every one of `--iterations` calls from
graphs with ranks delayed at random, and that a wait without peers ends when the host aborts it.
"""

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bench_cases.harness import EPS, Line, Point, Setup, capture, compare
from bench_cases.ranks import Rank
from nanovllm.kernels.pointwise.norm import Norm, add_norms
from nanovllm.parallel.peer.all_reduce import PeerAllReduce

ROWS = (1, 8, 64, 128, 256, 512, 2048, 8192)
KEYS = 256
CALLS, GRAPHS = 20, 4
"""Calls of a graph, and graphs that take turns, in the check with delays."""


class Sum:
    """One all-reduce: this rank's addend [rows, hidden], or float32 [parts, rows, hidden] whose sum it is."""

    def __init__(self, setup: Setup, peer: PeerAllReduce, hidden: int, rows: int, parts: int = 1) -> None:
        assert setup.rank is not None
        self.peer, self.parts, self.nccl = peer, parts, setup.rank.nccl
        # The bits of -0.0 mean "empty" to the kernels, so some addends are -0.0.
        self.addends = [setup.randn(rows, hidden, seed=rank) for rank in range(setup.rank.world)]
        for addend in self.addends:
            addend[:, 3] = -0.0
        mine = self.addends[setup.rank.rank]
        self.mine = mine if parts == 1 else (mine.float() / parts).repeat(parts, 1, 1)
        self.before = setup.randn(rows, hidden, seed=99)
        self.residual = self.before.clone()
        self.weight = 1 + setup.randn(hidden, scale=0.1, seed=98)

    def reset(self) -> None:
        self.residual.copy_(self.before)

    def exact(self, index: int) -> torch.Tensor:
        """float64, for the check."""
        total = torch.stack(self.addends).double().sum(0) + self.before.double()
        return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * self.weight.double()

    def by_peers(self, path: Any, index: int) -> torch.Tensor:
        return self.peer.all_reduce_add_rms_norm(self.mine, self.residual, Norm(self.weight, EPS), path=path)[0]

    def by_nccl(self, index: int) -> torch.Tensor:
        total = self.mine.clone() if self.parts == 1 else self.mine.sum(0).to(self.weight.dtype)
        self.nccl.allreduce([total]).wait()
        return add_norms(total, self.residual, Norm(self.weight, EPS))[0]

    def paths(self) -> list[str]:
        layout, rows = self.peer.memory.layout, len(self.before)
        fitting = {"one_shot": layout.one_shot_rows, "two_shot": layout.two_shot_rows}
        return [path for path, most in fitting.items() if rows <= most]


def all_reduce(setup: Setup) -> Iterator[Line]:
    if setup.dry:  # without GPUs there is no peer memory: tests/parallel runs these kernels in the interpreter
        yield from ({"hidden": setup.model.hidden_size, "rows": rows} for rows in setup.rows(ROWS, ROWS))
        return
    rank, hidden = setup.rank, setup.model.hidden_size
    assert rank is not None
    peer = rank.peer(hidden)
    most = peer.memory.layout.two_shot_rows
    for rows, parts in [(rows, parts) for rows in setup.rows(ROWS) for parts in (1, 2) if rows <= most]:
        if parts == 1 or rows <= 256:
            yield compare(setup, make_point(setup, Sum(setup, peer, hidden, rows, parts)))
    yield compare(setup, maximum(setup, peer))
    cases = [Sum(setup, peer, hidden, rows, parts) for rows, parts in ((1, 1), (8, 1), (64, 2), (128, 1), (257, 1))]
    yield {"rows": f"{setup.options.iterations} calls, delayed", "right": with_delays(rank, peer, cases)}
    yield {"rows": "abort", "right": ends_when_aborted(rank, peer, cases[1])}
    peer.memory.close()


def make_point(setup: Setup, case: Sum) -> Point:
    contenders: dict[str, Callable[[int], torch.Tensor]] = {path: partial(case.by_peers, path) for path in case.paths()}
    if setup.options.check_only:
        contenders = {"float64": case.exact, **contenders}
    elif case.nccl is not None:
        contenders = {"nccl": case.by_nccl, **contenders}
    rows, hidden = case.before.shape
    chosen = case.peer.path(rows)
    labels = {"hidden": hidden, "rows": rows, "parts": case.parts}
    return Point(labels, contenders, chosen=chosen if chosen in contenders else "", reset=case.reset)


def maximum(setup: Setup, peer: PeerAllReduce) -> Point:
    """Maximum of sampling keys over the ranks."""
    keys = torch.arange(KEYS, device=setup.device) * (1 if setup.rank and setup.rank.rank else -1)
    want = torch.arange(KEYS, device=setup.device)
    contenders = {"exact": lambda index: want, "max of keys": lambda index: peer.all_reduce_max(keys.clone())}
    return Point({"hidden": "-", "rows": KEYS, "parts": 1}, contenders, tolerance=1e-12)


def with_delays(rank: Rank, peer: PeerAllReduce, cases: list[Sum]) -> bool:
    """Whether every call from graphs, each rank delayed at random, gives the bits of a first call."""
    same, mine = random.Random(1), random.Random(100 + rank.rank)
    wrong = torch.zeros(1, dtype=torch.int64, device=rank.device)
    expected = {}
    for case in cases:
        for path in case.paths():
            case.reset()
            expected[case, path] = case.by_peers(path, 0).view(torch.int16).clone()

    def delayed(case: Sum, path: str, cycles: int) -> None:
        torch.cuda._sleep(cycles)
        case.reset()
        wrong.add_((case.by_peers(path, 0).view(torch.int16) != expected[case, path]).sum())

    def draw() -> list[Callable[[], None]]:
        chosen = (same.choice(list(expected)) for _ in range(CALLS))
        return [partial(delayed, *key, mine.choice((0, 500, 5_000, 20_000, 60_000))) for key in chosen]

    graphs = [capture(draw()) for _ in range(GRAPHS)]
    for replay in range(-(-rank.options.iterations // CALLS)):
        if mine.random() < 0.05:
            torch.cuda._sleep(mine.randrange(1_000_000))
        graphs[same.randrange(GRAPHS)].replay()
        if replay % 64 == 63:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return rank.all_agree(int(wrong.item()) == 0 and int(peer.memory.abort_word.item()) == 0)


def ends_when_aborted(rank: Rank, peer: PeerAllReduce, case: Sum) -> bool:
    """Rank 0 calls alone, as if its peers were dead, until the host stops it. The memory is of no use afterwards."""
    fine = True
    if rank.rank == 0:
        case.by_peers("one_shot", 0)
        time.sleep(0.3)
        begin, waiting = time.monotonic(), not torch.cuda.current_stream().query()
        peer.memory.abort()
        torch.cuda.synchronize()
        fine = waiting and int(peer.memory.abort_word.item()) == 1 and time.monotonic() - begin < 1
    return rank.all_agree(fine)
