"""General rows of a captured step: found behind its padding, with the logits that the step has left behind."""

from typing import Any

import pytest
import torch
from serving import Engines
from test_seeds import OPTIONS, run

from nanovllm import LLM
from nanovllm.worker import model_runner
from nanovllm.worker.cuda_graphs import CHUNK_BUCKETS, MAX_CHUNK_ROWS, StepShape


class OwnedLogits:
    """LogitsView for a CPU, where no pool keeps the memory."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def tensor(self) -> torch.Tensor:
        return self._logits


class FakeGraphs:
    """Stands for StepGraphs: replays by running the padded step."""

    def __init__(self, llm: LLM) -> None:
        self._runner = llm.engine.executor.runner
        self.shapes: set[StepShape] = set()

    def shape_for(self, decode_rows: int, chunk_rows: int, chunk_tokens: int) -> StepShape | None:
        if chunk_rows > MAX_CHUNK_ROWS:
            return None
        bucket = next(size for size in (0, *CHUNK_BUCKETS) if size >= chunk_tokens)
        return StepShape(decode_rows + 3 if chunk_rows else decode_rows + 2, bucket)

    def replay(self, shape: StepShape) -> None:
        self.shapes.add(shape)
        self._runner._run_padded(shape)

    def clear(self) -> None:
        pass


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24}], ids=["whole", "chunked"])
def test_the_same_tokens_behind_padding(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    llm = engines.get(**options)
    everyone = list(range(len(OPTIONS)))
    exact = run(llm, everyone)
    llm.engine.scheduler.block_manager.forget_cached()
    runner = llm.engine.executor.runner
    upload = runner.io.upload

    def keep(packed: Any) -> torch.Tensor:
        runner.io.step_buffer = upload(packed)
        return runner.io.step_buffer

    graphs = FakeGraphs(llm)
    monkeypatch.setattr(model_runner, "LogitsView", OwnedLogits)
    monkeypatch.setattr(runner.io, "upload", keep)
    monkeypatch.setattr(runner, "graphs", graphs)
    assert run(llm, everyone) == exact
    assert any(shape.chunk_tokens for shape in graphs.shapes) and any(not shape.chunk_tokens for shape in graphs.shapes)
