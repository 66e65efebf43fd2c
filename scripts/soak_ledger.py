"""Ledger of the soak run: requests and their right answers, the weights that it swaps, and a watch on the engine."""

import os
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.engine.step import Step
from nanovllm.outputs import StepOutput

CHECK_EVERY = 7  # steps between two looks at the scheduler's integrity

NEAR_TIE = {"float32": 1e-3, "float16": 0.25, "bfloat16": 0.25}
"""Two tokens whose scores differ by less may stand for each other. In float32, sums in another order move a score by
about 1e-5. A bfloat16 logit between 4 and 8 is a multiple of 1/32, and 28 layers make that a few multiples; a token
that stems from another text is by several whole units less likely than the right one, so that it shows all the same."""
MOST_NEAR_TIES = {"float32": 0.01, "float16": 0.15, "bfloat16": 0.15}
"""Share of compared tokens at which answers may part. In bfloat16 the two best of 151,936 random logits are less than
1/32 apart, thus as good as equal, at about every tenth token."""


COUNTED = (
    "rounds",
    "requests",
    "tokens",
    "compared",
    "partings",
    "steps",
    "chunks",
    "preemptions",
    "aborts",
    "cut off",
    "weight loads",
    "across weights",
    "prompt tokens",
    "cached tokens",
    "drafted tokens",
    "of these right",
)


@dataclass
class Question:
    """A prompt and its parameters, to the greatest length, and the answer that it had alone."""

    prompt: list[int]
    params: SamplingParams
    answers: list[list[int]] | None = None
    """Token ids by completion; None where every answer is right (no seed)."""


@dataclass
class Asked:
    """A question on its way through the engine."""

    question: Question
    params: SamplingParams
    version: int
    """Version of the weights when it was asked."""
    tokens: list[list[int]]
    reasons: list[str | None]
    aborted: bool = False
    sure: list[int] | None = None
    """Set where the weights changed in between: so many tokens of each completion had come before."""


@dataclass
class Parting:
    """Place at which an answer left its reference; settled when the engine is idle."""

    asked: Asked
    index: int
    position: int
    found: int
    wanted: list[int]


class Weights:
    """Two versions of the model's weights; nothing that one computed is right under the other."""

    def __init__(self, llm: LLM) -> None:
        self._folder = None if llm.config.load_format == "dummy" else Path(llm.config.model)
        self._shapes = {weight.name: weight.shape for weight in llm.engine.executor.runner.weights.all}
        self._device = llm.config.device
        self._dtype = getattr(torch, llm.config.dtype)

    def tensors(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        if self._folder is not None:
            for path in sorted(self._folder.glob("*.safetensors")):
                for name, tensor in load_file(path).items():
                    changed = version and name.endswith(("v_proj.weight", "k_norm.weight"))
                    yield name, tensor * 0.75 if changed else tensor
            return
        for number, (name, shape) in enumerate(self._shapes.items()):
            if len(shape) == 1:
                yield name, torch.ones(shape, dtype=self._dtype, device=self._device)
                continue
            generator = torch.Generator(self._device).manual_seed(1000 * version + number)
            values = torch.empty(shape, dtype=self._dtype, device=self._device)
            yield name, values.normal_(0.0, 0.02, generator=generator)


class Ledger:
    """Requests of all threads: the question, the answer so far, and whether that is right."""

    def __init__(self, stop_ids: frozenset[int], dtype: str) -> None:
        self.lock = threading.Lock()
        self.open: dict[int, Asked] = {}
        self.ended: deque[int] = deque(maxlen=30)
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.partings: list[Parting] = []
        self._eos = stop_ids
        self._dtype = dtype

    def violation(self, text: str) -> None:
        self.violations.append(text)

    def take(self, outputs: list[StepOutput]) -> None:
        with self.lock:
            for output in outputs:
                asked = self.open.get(output.request_id)
                if asked is None or asked.reasons[output.index] is not None:
                    self.violation(f"an output after the end, or of no request: {output}")
                    continue
                asked.tokens[output.index] += output.new_token_ids
                if asked.params.logprobs is not None and output.new_token_ids and output.logprobs is None:
                    self.violation(f"request {output.request_id}: log-probabilities are missing")
                if output.finished:
                    asked.reasons[output.index] = output.finish_reason
                    if None not in asked.reasons:
                        del self.open[output.request_id]
                        self.ended.append(output.request_id)
                        self.check(asked, f"request {output.request_id}")

    def check(self, asked: Asked, name: str) -> None:
        """A finished request: lengths, reasons, and tokens as far as they are known beforehand."""
        self.counts["requests"] += 1
        self.counts["cut off"] += "abort" in asked.reasons
        self.counts["across weights"] += asked.sure is not None
        stop_ids = frozenset(asked.params.stop_token_ids) | (frozenset() if asked.params.ignore_eos else self._eos)
        for index, (tokens, reason) in enumerate(zip(asked.tokens, asked.reasons, strict=True)):
            what = f"{name}.{index} ({len(asked.question.prompt)} tokens, {asked.params})"
            self.counts["tokens"] += len(tokens)
            ends = [i for i, token in enumerate(tokens) if token in stop_ids]
            natural = (reason == "stop" and ends == [len(tokens) - 1]) or (
                reason == "length" and len(tokens) == asked.params.max_tokens and not ends
            )
            cut = reason == "abort" and asked.aborted and not ends and len(tokens) < asked.params.max_tokens
            if not natural and not cut:
                self.violation(f"{what}: {len(tokens)} tokens, finish reason {reason!r}, stop tokens at {ends}")
            if asked.question.answers is not None:
                known = len(tokens) if asked.sure is None else asked.sure[index]
                self._compare(asked, index, tokens[:known], asked.question.answers[index])

    def _compare(self, asked: Asked, index: int, tokens: list[int], answer: list[int]) -> None:
        for position, (found, wanted) in enumerate(zip(tokens, answer, strict=False)):
            self.counts["compared"] += 1
            if found != wanted:
                self.counts["partings"] += 1
                self.partings.append(Parting(asked, index, position, found, answer))
                return

    def too_many_near_ties(self) -> bool:
        return self.counts["partings"] > 3 + MOST_NEAR_TIES[self._dtype] * self.counts["compared"]


class Watch:
    """Counts what the engine does and looks at its integrity between steps."""

    def __init__(self, llm: LLM, counts: "Counter[str]") -> None:
        self._llm, self._counts = llm, counts
        engine: Any = llm.engine
        self._scheduler: Any = engine.scheduler
        self._step, self._schedule = engine.step, self._scheduler.schedule
        engine.step, self._scheduler.schedule = self.step, self.schedule

    def step(self) -> Step:
        outputs: Step = self._step()
        self._counts["steps"] += 1
        if self._counts["steps"] % CHECK_EVERY == 0:
            self._scheduler.check_integrity()
        return outputs

    def schedule(self) -> Any:
        schedule = self._schedule()
        if schedule is not None:
            self._counts["chunks"] += schedule.num_rows - schedule.num_sample_rows
        stats = self._llm.stats()
        self._counts["preemptions"] = stats.num_preemptions
        self._counts["prompt tokens"], self._counts["cached tokens"] = stats.prompt_tokens, stats.prefix_cache_hits
        self._counts["drafted tokens"] = stats.spec_decode_num_draft_tokens
        self._counts["of these right"] = stats.spec_decode_num_accepted_tokens
        return schedule


def children() -> set[int]:
    """Children of this process, zombies included; none where there is no /proc."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if f"\nPPid:\t{os.getpid()}\n" in status.read_text():
                found.add(int(status.parent.name))
        except OSError:
            continue
    return found


def resident_mib() -> float:
    """Memory of this process; 0 where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
