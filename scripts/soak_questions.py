"""Questions of the soak run: prompts and parameters, drawn at random."""

import random
from dataclasses import replace

from soak_ledger import Question

from nanovllm import SamplingParams


class DrawnQuestions:
    """Prompts that share what they begin with or do not, and parameters of every kind."""

    def __init__(self, draw: random.Random, vocab_size: int, unit: int) -> None:
        """`unit`: tokens of a block, in which the lengths are measured."""
        self._draw, self._vocab_size, self._unit = draw, vocab_size, unit

    def tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self._vocab_size) for _ in range(count)]

    def prompt(self, shared: list[int], longest: int) -> list[int]:
        unit, kind = self._unit, self._draw.random()
        if kind < 0.3:
            return self.tokens(self._draw.randint(1, unit))
        if kind < 0.65:
            reused = shared[: self._draw.randint(1, len(shared))]
            return reused + self.tokens(self._draw.choice((0, 1, unit // 2, unit)))
        if kind < 0.9:
            return self.tokens(self._draw.randint(unit, 4 * unit))
        return self.tokens(self._draw.randint(longest // 2, longest))

    def params(self, num_tokens: int) -> SamplingParams:
        draw = self._draw
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, seed=draw.randrange(2**40))
        kind, extra = draw.random(), draw.random()
        if kind > 0.4:
            params = replace(params, temperature=draw.choice((0.7, 1.0, 1.3)))
        if kind > 0.85:
            params = replace(params, seed=None)
        if extra < 0.12:
            params = replace(params, top_k=draw.randint(2, 10))
        elif extra < 0.24:
            params = replace(params, presence_penalty=draw.choice((-0.5, 0.9)), frequency_penalty=0.3)
        elif extra < 0.36:
            params = replace(params, logprobs=2)
        return replace(params, n=2) if draw.random() < 0.1 else params


def variant(question: Question, draw: random.Random) -> SamplingParams:
    """Parameters of a question that is shorter than it was asked alone, or ends by what is drawn."""
    params = replace(question.params, max_tokens=draw.randint(1, question.params.max_tokens))
    if draw.random() < 0.5:
        params = replace(params, max_tokens=question.params.max_tokens)
    if draw.random() < 0.3:
        params = replace(params, ignore_eos=False)
    if question.answers is not None and draw.random() < 0.2:
        params = replace(params, stop_token_ids=(draw.choice(question.answers[0]),))
    return params
