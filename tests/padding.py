"""Stands for captured CUDA graphs on a CPU: replays by running the padded step that a graph would have captured."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from nanovllm import LLM
from nanovllm.runner import step_work
from nanovllm.runner.cuda_graphs import Run, StepGraphs, StepShape


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
        work, sizes = runner.work, (config.most_places, config.max_num_batched_tokens)
        drafting = (work.see_padded, work.draft_padded, config.most_drafting) if work.drafter is not None else ()
        super().__init__(
            work.run_padded, *sizes, no_stream, lambda: None, lambda _: nullcontext(), *drafting,  # type: ignore[arg-type]
            adapters=config.enable_lora,
        )
        self.used: set[StepShape] = set()
        upload = runner.io.upload

        def keep(packed: Any) -> torch.Tensor:
            runner.io.step_buffer = upload(packed)
            return runner.io.step_buffer

        monkeypatch.setattr(step_work, "LogitsView", OwnedLogits)
        monkeypatch.setattr(runner.io, "upload", keep)
        monkeypatch.setattr(runner, "graphs", self)

    def _replay(self, run: Run, shape: StepShape) -> None:
        if run == self._run:
            self.used.add(shape)
        run(shape)
