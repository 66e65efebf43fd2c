"""Request of a fleet in flight: its output so far, from whichever engines."""

from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.prompt import Prompt
from nanovllm.engine.version_spans import VersionStarts, note_version, version_spans
from nanovllm.sampling_params import SamplingParams, wrap_seed

NO_BOUND = 1 << 40
_OF_WHOLE = ("n", "prompt_logprobs", "prompt_logprob_start")
"""Fields of SamplingParams that are about all completions of a request."""


@dataclass(eq=False, slots=True)
class Completion:
    """A completion of a request: its output so far."""

    tokens: list[int]
    versions: VersionStarts = field(default_factory=list)
    """Versions of the weights that its tokens come from."""
    has_ended: bool = False
    num_engines: int = 0
    """Number of times that it was sent to an engine."""

    def note_version(self, version: int) -> None:
        """Notes that its next tokens come from weights of this version."""
        note_version(self.versions, version, len(self.tokens))

    def spans(self) -> list[tuple[int, int, int]]:
        """See CompletionOutput.weight_versions."""
        return version_spans(self.versions, len(self.tokens))


@dataclass(eq=False, slots=True)
class Flight:
    """An unfinished request, or a part of one: a completion that continues on another engine."""

    request_id: int
    """Id of the request."""
    row: int
    """Row of its first completion, and its id for engines."""
    prompt: Prompt
    params: dict[str, Any]
    """See wire.Add.params."""
    completions: list[Completion]
    engine: int | None = None
    """Engine that computes it; None while it waits."""
    is_aborted: bool = False
    num_losses: int = 0
    """Engines that were lost in a row while they computed it, without a new token."""
    num_tokens_before: int = 0
    """Number of output tokens at the last loss."""

    def note_loss(self) -> int:
        """Notes that its engine is lost; returns num_losses."""
        self.engine, count = None, self.num_tokens
        self.num_losses = 0 if count > self.num_tokens_before else self.num_losses + 1
        self.num_tokens_before = count
        return self.num_losses

    @property
    def n(self) -> int:
        return len(self.completions)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all completions."""
        return sum(len(each.tokens) for each in self.completions)

    @property
    def known(self) -> list[int]:
        """Output tokens that an engine is to continue. Several completions begin anew: those that have begun are
        parts."""
        return self.completions[0].tokens if self.n == 1 else []

    @property
    def most_tokens(self) -> int:
        """See SamplingParams.most_tokens."""
        return NO_BOUND if (most := self.params.get("max_tokens", SamplingParams.max_tokens)) is None else most

    def split(self) -> list["Flight"]:
        """Splits a request of several completions, of which any has begun, into those that have not ended. Each goes
        on as it would have gone on among the others, since seeds go up with rows. The first brings what is asked about
        the prompt. Returns itself if there is nothing to split."""
        if self.n == 1 or not any(each.has_ended or each.tokens for each in self.completions):
            return [self]
        own = {name: value for name, value in self.params.items() if name not in _OF_WHOLE}
        of_prompt = {name: value for name, value in self.params.items() if name in _OF_WHOLE[1:]}
        found: list[Flight] = []
        for index, completion in enumerate(self.completions):
            if completion.has_ended:
                continue
            params = own if found else own | of_prompt
            if (seed := params.get("seed")) is not None:
                params = {**params, "seed": wrap_seed(seed + index)}
            part = Flight(self.request_id, self.row + index, self.prompt, params, [completion])
            part.num_losses, part.num_tokens_before = self.num_losses, part.num_tokens
            found.append(part)
        return found
