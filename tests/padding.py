"""Stands for captured CUDA graphs on a CPU: replays by running the padded step that a graph would have captured."""

from typing import Any

import pytest
import torch

from nanovllm import LLM
from nanovllm.runner import step_work
from nanovllm.runner.cuda_graphs import StepGraphs, StepShape


class OwnedLogits:
    """LogitsView for a CPU, where no pool keeps the memory."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def tensor(self) -> torch.Tensor:
        return self._logits


class PaddedSteps(StepGraphs):
    """Every step of the padded shape that the engine chooses for it."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """Takes the place of the graphs of `llm`, whose only rank is on a CPU, until the test ends."""
        runner, config, no_stream = llm.engine.executor.runner, llm.config, None
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        super().__init__(runner.work.run_padded, config.most_places, config.max_num_batched_tokens, no_stream)  # type: ignore[arg-type]
        self.used: set[StepShape] = set()
        upload = runner.io.upload

        def keep(packed: Any) -> torch.Tensor:
            runner.io.step_buffer = upload(packed)
            return runner.io.step_buffer

        monkeypatch.setattr(step_work, "LogitsView", OwnedLogits)
        monkeypatch.setattr(runner.io, "upload", keep)
        monkeypatch.setattr(runner, "graphs", self)

    def replay(self, shape: StepShape) -> None:
        self.used.add(shape)
        self._run(shape)
