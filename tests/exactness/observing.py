"""Observers of an engine that serves: the logits that it draws from, and the kinds of step that it takes."""

from dataclasses import dataclass, field
from typing import Any

import torch

from nanovllm import LLM
from nanovllm.engine.schedule import Schedule
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.sampling.rng import gumbel_noise_reference, random_words_reference, row_key_reference


class LogitRecorder:
    """Keeps rank 0's logits of every sampled token; needs eager steps, and one rank to see the whole vocabulary."""

    def __init__(self, llm: LLM) -> None:
        self._scheduler, self._runner = llm.engine.scheduler, llm.engine.executor.runner
        self._logits: dict[tuple[int, int], torch.Tensor] = {}
        self._head = self._runner.model.logits
        self._runner.model.logits = self._record

    def _record(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._head(hidden)
        request_of_slot = {seq.slot: seq.request_id for seq in self._scheduler.running}
        slots = self._runner.work.buffers.row_slot[: len(logits)].tolist()
        positions = self._runner.work.buffers.sample_positions[: len(logits)].tolist()
        for slot, position, row in zip(slots, positions, logits.float().cpu(), strict=True):
            if slot in request_of_slot:  # not in the warm-up, nor padding
                self._logits[request_of_slot[slot], position] = row.clone()
        return logits

    def of(self, request_id: int, prompt_length: int, count: int) -> torch.Tensor:
        """float32 [count, vocab_size] on the CPU: what a request's first `count` output tokens were drawn from."""
        return torch.stack([self._logits[request_id, prompt_length + i] for i in range(count)])


def draw_scores(logits: torch.Tensor, first_position: int, temperature: float, seed: int) -> torch.Tensor:
    """[n, vocab] like `logits`: what the drawn tokens are the largest of; row i draws the token at first_position + i
    of its request."""
    if not temperature:
        return logits
    positions = torch.arange(first_position, first_position + len(logits)).unsqueeze(1)
    k0, k1 = row_key_reference(torch.full_like(positions, seed), positions)
    words = random_words_reference(k0, k1, torch.arange(logits.shape[1]))
    return logits / temperature + gumbel_noise_reference(words)


def margins(logits: torch.Tensor, first_position: int, temperature: float, seed: int) -> list[float]:
    """Lead of each drawn token's score over the second."""
    best = draw_scores(logits, first_position, temperature, seed).topk(2).values
    return (best[:, 0] - best[:, 1]).tolist()


@dataclass
class StepWitness:
    """Counts what was scheduled, so that a test of chunks or preemption knows that there were any."""

    num_partial_chunks: int = 0
    num_rows_after_preemption: int = 0
    most_rows: int = 0
    _begun: set[Sequence] = field(default_factory=set)

    def watch(self, llm: LLM) -> "StepWitness":
        choose = llm.engine.scheduler.schedule

        def watched() -> Schedule | None:
            schedule = choose()
            if schedule is not None:
                self._note(schedule)
            return schedule

        scheduler: Any = llm.engine.scheduler
        scheduler.schedule = watched
        return self

    def _note(self, schedule: Schedule) -> None:
        self.num_partial_chunks += schedule.num_rows - schedule.num_sample_rows
        self.num_rows_after_preemption += sum(seq in self._begun for seq in schedule.new_slots)
        self._begun.update(schedule.new_slots)
        self.most_rows = max(self.most_rows, schedule.num_rows)
