"""How many kernels, matrix products and collectives a step takes: exact, per layer and around the layers.

Counted on the CPU path, which makes the GPU path's calls with the twins in place of the kernels. (A GPU needs fewer: a
graph of decodes alone begins with one prepare_decode, peer memory sums inside add_rms_norm, few rows are fused more.)
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from process_checks import GREEDY, tiny_llm, write_tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM, SamplingParams

FEW, MANY = 2, 5
"""Layers of the two models whose difference is what a layer takes."""
PER_LAYER = {"matrix products": 4, "norms": 2, "qk_norm_rope_store": 1, "silu_mul": 1, "attention": 1}
AROUND = {
    "matrix products": 1,  # the head
    "norms": 1,
    "apply_deltas": 1,
    "expand_rows": 1,
    "attention prepared": 1,
}
PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "mv", "addmv", "dot")}


class ProductCounter(TorchDispatchMode):
    """Counts matrix products, whoever asks for them."""

    def __init__(self, counts: "Counter[str]") -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in PRODUCTS:
            self._counts["matrix products"] += 1
        return func(*args, **(kwargs or {}))


class CountedGroup:
    """Stands before a process group."""

    def __init__(self, group: Any, counts: "Counter[str]") -> None:
        self._group, self._counts = group, counts

    def __getattr__(self, name: str) -> Any:
        if name.startswith("all") or name in ("broadcast", "barrier", "reduce", "reduce_scatter", "send", "recv"):
            self._counts["collectives"] += 1
        return getattr(self._group, name)


class Counted:
    """Rank 0's calls by step, in order."""

    def __init__(self, llm: LLM) -> None:
        self.steps: list[Counter[str]] = []
        self.shapes: list[tuple[int, ...]] = []
        """Rows, decode rows, rows that draw, of each step."""
        self._counts: Counter[str] = Counter()
        runner = llm.engine.executor.runner
        for field in fields(runner.kernels):
            if field.name != "fused":
                name = "norms" if field.name.endswith("rms_norm") else field.name
                function = getattr(runner.kernels, field.name)
                object.__setattr__(runner.kernels, field.name, self._counting(name, function))
        backend: Any = runner.backend
        backend.forward = self._counting("attention", backend.forward)
        backend.prepare = self._counting("attention prepared", backend.prepare)
        if runner.group.size > 1:
            runner.group._group = CountedGroup(runner.group._group, self._counts)
        self._launch = runner.launch
        runner.launch = self.launch  # type: ignore[method-assign]

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._counts[name] += 1
            return function(*args, **kwargs)

        return counted

    def launch(self, packed: Any) -> None:
        self._counts.clear()
        with ProductCounter(self._counts):
            self._launch(packed)
        self.steps.append(Counter(self._counts))
        self.shapes.append(tuple(packed[:3].tolist()))


@contextmanager
def counted_engine(folder: Path, layers: int, ranks: int) -> Iterator[tuple[LLM, Counted]]:
    model = write_tiny_config(folder / f"{layers}", num_hidden_layers=layers)
    options = {"max_num_batched_tokens": 32, "max_num_prefill_tokens_with_decodes": 16}
    with tiny_llm(model, tensor_parallel_size=ranks, **options) as llm:
        yield llm, Counted(llm)


def expected(layers: int, ranks: int, draws: bool) -> dict[str, int]:
    counts = Counter({name: count * layers for name, count in PER_LAYER.items()}) + Counter(AROUND)
    if ranks > 1:
        counts["embed_shard"] = 1
        counts["collectives"] = 2 * layers + 1 + draws  # the embedding's, and the winners'
    if not draws:
        counts["matrix products"] -= 1
    elif ranks == 1:
        counts["sample_tokens"] = 1
    else:
        counts["gumbel_argmax"] = counts["commit_tokens"] = 1
    return dict(counts)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layers", [FEW, MANY])
def test_calls_of_every_step(tmp_path: Path, layers: int, ranks: int) -> None:
    """Whatever the step holds: one row or several, decodes, prompts, or pieces of prompts that draw nothing."""
    drawn = SamplingParams(temperature=0.8, max_tokens=8, seed=1, ignore_eos=True)
    with counted_engine(tmp_path, layers, ranks) as (llm, counted):
        llm.generate([[5] * 70], GREEDY, use_tqdm=False)  # longer than a step
        llm.generate([[6] * 9, [7] * 70, [8] * 100, [9] * 3], [GREEDY, drawn, GREEDY, drawn], use_tqdm=False)
    kinds = set()
    for counts, (rows, decodes, draws) in zip(counted.steps, counted.shapes, strict=True):
        assert dict(counts) == expected(layers, ranks, draws > 0), (rows, decodes, draws)
        kinds.add((decodes > 0, rows > decodes, draws > 0))
    assert {(True, False, True), (True, True, True), (False, True, False)} <= kinds


def test_general_rows_add_calls_around_the_layers_only(tmp_path: Path) -> None:
    """However many rows have filters and penalties, each of their kernels runs once, and no layer notices."""
    general = SamplingParams(temperature=0.9, top_p=0.8, frequency_penalty=0.5, logprobs=2, seed=3, max_tokens=4)
    with counted_engine(tmp_path, FEW, 1) as (llm, counted):
        llm.generate([[5] * 3] * 6, [GREEDY, *[general] * 5], use_tqdm=False)
    usual = expected(FEW, 1, draws=True)
    for counts in counted.steps[:3]:
        more = {name: count - usual.get(name, 0) for name, count in counts.items() if count != usual.get(name, 0)}
        assert set(more) <= {"edit_logits", "draw_filtered", "token_logprobs"}
        assert max(more.values()) == 1
