"""A request of a fleet on its way: what it has gained so far, on whichever engines."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Flight:
    """A request that has not ended."""

    request_id: int
    prompt: bytes
    """int32 token ids."""
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

    @property
    def n(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt) // 4

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
