#!/usr/bin/env python3
"""All-reduce + residual + RMSNorm over the GPUs of one host: checks the peer-memory kernels, then times them.

    python scripts/bench_all_reduce.py --world 4 --out logs/            both, under three minutes
    python scripts/bench_all_reduce.py --world 2 --check-only --same-gpu --iterations 200 --out logs/     on one GPU

Starts its own ranks and ends them at --limit seconds, whatever they do. Exit status 0: no sum was wrong.
"""

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nanovllm.parallel.all_reduce_limits import AllReduceLimits
from nanovllm.parallel.peer_memory import Layout, PeerMemory, forbid_multicast

forbid_multicast()  # before CUDA starts, here and in every rank (they import this file)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import triton  # noqa: E402

from nanovllm.kernels.all_reduce import PeerAllReduce  # noqa: E402
from nanovllm.kernels.norm import add_rms_norm  # noqa: E402

ROWS = (1, 8, 64, 256, 512, 2048, 8192)
ONE_SHOT_ROWS, EPS, KEYS = 2048, 1e-6, 256
BANK, CALLS, GRAPHS = 4, 20, 4  # data sets of a case, calls of a graph, graphs that take turns in the check
MAX_SPINS = 1 << 25
ROUNDING = 2.0**-8  # of bfloat16, relative, at most


class Rank:
    """One rank: its device, its host-side group (gloo, for agreeing and for barriers) and where it says things."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.world, self.options = rank, options.world, options
        self.device = torch.device("cuda", 0 if options.same_gpu else rank)
        torch.cuda.set_device(self.device)
        self.store = dist.TCPStore("127.0.0.1", options.port, None, False, timedelta(seconds=60))
        gloo = dist.PrefixStore("gloo", self.store)
        self.gloo: Any = dist.ProcessGroupGloo(gloo, rank, self.world, timedelta(seconds=90))
        self.begin = time.monotonic()
        self.nccl: Any = None

    def say(self, *words: object) -> None:
        if self.rank == 0:
            print(f"[{time.monotonic() - self.begin:5.1f} s]", *words, flush=True)

    def extreme(self, values: torch.Tensor, highest: bool) -> torch.Tensor:
        """Element-wise maximum (minimum) over the ranks of a host tensor; also a barrier."""
        values = values.detach().cpu().contiguous().clone()
        choice: Any = dist.AllreduceOptions()
        choice.reduceOp = dist.ReduceOp.MAX if highest else dist.ReduceOp.MIN
        self.gloo.allreduce([values], choice).wait()
        return values

    def all_agree(self, fine: bool) -> bool:
        return bool(self.extreme(torch.tensor([int(fine)]), highest=False).item())

    def same_bits(self, tensor: torch.Tensor) -> bool:
        bits = tensor.view(torch.int16).int() if tensor.element_size() == 2 else tensor
        return torch.equal(self.extreme(bits, highest=True), self.extreme(bits, highest=False))

    def start_nccl(self) -> None:
        """Communicator of the baseline; without it its column stays empty."""
        failure = "all ranks share one GPU" if self.options.same_gpu else ""
        if not failure:
            try:
                settings = dist.ProcessGroupNCCL.Options()
                settings._timeout = timedelta(seconds=60)
                store = dist.PrefixStore("nccl", self.store)
                self.nccl = dist.ProcessGroupNCCL(store, self.rank, self.world, settings)
                x = torch.ones(8, device=self.device)
                self.nccl.allreduce([x]).wait()
                torch.cuda.synchronize()
                assert x[0].item() == self.world
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        if not self.all_agree(not failure):
            self.nccl = None
            self.say("no NCCL column:", failure or "another rank failed")

    def memory(self, hidden: int, half_rows: int = 0) -> PeerMemory:
        """Blocks large enough for every row of the table, whatever the switch points."""
        two_shot_rows = 512 if self.options.same_gpu else max(ROWS)
        one_shot_rows = 128 if self.options.same_gpu else ONE_SHOT_ROWS
        layout = Layout.build(self.world, hidden, 2, one_shot_rows, two_shot_rows, 1024, half_rows)
        return PeerMemory(
            self.store, self.rank, self.world, self.device, max(ROWS), hidden, torch.bfloat16,
            layout=layout, name=f"peer{hidden}", allow_shared_device=self.options.same_gpu,
        )  # fmt: skip


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


def capture(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    torch.cuda.synchronize()
    own = {} if stream == torch.cuda.default_stream() else {"stream": stream}  # that one cannot be captured
    with torch.cuda.graph(graph, **own, capture_error_mode="thread_local"):
        body()
    torch.cuda.synchronize()
    return graph


def all_cases(rank: Rank, peer: PeerAllReduce, hidden: int) -> list[Case]:
    large = 257 if rank.options.same_gpu else 1030
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


def time_call(rank: Rank, peer: PeerAllReduce, call: Callable[[], object], calls: int, repeats: int = 9) -> float:
    """us per call within a graph of `calls` calls: median of the replays, slowest rank. nan where a rank failed."""
    meeting = torch.zeros(1, dtype=torch.int64, device=rank.device)
    failure = ""
    try:
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        graph = capture(lambda: [call() for _ in range(calls)])
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        print(f"rank {rank.rank}: {failure}", flush=True)
    if not rank.all_agree(not failure):
        return float("nan")
    times = []
    for _ in range(repeats):
        rank.all_agree(True)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        peer.all_reduce_max(meeting)  # the devices meet, and then wait for their hosts to launch the graph
        torch.cuda._sleep(300_000)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return float(rank.extreme(torch.tensor([statistics.median(times[2:])]), highest=True).item())


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


def check_abort(rank: Rank, memory: PeerMemory, call: Callable[[], object]) -> bool:
    """Rank 0 alone calls, as if the others were dead; the host stops it. The block is unfit for use afterwards."""
    fine = True
    if rank.rank == 0:
        call()
        time.sleep(0.3)
        begin, waiting = time.monotonic(), not torch.cuda.current_stream().query()
        memory.abort()
        torch.cuda.synchronize()
        seconds, state = time.monotonic() - begin, memory.aborted()
        fine = waiting and state == 1 and seconds < 1
        rank.say(f"a wait without peers ended {seconds * 1e3:.1f} ms after abort(): {'right' if fine else 'WRONG'}")
    return rank.all_agree(fine)


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


def rank_main(index: int, options: argparse.Namespace, work: Callable[[Rank], bool]) -> None:
    with Path(options.out, f"rank{index}.log").open("w") as log:
        faulthandler.dump_traceback_later(options.limit - 5, exit=True, file=log)
        fine = False
        try:
            fine = work(Rank(index, options))
        except BaseException:
            traceback.print_exc(file=log)
            traceback.print_exc()
    sys.stdout.flush()
    os._exit(0 if fine else 1)  # no destructor may wait for a rank that is gone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--out", default="bench_all_reduce")
    parser.add_argument("--hidden", type=lambda text: [int(x) for x in text.split(",")], default=[5120, 4096, 1024])
    parser.add_argument("--iterations", type=int, default=20_000, help="calls of the check under random delays")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--same-gpu", action="store_true", help="all ranks on GPU 0, taking turns: slow, check only")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds after which everything is ended")
    options = parser.parse_args()
    options.check_only = options.check_only or options.same_gpu
    return launch(work, options)


def launch(work: Callable[[Rank], bool], options: argparse.Namespace) -> int:
    """Runs `work` in `options.world` processes, for `options.limit` seconds at most; the exit status."""
    Path(options.out).mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    options.port = store.port
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(index, options, work)) for index in range(options.world)]
    for process in ranks:
        process.start()
    deadline, reason = time.monotonic() + options.limit, ""
    while any(process.is_alive() for process in ranks) and not reason:
        time.sleep(0.1)
        if time.monotonic() > deadline:
            reason = f"the limit of {options.limit:.0f} s was reached"
        elif any(process.exitcode not in (None, 0) for process in ranks):
            reason = "a rank failed"
    time.sleep(2 if reason else 0)  # the others may still say why
    for process in ranks:
        if reason:
            process.kill()
        process.join()
    codes = [process.exitcode for process in ranks]
    print("exit codes of the ranks:", codes, reason, flush=True)
    return 0 if codes == [0] * options.world else 1


if __name__ == "__main__":
    sys.exit(main())
