"""Footprints against engines on this GPU, with dummy weights: the blocks within one in a hundred.

A table of all models is printed at the end, and with pytest -s every term of each as predicted and as seen. Each engine
starts in a process of its own: in one that has had an engine the kernels and libraries are there already.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.executor.resolve import settle
from nanovllm.kernels.plan.device import Device
from nanovllm.models.registry import read_model_config
from nanovllm.runner.footprint import Gpu, footprint_of, weight_bytes
from nanovllm.runner.memory_probe import GIB, MIB, MemoryProbe

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {}, "Qwen3-8B": {}, "Qwen3-8B in fp8": {"quantization": "fp8"}, "Qwen3-30B-A3B": {}, "Gemma-2-9B": {},
    "gpt-oss-20b": {}, "Qwen3-0.6B of 64": {"max_num_seqs": 64, "max_num_batched_tokens": 2048},
    "Qwen3-8B without graphs": {"enforce_eager": True}, "Qwen3-8B with fp8 KV": {"kv_cache_dtype": "fp8"},
}  # fmt: skip


@dataclass
class Seen:
    """Figures that were predicted for an engine, and those that its start found."""

    predicted_blocks: int
    blocks: int
    terms: dict[str, tuple[int, int]]
    """Bytes as predicted and as found."""
    engine: str
    measured: dict[str, list[int]]
    """Bytes that the start measured: see `recorded`."""
    crowded: str


def recorded() -> dict[str, list[int]]:
    """Bytes that engines' starts measure from here on: the step's peak of what torch allocated, and of each graph that
    they try what it takes in all and in torch's allocator."""
    found: dict[str, list[int]] = {"step_allocated": [], "graph": [], "graph_in_torch": []}
    begin, end, grow = MemoryProbe.begin_step, MemoryProbe.end_step, MemoryProbe.growth

    def begin_step(probe: MemoryProbe) -> None:
        begin(probe)
        found["step_allocated"].append(-torch.cuda.memory_allocated())

    def end_step(probe: MemoryProbe) -> int:
        found["step_allocated"][-1] += torch.cuda.max_memory_allocated()
        return end(probe)

    def growth(probe: MemoryProbe, work: Callable[[], object], usual: int) -> int:
        before = torch.cuda.memory_reserved()
        found["graph"].append(grow(probe, work, usual))
        found["graph_in_torch"].append(torch.cuda.memory_reserved() - before)
        return found["graph"][-1]

    MemoryProbe.begin_step, MemoryProbe.end_step = begin_step, end_step  # type: ignore[method-assign]
    MemoryProbe.growth = growth  # type: ignore[method-assign]
    return found


def start_engine(name: str) -> Seen:
    """Predicts what an engine of one of MODELS takes, and starts it."""
    measured = recorded()
    options = {**MODELS[name], "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda"}
    config = EngineConfig(name.partition(" ")[0], **options)
    model, device = read_model_config(config), Device.of(torch.device("cuda", 0))
    gpu = Gpu(device, torch.cuda.mem_get_info()[1])
    predicted = footprint_of(settle(config, model, device.capability), model, gpu)
    with LLM(config.model, **options) as llm:
        engine: Any = llm.engine
        info, runner = llm.engine_info(), engine.executor.runner
        weights, crowded = weight_bytes(runner.weights.all), runner.memory.crowded
    seen = {name: int(info[f"{name}_gib"] * GIB) for name in ("step", "graphs", "filters", "libraries")}
    blocks, reserved = info["num_kvcache_blocks"], seen["step"] + seen["graphs"] + seen["filters"]
    kv_bytes = blocks * predicted.block_bytes
    used = predicted.share - reserved - kv_bytes
    terms = {
        "weights": (predicted.weights, weights),
        "all but weights": (predicted.used - predicted.weights, used - weights),
        "of it libraries": (predicted.libraries, seen["libraries"]),
        **{term: (nbytes, seen[term]) for term, nbytes in predicted.reserved.items()},
        "KV cache": (predicted.blocks * predicted.block_bytes, kv_bytes),
    }  # fmt: skip
    measured["graphs_in_the_end"] = [int(info.get("graphs_taken_gib", 0) * GIB)]
    text = f"{info['attention_backend']}, {info['cuda_graphs']} graphs, {predicted.block_bytes:,} bytes a block"
    return Seen(predicted.blocks, blocks, terms, text, measured, crowded)


@pytest.fixture(scope="module")
def summary(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Lines of all models, printed together at the end."""
    lines: list[str] = []
    yield lines
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", f"{'':24} {'blocks predicted':>16} {'seen':>10} {'apart':>8}   widest miss", *lines, sep="\n")


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_those_of_an_engine(name: str, summary: list[str]) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        seen = processes.submit(start_engine, name).result(timeout=240)
    terms, apart = seen.terms, seen.predicted_blocks / seen.blocks - 1
    print(f"\n{name}, {seen.engine}")
    print(f"  {'MiB':17} {'predicted':>11} {'seen':>11} {'apart':>9}   of KV")
    for term, (mine, engines) in terms.items():
        sizes = f"{mine / MIB:11,.1f} {engines / MIB:11,.1f} {(mine - engines) / MIB:+9,.1f}"
        print(f"  {term:17} {sizes}  {(mine - engines) / terms['KV cache'][1]:+.2%}")
    for term, found in seen.measured.items():
        print(f"  {term.replace('_', ' '):17} {', '.join(f'{nbytes / MIB:,.1f}' for nbytes in found)}")
    missed = max(list(terms)[:-1], key=lambda term: abs(terms[term][0] - terms[term][1]))
    by = (terms[missed][0] - terms[missed][1]) / MIB
    summary.append(f"{name:24} {seen.predicted_blocks:16,} {seen.blocks:10,} {apart:+8.2%}   {missed} {by:+,.1f} MiB")
    assert not seen.crowded, seen.crowded
    assert terms["weights"][0] == terms["weights"][1]
    assert abs(apart) <= 0.01
