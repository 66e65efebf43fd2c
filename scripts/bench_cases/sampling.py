"""Sampling kernels over the logits of all rows, by option. For the engine: bench.py --sampling-options."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench_cases.harness import Line, Point, Setup, compare
from nanovllm.kernels import Kernels, select_kernels
from nanovllm.kernels.sampling.gumbel import Draws
from nanovllm.kernels.sampling.logprobs import Scored
from nanovllm.kernels.sampling.rows import Rows as OptionRows
from nanovllm.wire.sampling import EDIT_WORDS, RECORD

FILTERS = {
    "top_p 0.9": (0, 0.9, -math.inf),
    "top_k 50": (50, 1.0, -math.inf),
    "top_k 50, top_p 0.9": (50, 0.9, -math.inf),
    "min_p 0.05": (0, 1.0, math.log(0.05)),
}
"""Option -> top_k, top_p, log of min_p."""


class Rows:
    """All rows of a step with the same options. Inputs: logits [rows, vocabulary], several sets of them."""

    def __init__(self, setup: Setup, kernels: Kernels, num_rows: int) -> None:
        self.kernels, device = kernels, setup.device
        self.vocab_size = 1000 if setup.dry else setup.model.vocab_size
        self.nbytes = num_rows * self.vocab_size * setup.dtype.itemsize
        self.logits = [setup.randn(num_rows, self.vocab_size, seed=n) for n in range(setup.sets(self.nbytes))]
        self.slots = torch.arange(num_rows, dtype=torch.int32, device=device)
        self.temperature = torch.full((num_rows,), 0.6, device=device)
        self.seed = torch.arange(num_rows, dtype=torch.int64, device=device)
        self.last_token = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.counts = torch.zeros(num_rows, self.vocab_size, dtype=torch.int32, device=device)

    def sample(self, index: int) -> torch.Tensor:
        """Gumbel-max over the whole vocabulary: tokens int32 [rows]."""
        return self._sample(index, self.temperature)

    def greedy(self, index: int) -> torch.Tensor:
        return self._sample(index, torch.zeros_like(self.temperature))

    def _sample(self, index: int, temperature: torch.Tensor) -> torch.Tensor:
        draws = Draws(self.slots, temperature, self.seed, self.slots)
        return self.kernels.sample_tokens(self.logits[index], draws, self.vocab_size, self.last_token)

    def filtered(self, records: torch.Tensor, index: int) -> torch.Tensor:
        """Tokens int32 [rows] from what the filters keep."""
        rows = self.general(records, index)
        self.kernels.sample_filtered(rows, has_winner=False)
        return rows.tokens

    def penalised(self, records: torch.Tensor, index: int) -> torch.Tensor:
        """Logits float32 [rows, vocabulary]."""
        edits = torch.empty(0, EDIT_WORDS, dtype=torch.int32, device=self.slots.device)
        return self.kernels.edit_logits(self.general(records, index), self.counts, None, edits)

    def general(self, records: torch.Tensor, index: int) -> OptionRows:
        """All rows as general ones."""
        own = (self.logits[index], self.slots, self.slots, records, self.slots, self.temperature, self.seed)
        tokens = torch.zeros_like(self.slots)
        return OptionRows(*own, self.slots, self.slots, tokens, self.last_token, self.vocab_size)

    def logprobs(self, index: int) -> torch.Tensor:
        """int32 [rows, 13]: token, rank, five likeliest ids; bits of log-probabilities."""
        scored = Scored(self.logits[index], self.slots, self.slots, self.slots)
        found = self.kernels.token_logprobs(scored, 5, self.vocab_size)
        return found[:, :7]


def sampling(setup: Setup) -> Iterator[Line]:
    ours = select_kernels(setup.device, interpret=setup.dry)
    twins = select_kernels(setup.device, fused=False)
    for num_rows in setup.rows((256,)):
        for option in ("temperature", "greedy", *FILTERS, "penalties", "logprobs 5"):
            rows = Rows(setup, ours, num_rows)
            contenders = {"kernel": call(rows, option)}
            if setup.options.check_only:
                rows.kernels = twins
                contenders = {"reference": call(rows, option), "kernel": call(Rows(setup, ours, num_rows), option)}
            limit = setup.limit_us(rows.nbytes)
            labels = {"rows": num_rows, "option": option}
            # Rounding decides a near tie now and then: a token that differs is no mistake, many are.
            yield compare(setup, Point(labels, contenders, len(rows.logits), limit, tolerance=0.2))


def call(rows: Rows, option: str) -> Callable[[int], torch.Tensor]:
    if option in FILTERS:
        return partial(rows.filtered, records(rows, *FILTERS[option]))
    if option == "penalties":
        return partial(rows.penalised, records(rows, 0, 1.0, -math.inf, presence=0.5, repetition=1.1))
    return {"temperature": rows.sample, "greedy": rows.greedy, "logprobs 5": rows.logprobs}[option]


def records(
    rows: Rows, top_k: int, top_p: float, log_min_p: float, presence: float = 0.0, repetition: float = 1.0
) -> torch.Tensor:
    """int32 [rows, words]: the packed options of every row."""
    packed = RECORD.pack(0, top_k, top_p, log_min_p, presence, 0.0, repetition)
    one = torch.frombuffer(bytearray(packed), dtype=torch.int32).to(rows.slots.device)
    return one.expand(len(rows.slots), -1).contiguous()
