"""Products that store straight into the places of the sum behind them: the same bits as through local memory, between
concurrent ranks (Triton's interpreter over shared host memory); pairs that cannot be broken; who pushes; variants
compiled for a GPU that need not be there."""

import itertools
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_all_reduce_kernel import ROOT, check_on_gpus, make_blocks, run_ranks, shared_memory_rank

from nanovllm.kernels.gemm.decode import MidConfig, SplitConfig
from nanovllm.kernels.gemm.push import Pushed
from nanovllm.kernels.gemm.skinny import GemmConfig
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.norm import ReduceAddNorm
from nanovllm.parallel.peer.limits import AllReduceLimits
from nanovllm.parallel.peer.memory import Layout, fill_with_sentinels
from nanovllm.runner import tuning

HIDDEN, CAPACITY, ROUNDS, EPS = 40, 37, 10, 1e-6
SMALL = [
    GemmConfig("fma", 8, 256, 1),
    GemmConfig("fma", 16, 256, 1, split_k=2),
    GemmConfig("tile", 16, 256, 1, split_k=2),
    GemmConfig("stream", 16, 32, 2),
    GemmConfig("stream", 32, 64, 2, split_k=4),
]
MID = [MidConfig(64, 32, 32, 3), MidConfig(32, 64, 32, 3)]
CASES = [*itertools.product(SMALL, (1, 3, 16), (512, 264)), *itertools.product(MID, (1, 17, CAPACITY), (96, 40))]


def layout_of(world_size: int) -> Layout:
    return Layout.build(world_size, HIDDEN, 2, CAPACITY, CAPACITY, 300)


@pytest.mark.parametrize("world_size", [2, 4])
def test_bits_are_those_of_products_stored_locally(world_size: int, tmp_path: Path) -> None:
    layout = layout_of(world_size)
    make_blocks(tmp_path, layout)
    run_ranks("concurrent", world_size, tmp_path, script=__file__)
    results = [torch.load(tmp_path / f"result{rank}.pt") for rank in range(world_size)]
    for mine in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(mine, results[0], strict=True))
    clean = torch.empty(layout.nbytes, dtype=torch.uint8)
    fill_with_sentinels(clean, layout)
    for rank in range(world_size):
        assert (tmp_path / f"block{rank}").read_bytes() == clean.numpy().tobytes(), "a place was left dirty"


def reducer(folder: Path, limits: AllReduceLimits | None = None) -> Any:
    pytest.importorskip("triton")
    from nanovllm.parallel.peer.all_reduce import PeerAllReduce

    make_blocks(folder, layout_of(2))
    memory = shared_memory_rank(0, 2, folder, torch.float16, layout_of(2))
    memory.limits = limits or memory.limits
    return PeerAllReduce(memory)  # type: ignore[arg-type]


def test_a_push_is_summed_next_and_once(tmp_path: Path) -> None:
    peer, weight = reducer(tmp_path), torch.ones(HIDDEN, dtype=torch.float16)
    pushed = peer.push(3, lambda places: None)
    x = torch.zeros(3, HIDDEN, dtype=torch.float16)
    for call in (
        lambda: peer.push(3, lambda places: None),
        lambda: peer.all_reduce_add_rms_norm(x, None, weight, EPS),
        lambda: peer.all_reduce_add_rms_norm(x, x.clone(), weight, EPS, path="two_shot"),
        lambda: peer.all_reduce_add_rms_norm(Pushed(3), None, weight, EPS),
        lambda: peer.all_reduce_add_rms_norm(pushed, x[:2], weight, EPS),
    ):
        with pytest.raises(ValueError, match=r"pushed|need"):
            call()
    other = reducer(tmp_path)
    with pytest.raises(ValueError, match="pushed"):
        other.all_reduce_add_rms_norm(pushed, None, weight, EPS)


def test_a_product_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    from nanovllm.layers.few_rows import pushed_linear

    peer = reducer(tmp_path)
    for rows, n, dtype in ((CAPACITY + 1, HIDDEN, torch.float16), (1, 48, torch.float16), (1, HIDDEN, torch.float32)):
        x, weight = torch.zeros(rows, 64, dtype=dtype), torch.zeros(n, 64, dtype=dtype)
        for config in (SMALL[0], MID[0]):
            with pytest.raises(ValueError, match="places"):
                pushed_linear(x, weight, config, peer)
    with pytest.raises(ValueError, match="whole"):
        pushed_linear(torch.zeros(1, 64), torch.zeros(HIDDEN, 64), MID[0].split(2), peer)
    assert isinstance(peer.push(1, lambda places: None), Pushed)  # what was refused has left nothing behind


def test_who_pushes(tmp_path: Path) -> None:
    """Whole products of our own kernels, where peer memory sums them in one shot."""
    peer = reducer(tmp_path, AllReduceLimits(one_shot_bytes_tp2=32 * HIDDEN * 2))
    choices = {1: SMALL[0], 8: SMALL[-1], 17: MID[0].split(2), 24: MID[0], 32: SplitConfig(2), 36: MID[1], 64: MID[1]}
    group: Any = SimpleNamespace(fused_all_reduce=lambda rows: peer if peer.path(rows) != "nccl" else None)
    assert tuning._pushes(choices, group) == {rows: (choices[rows], peer) for rows in (1, 8, 24)}
    nobody: Any = SimpleNamespace(fused_all_reduce=lambda rows: None)
    assert tuning._pushes(choices, nobody) == {}


COMPILED = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from nanovllm.kernels.base import pdl
from nanovllm.parallel.peer.all_reduce import PeerAllReduce
from nanovllm.startup.compile_server import _TargetOnly
driver.set_active(_TargetOnly(GPUTarget("cuda", 90, 32)))
pdl.supports_pdl = lambda device: True
kernels, launch = [], JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **options: kernels.append(
    launch(self, *args, grid=grid, warmup=True, **options))
from test_pushed_products import compile_all
compile_all()
for kernel in kernels:
    ptx, name = kernel.asm["ptx"], kernel.metadata.name
    assert "griddepcontrol.wait" in ptx, name
    if "mid" in name or "stream" in name:  # the others have fewer elements a thread
        assert ptx.count("st.global.v4") >= 2, name
"""


def compile_all() -> None:
    from nanovllm.layers.few_rows import pushed_linear
    from nanovllm.parallel.peer.all_reduce import PeerAllReduce

    hidden, dtype = 1024, torch.bfloat16
    layout = Layout.build(2, hidden, 2, 64, 64, 16)
    tensor = torch.zeros(2, dtype=torch.int64)
    memory: Any = SimpleNamespace(
        rank=0, world_size=2, dtype=dtype, layout=layout, limits=AllReduceLimits(), peers=tensor,
        one_shot_targets=tensor, parity=torch.zeros(3, 128, dtype=torch.int32), abort_word=tensor,
    )  # fmt: skip
    peer = PeerAllReduce(memory)
    configs = [(1, GemmConfig("fma", 8, 1024, 1)), (16, GemmConfig("tile", 16, 1024, 2))]
    configs += [(16, GemmConfig("stream", 64, 128, 3, split_k=2))]
    for rows, config in [*configs, (32, MidConfig(64, 32, 128, 4)), (64, MidConfig(32, 64, 128, 4))]:
        x, weight = torch.zeros(rows, 2048, dtype=dtype), torch.zeros(hidden, 2048, dtype=dtype)
        pushed, residual = pushed_linear(x, weight, config, peer), torch.zeros(rows, hidden, dtype=dtype)
        peer.all_reduce_add_rms_norm(pushed, residual, weight[0, :hidden], EPS, dependent=True)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_on_gpus(world_size: int, tmp_path: Path) -> None:
    """The bits of products stored locally, in 10,000 calls from graphs with ranks delayed at random."""
    check_on_gpus("bench_push.py", world_size, tmp_path, "--model", "8B", "--iterations", "10000")


def test_compiles_for_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = f"{ROOT}{os.pathsep}{Path(__file__).parent}"
    environment = {
        **os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0", "PYTHONPATH": path
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- what the processes do (this file run as a script) ----


def concurrent_rank(rank: int, world_size: int, folder: Path) -> None:
    """Each case pushed and stored locally, in either order, among other calls; ranks come late at random."""
    from nanovllm.parallel.peer import all_reduce as module

    module.MAX_PROGRAMS = 5  # several rows a program
    dtype, device = torch.float16, torch.device("cpu")
    memory = shared_memory_rank(rank, world_size, folder, dtype, layout_of(world_size))
    peer = module.PeerAllReduce(memory)  # type: ignore[arg-type]
    group: Any = SimpleNamespace(rank=rank, size=world_size, fused_all_reduce=lambda rows: peer)
    kernels: Any = None
    norm = ReduceAddNorm(HIDDEN, EPS, group, kernels, dtype, device)
    same, delays = random.Random(3), random.Random(rank)
    outputs: list[torch.Tensor] = []
    for config, rows, k in same.sample(CASES, ROUNDS):
        layer = RowParallelLinear(k * world_size, HIDDEN, group, dtype, device)
        own = torch.Generator().manual_seed(100 * len(outputs) + rank)
        layer.weight.copy_(torch.randn(HIDDEN, k, generator=own) / k**0.5)
        x = torch.randn(rows, k, generator=own).to(dtype)
        x[:, 0], layer.weight[3], layer.weight[3, 0] = -0.01, 0, 6e-8  # too small to be anything but -0.0
        shared = torch.Generator().manual_seed(len(outputs))
        residual, gain = (torch.randn(n, HIDDEN, generator=shared).to(dtype) for n in (rows, 1))
        norm.weight.copy_(gain[0])
        layer.few_rows = {rows: config}
        assert (layer(x)[:, 3].view(torch.int16) == -(2**15)).all()
        results = []
        for pushed in same.sample((True, False), 2):
            time.sleep(delays.random() * 0.03)
            layer.pushes = {rows: (config, peer)} if pushed else {}
            partial = layer(x)
            time.sleep(delays.random() * 0.03)
            assert isinstance(partial, Pushed) == pushed
            results.append(norm(partial, residual.clone() if rows % 2 else None))
            assert len(set(memory.parity[0].tolist())) == 1
            between = same.randrange(4)
            if between < 2:
                few = torch.ones(same.randint(1, CAPACITY), HIDDEN, dtype=dtype)
                path = ("one_shot", "two_shot")[between]
                normed, _ = peer.all_reduce_add_rms_norm(few, None, torch.ones(HIDDEN, dtype=dtype), 0.0, path=path)
                assert (normed == 1).all()
        for one, other in zip(*results, strict=True):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16)), (config, rows, k)
        outputs += results[0]
    assert int(memory.abort_word) == 0
    torch.save(outputs, folder / f"result{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        {"concurrent": concurrent_rank}[sys.argv[1]](int(sys.argv[4]), int(sys.argv[2]), Path(sys.argv[3]))
