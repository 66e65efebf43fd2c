"""`nanovllm plan` against engines on this GPU, with dummy weights: the blocks within one in a hundred.

Every term is printed as planned and as seen (pytest -s), so that one run shows which of them an estimate misses.
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


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_those_of_an_engine(name: str, measured: dict[str, list[int]]) -> None:
    options = {**MODELS[name], "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda"}
    config = EngineConfig(name.partition(" ")[0], **options)
    model, device = read_model_config(config), Device.of(torch.device("cuda", 0))
    planned = plan_rank(settle(config, model, device.capability), model, Gpu(device, torch.cuda.mem_get_info()[1]))
    with LLM(config.model, **options) as llm:
        engine: Any = llm.engine
        info, runner = llm.engine_info(), engine.executor.runner
        weights, crowded = weight_bytes(runner.weights.all), runner.memory.crowded
        buffers = sum(
            tensor.nbytes
            for owner in (runner.work.state, runner.work.buffers)
            for tensor in vars(owner).values()
            if isinstance(tensor, torch.Tensor)
        )
    seen = {name: info[f"{name}_gib"] * GIB for name in ("step", "graphs", "filters", "libraries", "taken")}
    blocks, reserved = info["num_kvcache_blocks"], seen["step"] + seen["graphs"] + seen["filters"]
    kv_bytes = blocks * planned.block_bytes
    used = planned.share - reserved - kv_bytes
    rows = {
        "weights": (planned.weights, weights), "used": (planned.used, used),
        "libraries": (planned.libraries, seen["libraries"]),
        **{name: (nbytes, seen[name]) for name, nbytes in planned.reserved.items()},
        "graphs taken": (planned.reserved["graphs"], info.get("graphs_taken_gib", 0) * GIB),
        "KV": (planned.blocks * planned.block_bytes, kv_bytes),
    }  # fmt: skip
    print(f"\n{name}: blocks {planned.blocks:,} {blocks:,} ({planned.blocks / blocks - 1:+.2%}); MiB planned, seen")
    for term, (mine, engines) in rows.items():
        apart = mine - engines
        sizes = f"{mine / MIB:11,.1f} {engines / MIB:11,.1f} {apart / MIB:+9,.1f}"
        print(f"  {term:13} {sizes} {apart / kv_bytes:+.2%} of KV")
    parts = {key: [round(nbytes / MIB, 1) for nbytes in found] for key, found in measured.items()}
    attention, graphs = info["attention_backend"], info["cuda_graphs"]
    print(f"  {parts}, {graphs} graphs, {buffers / MIB:.1f} of buffers, {planned.block_bytes} a block, {attention}")
    assert not crowded, crowded
    assert planned.weights == weights
    assert planned.blocks == pytest.approx(blocks, rel=0.01)
