"""What the front of several replicas knows of a request."""

import time
from array import array
from dataclasses import dataclass, replace

from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

Sent = tuple[int, bytes, SamplingParams, list[int]]
"""A request as a replica gets it: id, prompt as int32 token ids, options, the tokens that the output begins with."""


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

    def bind(self, replica: int) -> Sent:
        """To be sent to that replica."""
        self.replica, self.bound_at = replica, time.perf_counter()
        first = self.seqs[0]
        known = first.output_token_ids if self.goes_on else first.output_token_ids[: self.num_given]
        self.to_skip = [seq.num_output_tokens - len(known) for seq in self.seqs]
        params, most = first.params, first.max_total_tokens - first.num_prompt_tokens
        if most < params.most_tokens:  # the replica's KV cache may hold more than that of others
            params = replace(params, max_tokens=most, min_tokens=min(most, params.min_tokens))
        return first.request_id, array("i", first.token_ids[: first.num_prompt_tokens]).tobytes(), params, known
