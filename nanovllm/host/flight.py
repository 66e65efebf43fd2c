"""Request of a fleet in flight: its output so far, from whichever engines."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.prompt import Prompt
from nanovllm.engine.version_spans import VersionStarts, note_version, version_spans
from nanovllm.host import wire
from nanovllm.sampling_params import SamplingParams

NO_BOUND = 1 << 40
ENDED = 1 << 60
"""Number of tokens to drop for a completion that has ended: all of them."""


@dataclass(eq=False, slots=True)
class Flight:
    """An unfinished request."""

    request_id: int
    prompt: Prompt
    params: dict[str, Any]
    num_given: int
    """Number of output tokens that were given with the request."""
    tokens: list[list[int]]
    """Output tokens of each completion so far."""
    versions: list[VersionStarts]
    """Versions of the weights that the tokens of each completion come from."""
    ended: set[int] = field(default_factory=set)
    """Indices of the completions that have ended."""
    engine: int | None = None
    """Engine that computes it; None while it waits."""
    num_engines: int = 0
    """Number of times that it was sent to an engine."""
    is_aborted: bool = False
    num_losses: int = 0
    """Engines that were lost in a row while they computed it, without a new token."""
    num_tokens_before: int = 0
    """Number of output tokens at the last loss."""

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
    def most_tokens(self) -> int:
        """See SamplingParams.most_tokens."""
        return NO_BOUND if (most := self.params.get("max_tokens", SamplingParams.max_tokens)) is None else most

    @property
    def can_continue(self) -> bool:
        """Whether another engine can continue after the tokens so far; else it computes them again."""
        return self.n == 1 and not self.params.get("sampling_mask")

    def note_version(self, index: int, version: int) -> None:
        """Notes that the next tokens of a completion come from weights of this version."""
        note_version(self.versions[index], version, len(self.tokens[index]))

    def spans(self, index: int) -> list[tuple[int, int, int]]:
        """See CompletionOutput.weight_versions."""
        return version_spans(self.versions[index], len(self.tokens[index]))


def without_repeated(step: wire.Step, skips: dict[int, int]) -> wire.Step:
    """Drops tokens that a request had before its engine was lost, and that another one has computed again. `skips`:
    number of tokens to drop for each row, which is counted down."""
    dropped = Counter[int]()
    """Number of tokens dropped for each row."""
    found = wire.Step([], [], done=step.done, prompts=step.prompts, stats=step.stats)
    for row, token in zip(step.rows, step.tokens, strict=True):
        if (count := skips.get(row)) is None:
            found.rows.append(row)
            found.tokens.append(token)
            continue
        dropped[row] += 1
        if count == 1:
            del skips[row]
        else:
            skips[row] = count - 1
    for end in step.finishes:
        if (count := skips.pop(end.row, None)) is not None:
            dropped[end.row] += end.token is not None
            if count > ENDED // 2:
                continue
            end.token = None  # its last token was there before
        found.finishes.append(end)
    for row, line in step.logprobs:  # the first lines of a row are those of its dropped tokens
        if dropped[row]:
            dropped[row] -= 1
        else:
            found.logprobs.append((row, line))
    return found
