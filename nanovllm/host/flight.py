"""A request of a fleet on its way: what it has gained so far, on whichever engines."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.prompt import Prompt
from nanovllm.host import wire

ENDED = 1 << 60
"""Tokens to leave out of a completion that has ended."""


@dataclass(eq=False, slots=True)
class Flight:
    """A request that has not ended."""

    request_id: int
    prompt: Prompt
    params: dict[str, Any]
    num_known: int
    """Output tokens that the request came with."""
    tokens: list[list[int]]
    """Output tokens so far of each completion."""
    versions: list[list[tuple[int, int]]]
    """Versions of the weights, and the first token of each, for each completion."""
    ended: set[int] = field(default_factory=set)
    """Numbers of the completions that have ended."""
    engine: int | None = None
    num_engines: int = 0
    """Engines that it was sent to so far."""
    is_aborted: bool = False
    num_losses: int = 0
    """Engines that were lost with it one after the other, without a new token."""
    num_tokens_before: int = 0
    """Output tokens when the last one was lost."""

    def note_loss(self) -> int:
        """Notes that its engine is lost; returns num_losses."""
        self.engine, count = None, sum(map(len, self.tokens))
        self.num_losses = 0 if count > self.num_tokens_before else self.num_losses + 1
        self.num_tokens_before = count
        return self.num_losses

    @property
    def n(self) -> int:
        return len(self.tokens)

    @property
    def goes_on(self) -> bool:
        """Whether another engine goes on behind the tokens so far; else it computes them again."""
        return self.n == 1 and not self.params.get("sampling_mask")

    def note_version(self, index: int, version: int) -> None:
        """Tokens of a completion from here on come from weights of this version."""
        starts, start = self.versions[index], len(self.tokens[index])
        if starts and starts[-1][1] == start:
            starts.pop()
        if not starts or starts[-1][0] != version:
            starts.append((version, start))

    def spans(self, index: int) -> list[tuple[int, int, int]]:
        """See CompletionOutput.weight_versions."""
        starts = self.versions[index]
        ends = [*(start for _, start in starts[1:]), len(self.tokens[index])][: len(starts)]
        return [(version, start, end) for (version, start), end in zip(starts, ends, strict=True) if end > start]


def without_known(step: wire.Step, skips: dict[int, int]) -> wire.Step:
    """A step without the tokens that were there before their request's first engine was lost. `skips`: tokens to leave
    out of each row, which it counts down."""
    known = Counter[int]()
    """Tokens left out of each row."""
    found = wire.Step([], [], done=step.done, prompts=step.prompts, stats=step.stats)
    for row, token in zip(step.rows, step.tokens, strict=True):
        if (count := skips.get(row)) is None:
            found.rows.append(row)
            found.tokens.append(token)
            continue
        known[row] += 1
        if count == 1:
            del skips[row]
        else:
            skips[row] = count - 1
    for end in step.finishes:
        if (count := skips.pop(end.row, None)) is not None:
            known[end.row] += end.token is not None
            if count > ENDED // 2:
                continue
            end.token = None  # it ends with a token that is known
        found.finishes.append(end)
    for row, line in step.logprobs:  # the first lines of a row are those of the tokens that are left out
        if known[row]:
            known[row] -= 1
        else:
            found.logprobs.append((row, line))
    return found
