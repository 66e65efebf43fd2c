"""What the benchmarks over several ranks share: ranks that agree, time their calls as one, and end in time.

Importing it forbids NVLink multicast, so it comes before torch.
"""

import argparse
import faulthandler
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nanovllm.parallel.peer.memory import Layout, PeerMemory, forbid_multicast

forbid_multicast()  # before CUDA starts, here and in every rank (they import this file)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from nanovllm.parallel.peer.all_reduce import PeerAllReduce  # noqa: E402

ROWS = (1, 8, 64, 256, 512, 2048, 8192)
ONE_SHOT_ROWS, EPS = 2048, 1e-6
MAX_SPINS = 1 << 25


class Rank:
    """One rank: its device, its host-side group (gloo, for agreeing and for barriers) and where it says things."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.world, self.options = rank, options.world, options
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
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
        failure = "ranks share a GPU" if self.options.share_gpus else ""
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
        two_shot_rows = 512 if self.options.share_gpus else max(ROWS)
        one_shot_rows = 128 if self.options.share_gpus else ONE_SHOT_ROWS
        layout = Layout.build(self.world, hidden, 2, one_shot_rows, two_shot_rows, 1024, half_rows)
        return PeerMemory(
            self.store, self.rank, self.world, self.device, max(ROWS), hidden, torch.bfloat16,
            layout=layout, name=f"peer{hidden}", allow_shared_device=self.options.share_gpus,
        )  # fmt: skip


def capture(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    torch.cuda.synchronize()
    own = {} if stream == torch.cuda.default_stream() else {"stream": stream}  # that one cannot be captured
    with torch.cuda.graph(graph, **own, capture_error_mode="thread_local"):
        body()
    torch.cuda.synchronize()
    return graph


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


def rank_parser(doc: str | None, out: str, limit: float, world: int = 2) -> argparse.ArgumentParser:
    """The options of every such benchmark."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=world)
    parser.add_argument("--out", default=out)
    parser.add_argument("--limit", type=float, default=limit, help="seconds after which everything is ended")
    parser.set_defaults(share_gpus=False)
    return parser


def add_check_options(parser: argparse.ArgumentParser, iterations: int) -> None:
    parser.add_argument("--iterations", type=int, default=iterations, help="calls of the check under random delays")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--share-gpus", action="store_true", help="ranks take turns on fewer GPUs: slow, check only")


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


def launch(work: Callable[[Rank], bool], options: argparse.Namespace) -> int:
    """Runs `work` in `options.world` processes, for `options.limit` seconds at most; the exit status."""
    if options.share_gpus:
        options.check_only = True
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
