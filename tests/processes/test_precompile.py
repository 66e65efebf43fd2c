"""Kernels compiled by other processes: the very entries of the cache that a launch looks up, and nobody left."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import block_head
import eagle_head
import pytest
from process_checks import MARK, marked_processes, write_tiny_config
from programs import ROOT, run_forked
from system import wait_for

from nanovllm.config import EngineConfig
from nanovllm.models.published import PUBLISHED_SHAPES
from nanovllm.models.registry import parse_config
from nanovllm.startup import compile_pool as precompile
from nanovllm.startup.compile_pool import KernelCompiler, stamp_path, start_compiler
from nanovllm.startup.compile_server import CompileJob

MODEL = parse_config(PUBLISHED_SHAPES["Qwen3-0.6B"])
CONFIG = EngineConfig("Qwen3-0.6B", load_format="dummy")
NOT_THERE = CompileJob("nanovllm.kernels.pointwise.norm", "no_such_kernel", "{}", ("cuda", 90, 32))

ROUND_TRIP = """
import os, sys
from nanovllm.startup.compile_pool import KernelCompiler
compiler = KernelCompiler(2)
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from nanovllm.kernels.pointwise import activation
from nanovllm.kernels.gemm import fma
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.step import input as step_input
from nanovllm.kernels.base.compile_keys import resolve_keys
from nanovllm.startup.compile_server import _TargetOnly
from nanovllm.startup.dry_run import launching_nothing

driver.set_active(_TargetOnly(GPUTarget("cuda", 90, 32)))
resolve_keys()
gate_up, weight = torch.full((4, 256), 2.0, dtype=torch.bfloat16), torch.zeros(512, 256, dtype=torch.bfloat16)
state = step_input.DeviceState.allocate(16, 1, 4, "cpu")
buffers, step = step_input.StepBuffers.allocate(16, 64, 1, "cpu"), torch.zeros(500, dtype=torch.int32)

def work():
    step_input.apply_deltas(step, 16, state)
    for rows in (1, 2, 1):
        activation.activation(gate_up[:rows], "silu", True)
        step_input.prepare_decode(step, 16, state, 16, buffers.narrow(rows, rows))
    fma.linear(gate_up[:1].clone(), weight, GemmConfig("fma", 8, block_k=256, stages=1))

before = JITFunction.run
with launching_nothing(compiler.submit):
    work()
assert JITFunction.run is before and compiler.num_jobs == 4, compiler.num_jobs
assert compiler.wait(60), compiler.failures
compiler.close()
folder = os.environ["TRITON_CACHE_DIR"]
entries = set(os.listdir(folder))
JITFunction.run = lambda self, *args, grid, warmup, **options: before(self, *args, grid=grid, warmup=True, **options)
step_input.prepare_decode(step, 16, state, 16, buffers.narrow(16, 16))  # another order of first use than above
work()
assert set(os.listdir(folder)) == entries and len(entries) == 4, (entries, os.listdir(folder))
"""


# A CPU's runner with everything that a GPU's has: Triton's kernels and attention, GEMMs of few rows, captured shapes.
DRY_RUN = """
import collections, contextlib
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from nanovllm.attention import Selection
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.config import EngineConfig
from nanovllm.models.registry import parse_config, read_model_config
from types import SimpleNamespace
from nanovllm.kernels import select_kernels
from nanovllm.kernels.gemm import dense
from nanovllm.runner import model_runner
from nanovllm.startup.dry_run import dry_run
from nanovllm.kernels.plan.plan import choose
from nanovllm.wire.shapes import decode_buckets
from dataclasses import replace
from nanovllm.startup.compile_server import _TargetOnly
from nanovllm.runner.cuda_graphs import StepGraphs
from nanovllm.executor.resolve import resolve

driver.set_active(_TargetOnly(GPUTarget("cuda", 90, 32)))
torch.cuda.graph_pool_handle = lambda: None
linear = torch.nn.functional.linear  # of one row, for nobody looks at the values
dense.F = SimpleNamespace(linear=lambda x, weight: linear(x[:1], weight).repeat(len(x), 1))
TritonBackend.check = classmethod(lambda *_: None)
model_runner.select_backend = lambda *_, **__: Selection(TritonBackend, "")
model_runner.select_kernels = lambda device, fused, interpret: select_kernels(device, True, True)
config = EngineConfig("MODEL", load_format="dummy", device="cpu", max_num_seqs=72, skip_tokenizer_init=True)
model = read_model_config(config)
runner = model_runner.ModelRunner(resolve(config, model), model, 0, None)
runner.io.step_buffer = torch.zeros(20000, dtype=torch.int32)
runner.no_graphs_because = None
runner._new_graphs = lambda: StepGraphs(runner.work.run_padded, 72, config.max_num_batched_tokens, None)
runner.planner.adopt(replace(runner.planner.rules, own_kernels=True))
jobs, layers = [], runner.model.layers
dry_run(runner, jobs.append)
assert runner.model.layers is layers and not runner.work.captured_logits
counts = collections.Counter(job.name for job in set(jobs))
"""
# What is run before a graph is captured launches all that the graph will.
FEW_LAYERS = """
from nanovllm.startup.dry_run import launching_nothing
launched = []
with torch.inference_mode():
    runner.allocate_state(runner.state_memory.size(1))
    for narrowed in (runner.model.few_layers(), contextlib.nullcontext()):
        jobs = set()
        with launching_nothing(jobs.add), narrowed:
            for shape in runner._new_graphs().shapes:
                runner.work.run_padded(shape)
        launched.append(jobs)
assert launched[0] == launched[1] and len(launched[0]) > 20 and runner.model.layers is layers
"""
# Decode attention and rope read what prepares a step before they wait: what comes behind a kernel that does so must be
# an ordinary one, which waits for its end. Of torch's kernels, all of them ordinary, embeddings and products are seen.
BEHIND_A_STEPS_PREPARATION = """
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction
from nanovllm.kernels.plan.device import Device
from nanovllm.wire.step import dummy_step
Device.has_pdl = True
launches = []
class Ordinary(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in (torch.ops.aten.embedding.default, torch.ops.aten.linear.default, torch.ops.aten.mm.default):
            launches.append(("ordinary", False))
        return op(*args, **kwargs or {})
with torch.inference_mode(), launching_nothing(lambda job: None), runner.model.few_layers(), Ordinary():
    launch = JITFunction.run
    def run(self, *args, **options):
        name = self.__name__
        prepares = ".step." in self.fn.__module__ or name.startswith("list_")
        launches.append(("prepares" if prepares else name, bool(options.get("launch_pdl"))))
        return launch(self, *args, **options)
    JITFunction.run = run
    for shape in runner._new_graphs().shapes:
        runner.work.run_padded(shape)
    step = dummy_step(72, 144, runner.max_model_len)
    runner.launch(step)
    JITFunction.run = launch
assert {name for name, is_early in launches if is_early} >= {"decode_attention_kernel", "_qk_norm_rope_store_kernel"}
behind = [after for (name, _), after in zip(launches, launches[1:]) if name == "prepares"]
assert len(behind) > 20 and not any(is_early for _, is_early in behind), behind
"""
DENSE = DRY_RUN + FEW_LAYERS + BEHIND_A_STEPS_PREPARATION + """
single = "apply_deltas expand_rows prepare_decode qk_norm_rope_store activation norm".split()
assert set(counts) >= {f"_{name}_kernel" for name in single} | {"best_of_chunks_kernel",
    "prefill_attention_kernel", "list_tiles_kernel", "merge_chunks_kernel"}, counts
[work_list] = runner.backend.work_lists.values()
configs = {rows: work_list.config(rows) for rows in range(1, 73)}
classes = {(c.block_n, c.num_warps, c.num_stages, work_list.max_splits(c)) for c in configs.values()}
assert counts["decode_attention_kernel"] == len(classes) > 1 and counts["list_chunks_kernel"] >= len(classes), counts
products = [*runner.model.layers[0].operations, runner.model.lm_head.product]
chosen = {(one, choose(one, rows, runner.planner.rules)[0].kernel) for one in products for rows in decode_buckets(72)}
expected = {(one, kernel) for one, kernel in chosen if kernel != "library"}
assert {kernel for _, kernel in expected} == {"fma"} and counts["fma_kernel"] >= len(expected) - 2, (expected, counts)
"""


# Experts of few tokens and of many, and a sort of more tokens than one program takes.
MIXTURE = DRY_RUN + FEW_LAYERS + BEHIND_A_STEPS_PREPARATION + """
names = "_gate_up_kernel _down_kernel _route_kernel _sort_kernel".split()
assert counts["tile_kernel"] >= 2 and set(counts) >= set(names), counts
"""
# An engine whose drafts come from a head: its kernels, none of which starts early behind what prepares a drafted entry.
HEAD = DRY_RUN.replace('skip_tokenizer_init=True)', '''skip_tokenizer_init=True,
    speculative_config={"method": "eagle3", "model": "MODEL/head", "num_speculative_tokens": 3})''').replace(
    "read_model_config(config)", "with_drafter(config, read_model_config(config))").replace(
    "StepGraphs(runner.work.run_padded, 72, config.max_num_batched_tokens, None)",
    """StepGraphs(runner.work.run_padded, config.most_places, config.max_num_batched_tokens, None,
    see=runner.work.see_padded, draft=runner.work.draft_padded, max_drafting=config.most_drafting)""").replace(
    "import torch\n", "import torch\nfrom nanovllm.models.drafters import with_drafter\n") + """
from nanovllm.startup.dry_run import launching_nothing
runner.allocate_state(runner.state_memory.size(1))
assert set(counts) >= {f"_{name}_kernel" for name in "take_draws follow_rows place_drafts".split()}, counts
""" + BEHIND_A_STEPS_PREPARATION.replace("    step = dummy_step", """        runner.work.see_padded(shape)
    for rows in (1, config.most_drafting):
        runner.work.draft_padded(type(shape)(rows, 0))
    step = dummy_step""")  # fmt: skip
HEAD = HEAD.replace("72", "24")  # sequences: each drafts three tokens, so there are many more shapes
BLOCK_HEAD = HEAD.replace("eagle3", "dspark").replace("MODEL/head", "MODEL/block_head")


EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128, "num_experts_per_tok": 4,
           "moe_intermediate_size": 64}  # fmt: skip
SCRIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "what a launch looks up is compiled": (ROUND_TRIP, {}), "a dry run meets every kernel of start-up": (DENSE, {}),
    "and of a mixture of experts": (MIXTURE, EXPERTS), "and of a head that drafts": (HEAD, {}),
    "and of one that drafts blocks": (BLOCK_HEAD, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_kernels_of_a_gpu_that_need_not_be_there(name: str, tmp_path: Path) -> None:
    """In a process of its own: these tests may run under Triton's interpreter."""
    pytest.importorskip("triton")
    script, entries = SCRIPTS[name]
    shape = {"head_dim": 64, "hidden_size": 512, "num_hidden_layers": 5}
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}
    eagle_head.save(tmp_path / "model" / "head", {}, hidden_size=512, vocab_size=301, **taps)
    sizes = {"hidden_size": 512, "vocab_size": 301, "head_dim": 64, "num_target_layers": 5, "mask_token_id": 300}
    block_head.save(tmp_path / "model" / "block_head", "dspark", {}, **sizes)
    script = script.replace("MODEL", write_tiny_config(tmp_path / "model", **shape, **entries))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    run_forked(environment, script)


def test_a_job_that_fails_is_reported_and_leaves_no_stamp(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    compiler, shares = KernelCompiler(2, tmp_path / "stamp"), list[float]()
    try:
        compiler.submit(NOT_THERE)
        compiler.submit(NOT_THERE)
        assert compiler.num_jobs == 1
        assert not compiler.wait(60, shares.append) and shares == [1.0]
        assert "no_such_kernel" in compiler.failures[0]
        compiler.mark_complete()
        assert not (tmp_path / "stamp").exists()
    finally:
        compiler.close()


def test_a_dead_server_is_no_hang(tmp_path: Path) -> None:
    compiler = KernelCompiler(2, tmp_path / "stamp")
    compiler.submit(NOT_THERE)
    os.kill(compiler._process.pid, signal.SIGKILL)
    assert not compiler.wait(20)
    compiler.close()
    compiler.close()


def test_closing_ends_the_processes(mark: str) -> None:
    compiler = KernelCompiler(2)
    wait_for(lambda: marked_processes(mark) != [], "process")  # one, and its children where it has got on
    compiler.close()
    assert marked_processes(mark) == []


def test_processes_end_with_their_parent(mark: str) -> None:
    """Killed outright, in the middle of the imports."""
    code = "from nanovllm.startup.compile_pool import KernelCompiler; c = KernelCompiler(2); print(flush=True); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, MARK: mark}
    )
    assert parent.stdin and parent.stdout
    parent.stdout.readline()
    wait_for(lambda: len(marked_processes(mark)) > 1, "processes")
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    wait_for(lambda: marked_processes(mark) == [], "end of the processes")


def _flat() -> Callable[..., object]:
    return lambda score, *_: score


def test_stamp_stands_for_build_options_and_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    stamp = stamp_path(CONFIG, MODEL)
    assert stamp.parent == tmp_path
    assert stamp_path(replace(CONFIG, seed=3, tokenizer="elsewhere"), MODEL) == stamp
    for option in ({"trace": "/tmp/x"}, {"max_queued_requests": 5}, {"revision": "main"}, {"data_parallel_size": 2}):
        assert stamp_path(replace(CONFIG, **option), MODEL) == stamp
    one, other = (stamp_path(replace(CONFIG, attention_backend="flex", score_mod=_flat()), MODEL) for _ in range(2))
    assert one == other != stamp, "a function made anew is the same one"
    assert stamp_path(replace(CONFIG, max_num_seqs=64), MODEL) != stamp
    assert stamp_path(CONFIG, replace(MODEL, hidden_size=2048)) != stamp
    monkeypatch.setattr(precompile, "_device_names", lambda: ["Model: another"])
    assert stamp_path(CONFIG, MODEL) != stamp


def test_a_user_without_a_home_has_the_cache_that_triton_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry in /etc/passwd."""
    for name in ("HOME", "TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert stamp_path(CONFIG, MODEL).parent == Path("~/.triton/cache")


def test_nothing_is_started_where_there_is_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(precompile, "KernelCompiler", lambda count, stamp: started.append(count))
    monkeypatch.setattr(precompile, "_DEVICE_FILES", (str(tmp_path),))
    monkeypatch.setattr(precompile, "process_count", lambda cores: 2)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    start_compiler(CONFIG, MODEL)
    assert started == [2]
    start_compiler(replace(CONFIG, device="cpu"), MODEL)
    start_compiler(replace(CONFIG, disable=("parallel_compile",)), MODEL)
    start_compiler(replace(CONFIG, disable=("fused_kernels",)), MODEL)
    stamp_path(CONFIG, MODEL).touch()
    start_compiler(CONFIG, MODEL)
    monkeypatch.setattr(precompile, "_DEVICE_FILES", (str(tmp_path / "none"),))
    start_compiler(replace(CONFIG, max_num_seqs=8), MODEL)
    assert started == [2]
