"""Ranks of a case: processes that agree, time their calls as one, and end in time.

Importing this forbids NVLink multicast, so it comes before CUDA starts.
"""

import argparse
import faulthandler
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from nanovllm.processes.child import forbid_multicast

forbid_multicast()
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from bench_cases.harness import Line, Setup, collect  # noqa: E402
from nanovllm.parallel.peer.all_reduce import PeerAllReduce  # noqa: E402
from nanovllm.parallel.peer.memory import Layout, PeerMemory  # noqa: E402

MAX_ROWS, MAX_SPINS = 8192, 1 << 25


class Rank:
    """One rank: its device and its host-side group (gloo, for agreeing and as a barrier)."""

    def __init__(self, rank: int, port: int, options: argparse.Namespace) -> None:
        self.rank, self.world, self.options = rank, options.ranks, options
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
        gloo = dist.PrefixStore("gloo", self.store)
        self.gloo: Any = dist.ProcessGroupGloo(gloo, rank, self.world, timedelta(seconds=90))
        self.nccl = self._nccl()
        self.meet: Callable[[], object] = lambda: None
        """A call on the device that ends when all ranks have made it; a case sets it."""

    def _nccl(self) -> Any:
        """The communicator of the baseline; None where ranks share a GPU, which NCCL refuses."""
        if self.options.share_gpus:
            return None
        settings = dist.ProcessGroupNCCL.Options()
        settings._timeout = timedelta(seconds=60)
        return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", self.store), self.rank, self.world, settings)

    def extreme(self, values: torch.Tensor, highest: bool) -> torch.Tensor:
        """Element-wise maximum (minimum) over the ranks, on the host; also a barrier."""
        values = values.detach().cpu().contiguous().clone()
        choice: Any = dist.AllreduceOptions()
        choice.reduceOp = dist.ReduceOp.MAX if highest else dist.ReduceOp.MIN
        self.gloo.allreduce([values], choice).wait()
        return values

    def slowest(self, us: float) -> float:
        return float(self.extreme(torch.tensor([us]), highest=True).item())

    def all_agree(self, fine: bool) -> bool:
        return bool(self.extreme(torch.tensor([int(fine)]), highest=False).item())

    def same_bits(self, tensor: torch.Tensor) -> bool:
        bits = tensor.view(torch.int16).int() if tensor.element_size() == 2 else tensor
        return torch.equal(self.extreme(bits, highest=True), self.extreme(bits, highest=False))

    def replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Microseconds of a replay that all devices begin together."""
        self.all_agree(True)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.meet()  # the devices meet, then wait for their hosts to launch the graph
        torch.cuda._sleep(300_000)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def memory(self, hidden: int) -> PeerMemory:
        """Blocks large enough for one-shot and two-shot sums of every row count, whatever the engine's limits."""
        shared = self.options.share_gpus
        rows = (128, 512) if shared else (2048, MAX_ROWS)
        layout = Layout(self.world, hidden, torch.bfloat16, *rows, max_keys=1024)
        store = dist.PrefixStore(f"peer{hidden}", self.store)
        return PeerMemory(store, self.rank, self.device, layout, allow_shared_device=shared)

    def peer(self, hidden: int) -> PeerAllReduce:
        peer = PeerAllReduce(self.memory(hidden), max_spins=MAX_SPINS)
        keys = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.meet = lambda: peer.all_reduce_max(keys)
        return peer


def rank_main(index: int, port: int, case: str, options: argparse.Namespace, results: Any) -> None:
    faulthandler.dump_traceback_later(options.limit - 5, exit=True)
    fine = False
    try:
        rank = Rank(index, port, options)
        lines = collect(case, Setup(options, rank.device, rank))
        fine = rank.all_agree(all(line["right"] for line in lines))
        if index == 0:
            results.send(lines)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0 if fine else 1)  # no destructor may wait for a rank that is gone


def launch(case: str, options: argparse.Namespace) -> list[Line]:
    """Runs a case in a process for each rank, for `--limit` seconds at most; none of its lines where a rank failed."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    made = [
        context.Process(target=rank_main, args=(index, store.port, case, options, sender))
        for index in range(options.ranks)
    ]
    for process in made:
        process.start()
    deadline, lines = time.monotonic() + options.limit, []
    while any(process.is_alive() for process in made) and time.monotonic() < deadline:
        if receiver.poll(0.1):
            lines = receiver.recv()
        if any(process.exitcode not in (None, 0) for process in made):
            time.sleep(2)  # the others may still say why
            break
    for process in made:
        process.kill()
        process.join()
    if receiver.poll():
        lines = receiver.recv()
    codes = [process.exitcode for process in made]
    if any(codes):
        print("a rank failed or took too long; exit codes:", codes, flush=True)
        return []
    return lines
