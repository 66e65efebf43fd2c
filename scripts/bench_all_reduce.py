#!/usr/bin/env python3
"""All-reduce + residual + RMSNorm over the GPUs of one host: checks the peer-memory kernels, then times them.

    python scripts/bench_all_reduce.py --world 4 --out logs/            both, under three minutes
    python scripts/bench_all_reduce.py --world 2 --check-only --share-gpus --iterations 200 --out logs/     on one GPU

Starts its own ranks and ends them at --limit seconds, whatever they do. Exit status 0: no sum was wrong.
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_ranks import EPS, MAX_SPINS, ROWS, Rank, capture, check_abort, launch, time_call  # isort: skip  # forbids multicast
from bench_ranks import add_check_options, rank_parser  # isort: skip

import torch
import triton

from nanovllm.kernels.pointwise.norm import add_rms_norm
from nanovllm.parallel.peer.all_reduce import PeerAllReduce
from nanovllm.parallel.peer.limits import AllReduceLimits

KEYS = 256
BANK, CALLS, GRAPHS = 4, 20, 4  # data sets of a case, calls of a graph, graphs that take turns in the check
ROUNDING = 2.0**-8  # of bfloat16, relative, at most


class Case:
    """One kind of call with data sets known to all ranks; `expected`: the bits it once gave, checked in float64."""

    def __init__(self, rank: Rank, peer: PeerAllReduce, hidden: int, kind: str, rows: int) -> None:
        self.rank, self.peer, self.kind, self.rows = rank, peer, kind, rows
        device, generator = rank.device, torch.Generator(rank.device).manual_seed(rows * 131 + hidden)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, generator=generator).bfloat16()

        self.weight = 1 + 0.1 * normal(hidden)
        if kind == "keys":
            shape = (BANK, rank.world, rows)
            addends = torch.randint(-(2**62), 2**62, shape, device=device, generator=generator)
        else:
            addends = normal(BANK, rank.world, rows, hidden)
            addends[..., 3] = -0.0  # the bits that mean "empty"
        self.residual = normal(BANK, rows, hidden)
        self.mine = addends[:, rank.rank].contiguous()
        self.errors: list[str] = []
        outputs = [self.call(self.mine[i].clone(), self.residual[i].clone()) for i in range(BANK)]
        torch.cuda.synchronize()
        self.expected = [torch.stack(column) for column in zip(*outputs, strict=True)]
        for i in range(BANK):
            self._compare(addends[i], i, hidden)
        for tensor in self.expected:
            if not rank.same_bits(tensor):
                self.errors.append("ranks differ in bits")

    def call(self, addend: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The call on one data set; may overwrite its arguments."""
        if self.kind == "keys":
            return (self.peer.all_reduce_max(addend),)
        path: Any = self.kind.partition("+")[0]
        start = None if "no residual" in self.kind else residual
        if "halves" in self.kind:
            addend = (addend.float() / 2).repeat(2, 1, 1)
        normed, after = self.peer.all_reduce_add_rms_norm(addend, start, self.weight, EPS, path=path)
        return (normed, after) if path == "one_shot" else (normed,)  # else the ranks share the residual's rows out

    def _compare(self, addends: torch.Tensor, i: int, hidden: int) -> None:
        if self.kind == "keys":
            if not torch.equal(self.expected[0][i], addends.max(0).values):
                self.errors.append("wrong maximum")
            return
        total = addends.double().sum(0)
        if "no residual" not in self.kind:
            total = total + self.residual[i].double()
        scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
        normed = total * scale * self.weight.double()
        got = [column[i].double() for column in self.expected]
        for have, want, times in zip(got, (normed, total), (3, 1), strict=False):
            worst = ((have - want).abs() - want.abs() * ROUNDING * times).max().item()
            if not worst < 2e-4:
                self.errors.append(f"off by {worst:.2e} beyond the rounding")

    def add_to_graph(self, order: torch.Tensor, step: torch.Tensor, wrong: torch.Tensor, sleep: int) -> None:
        """One call on the data set that `order[step]` names, after `sleep` cycles; counts deviations in `wrong`."""
        choice = order.index_select(0, step)
        step.add_(1).remainder_(order.numel())
        addend, residual = (bank.index_select(0, choice)[0] for bank in (self.mine, self.residual))
        torch.cuda._sleep(sleep)
        outputs = self.call(addend, residual)
        for got, bank in zip(outputs, self.expected, strict=True):
            bits = torch.int16 if got.element_size() == 2 else torch.int64
            wrong.add_((got.view(bits) != bank.index_select(0, choice)[0].view(bits)).sum())


def all_cases(rank: Rank, peer: PeerAllReduce, hidden: int) -> list[Case]:
    large = 257 if rank.options.share_gpus else 1030
    kinds = [("one_shot+norm", 1), ("one_shot+norm", 64), ("one_shot+norm, no residual", 128), ("one_shot+norm", 8),
             ("two_shot+norm", 5), ("two_shot+norm", large), ("two_shot+norm", 256),
             ("one_shot+norm, halves", 96), ("two_shot+norm, halves", 200),
             ("two_shot+norm, no residual", 66), ("two_shot+norm", 100), ("keys", 1), ("keys", KEYS)]  # fmt: skip
    return [Case(rank, peer, hidden, kind, rows) for kind, rows in kinds]


def check(rank: Rank, peer: PeerAllReduce, hidden: int, cases: Sequence[Case]) -> bool:
    """Float64 first, then `iterations` calls from graphs with random delays; True: nothing was wrong on any rank."""
    for case in cases:
        if case.errors:
            print(f"rank {rank.rank} {case.kind} {case.rows} rows: {case.errors[:4]}", flush=True)
    fine = rank.all_agree(not any(case.errors for case in cases))
    rank.say(f"hidden {hidden}: {len(cases)} kinds of call against float64:", "right" if fine else "WRONG")
    return fine and check_graphs(rank, peer, hidden, cases)


def check_graphs(rank: Rank, peer: PeerAllReduce, hidden: int, cases: Sequence[Case]) -> bool:
    """`iterations` calls of `cases`, each rank delayed at random."""
    same, mine = random.Random(1), random.Random(100 + rank.rank)
    step, wrong = (torch.zeros(1, dtype=torch.int64, device=rank.device) for _ in range(2))
    order = torch.tensor([same.randrange(BANK) for _ in range(9973)], device=rank.device)
    graphs = []
    for _ in range(GRAPHS):
        plan = [(same.choice(cases), mine.choice((0, 500, 5_000, 20_000, 60_000))) for _ in range(CALLS)]

        def body(plan: list[tuple[Case, int]] = plan) -> None:
            for case, sleep in plan:
                case.add_to_graph(order, step, wrong, sleep)

        graphs.append(capture(body))
    replays = -(-rank.options.iterations // CALLS)
    for replay in range(replays):
        if mine.random() < 0.05:
            torch.cuda._sleep(mine.randrange(1_000_000))
        graphs[same.randrange(GRAPHS)].replay()
        if replay % 64 == 63:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    elements, state = int(wrong.item()), peer.memory.aborted()
    fine = rank.all_agree(elements == 0 and state == 0)
    if elements or state:
        print(f"rank {rank.rank}: {elements} wrong elements, abort word {state}", flush=True)
    verdict = "no wrong sum, all ranks equal in bits" if fine else "WRONG"
    rank.say(f"hidden {hidden}: {replays * CALLS} calls from graphs, ranks delayed at random: {verdict}")
    return fine


def time_rows(rank: Rank, peer: PeerAllReduce, hidden: int, rows: int) -> dict[str, float | int | str]:
    """One line of the table; us."""
    generator = torch.Generator(rank.device).manual_seed(rank.rank)
    x, residual = (torch.randn(rows, hidden, device=rank.device, generator=generator).bfloat16() for _ in range(2))
    weight, zeros = torch.ones_like(x[0]), torch.zeros_like(x)
    calls = 40 if rows <= 512 else 10
    norm = partial(add_rms_norm, zeros, residual, weight, EPS)

    def nccl() -> None:
        rank.nccl.allreduce([zeros]).wait()  # in place: anything else would grow without bound

    def nccl_norm() -> None:
        nccl()
        norm()

    fused = partial(peer.all_reduce_add_rms_norm, x, residual, weight, EPS)
    line: dict[str, float | int | str] = {"hidden": hidden, "rows": rows, "KiB": rows * hidden * 2 // 1024}
    ways: dict[str, Callable[[], object] | None] = {
        "norm": norm,
        "nccl": nccl if rank.nccl else None,
        "nccl+norm": nccl_norm if rank.nccl else None,
        "one-shot": partial(fused, path="one_shot") if rows <= peer.memory.layout.one_shot_rows else None,
        "two-shot": partial(fused, path="two_shot"),
    }
    line |= {name: time_call(rank, peer, way, calls) if way else float("nan") for name, way in ways.items()}
    line["path"] = peer.path(rows)
    return line


def table(lines: list[dict[str, float | int | str]]) -> str:
    head = list(lines[0])
    cells = [[line[name] for name in head] for line in lines]
    rows = [head] + [[f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in line] for line in cells]
    return "\n".join("| " + " | ".join(cell.rjust(len(head[i])) for i, cell in enumerate(row)) + " |" for row in rows)


def work(rank: Rank) -> bool:
    options = rank.options
    rank.say(f"{rank.world} x {torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    fine, lines = True, []
    for index, hidden in enumerate(options.hidden):
        memory = rank.memory(hidden)
        peer = PeerAllReduce(memory, max_spins=MAX_SPINS)
        rank.say(f"hidden {hidden}: {memory.layout.nbytes >> 20} MiB mapped among {rank.world} ranks")
        fine = check(rank, peer, hidden, all_cases(rank, peer, hidden)) and fine
        if fine and not options.check_only:
            if index == 0:
                rank.start_nccl()
                keys = partial(peer.all_reduce_max, torch.arange(KEYS, device=rank.device))
                rank.say(f"maximum of {KEYS} keys: {time_call(rank, peer, keys, 40):.1f} us")
            lines += [time_rows(rank, peer, hidden, rows) for rows in ROWS]
            rank.say(f"hidden {hidden}: timed")
        if fine and hidden == options.hidden[-1]:
            weight = torch.ones(hidden, device=rank.device, dtype=torch.bfloat16)
            zeros = torch.zeros(4, hidden, device=rank.device, dtype=torch.bfloat16)
            fine = check_abort(rank, memory, partial(peer.all_reduce_add_rms_norm, zeros, None, weight, EPS))
        memory.close()
    if rank.rank == 0 and lines:
        text = f"us per call, slowest rank, world {rank.world}; switch points: {AllReduceLimits()}\n{table(lines)}"
        print(text, flush=True)
        Path(options.out, "table.txt").write_text(text + "\n")
        Path(options.out, "table.json").write_text(json.dumps(lines))
    rank.say("result:", "right" if fine else "WRONG")
    return fine


def main() -> int:
    parser = rank_parser(__doc__, "bench_all_reduce", limit=170.0)
    parser.add_argument("--hidden", type=lambda text: [int(x) for x in text.split(",")], default=[5120, 4096, 1024])
    add_check_options(parser, 20_000)
    return launch(work, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
