"""What the front of several replicas knows of a request."""

from dataclasses import dataclass

from nanovllm.engine.sequence import Sequence


@dataclass(eq=False)
class RequestState:
    """An unfinished request, whose tokens its rows hold."""

    seqs: list[Sequence]
    num_given: int
    """Output tokens that the request came with."""
    replica: int | None = None
    to_skip: tuple[int, ...] | list[int] = ()
    """By completion: tokens that a replica computes again, after another was lost."""
    bound_at: float = 0.0
    is_aborted: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether another replica goes on behind the tokens so far; else it computes them again."""
        return len(self.seqs) == 1 and not self.seqs[0].params.sampling_mask
