"""`nanovllm plan` against engines on this GPU, with dummy weights: the blocks within one in a hundred.

A table of all models is printed at the end, and with pytest -s every term of each as planned and as seen. The bound is
of the KV cache: on a GPU of 80 GB little is left for it beside the 57 GiB of Qwen3-30B-A3B.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.executor.resolve import settle
from nanovllm.kernels.plan.device import Device
from nanovllm.models.registry import read_model_config
from nanovllm.runner.memory_plan import Gpu, plan_rank, weight_bytes
from nanovllm.runner.memory_probe import GIB, MIB, MemoryProbe

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {}, "Qwen3-8B": {}, "Qwen3-8B in fp8": {"quantization": "fp8"}, "Qwen3-30B-A3B": {}, "Gemma-2-9B": {},
    "gpt-oss-20b": {}, "Qwen3-0.6B of 64": {"max_num_seqs": 64, "max_num_batched_tokens": 2048},
    "Qwen3-8B without graphs": {"enforce_eager": True}, "Qwen3-8B with fp8 KV": {"kv_cache_dtype": "fp8"},
}  # fmt: skip


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[int]]]:
    """Bytes that an engine's start measures: the step's peak of what torch allocated, and of each graph that it
    tries what it takes in all and in torch's allocator."""
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

    monkeypatch.setattr(MemoryProbe, "begin_step", begin_step)
    monkeypatch.setattr(MemoryProbe, "end_step", end_step)
    monkeypatch.setattr(MemoryProbe, "growth", growth)
    yield found


@pytest.fixture(scope="module")
def summary(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Lines of all models, printed together at the end."""
    lines: list[str] = []
    yield lines
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", f"{'':24} {'blocks planned':>14} {'seen':>10} {'apart':>8}   widest miss", *lines, sep="\n")


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_those_of_an_engine(name: str, measured: dict[str, list[int]], summary: list[str]) -> None:
    options = {**MODELS[name], "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda"}
    config = EngineConfig(name.partition(" ")[0], **options)
    model, device = read_model_config(config), Device.of(torch.device("cuda", 0))
    planned = plan_rank(settle(config, model, device.capability), model, Gpu(device, torch.cuda.mem_get_info()[1]))
    with LLM(config.model, **options) as llm:
        engine: Any = llm.engine
        info, runner = llm.engine_info(), engine.executor.runner
        weights, crowded = weight_bytes(runner.weights.all), runner.memory.crowded
    seen = {name: info[f"{name}_gib"] * GIB for name in ("step", "graphs", "filters", "libraries", "taken")}
    blocks, reserved = info["num_kvcache_blocks"], seen["step"] + seen["graphs"] + seen["filters"]
    kv_bytes = blocks * planned.block_bytes
    used = planned.share - reserved - kv_bytes
    terms = {
        "weights": (planned.weights, weights),
        "all but weights": (planned.used - planned.weights, used - weights),
        "of it libraries": (planned.libraries, seen["libraries"]),
        **{term: (nbytes, seen[term]) for term, nbytes in planned.reserved.items()},
        "KV cache": (planned.blocks * planned.block_bytes, kv_bytes),
    }  # fmt: skip
    apart = planned.blocks / blocks - 1
    print(f"\n{name}, {info['attention_backend']}, {info['cuda_graphs']} graphs, {planned.block_bytes:,} bytes a block")
    print(f"  {'MiB':15} {'planned':>11} {'seen':>11} {'apart':>9}   of KV")
    for term, (mine, engines) in terms.items():
        sizes = f"{mine / MIB:11,.1f} {engines / MIB:11,.1f} {(mine - engines) / MIB:+9,.1f}"
        print(f"  {term:15} {sizes}  {(mine - engines) / kv_bytes:+.2%}")
    for term, found in measured.items():
        print(f"  {term.replace('_', ' '):15} {', '.join(f'{nbytes / MIB:,.1f}' for nbytes in found)}")
    print(f"  {'graphs in the end':15} {info.get('graphs_taken_gib', 0) * GIB / MIB:,.1f}")
    missed = max(list(terms)[:-1], key=lambda term: abs(terms[term][0] - terms[term][1]))
    by = (terms[missed][0] - terms[missed][1]) / MIB
    summary.append(f"{name:24} {planned.blocks:14,} {blocks:10,} {apart:+8.2%}   {missed} {by:+,.1f} MiB")
    assert not crowded, crowded
    assert planned.weights == weights
    assert abs(apart) <= 0.01
