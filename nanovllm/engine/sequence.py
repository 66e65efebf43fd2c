"""One request as a row of tokens, some computed and some not."""

from enum import Enum, auto
from typing import TYPE_CHECKING

from nanovllm.outputs import RequestMetrics
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.sampling.row import SamplingRow


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """A request's tokens, lengths, blocks and slot.

        0 ......... num_cached_tokens ...... num_computed_tokens ...... num_tokens ..... num_total_tokens
        | KV found in the prefix | KV computed by a step that | known to the | sampled on the device, |
        | cache at admission     | has been launched          | host         | not yet read by us     |

    `num_computed_tokens` advances when a step is scheduled, not when it ends: everything on the device happens in the
    order of launches, so what a launched step writes is there for every later one.
    """

    __slots__ = (
        "arrival", "block_table", "epoch", "finish_reason", "index", "is_stale", "last_token_on_device",
        "max_total_tokens", "may_stop", "metrics", "needs_last_token", "num_cached_tokens", "num_computed_tokens",
        "num_hashed_blocks", "num_inflight_tokens", "num_prompt_cached_tokens", "num_prompt_tokens", "num_tokens",
        "params", "parent_hash", "parent_id", "request_id", "sampling", "seed", "slot", "status", "stop_reason",
        "stop_token_ids", "token_ids", "version_starts",
    )  # fmt: skip

    def __init__(
        self, request_id: int, prompt_token_ids: list[int], params: SamplingParams, *, seed: int,
        stop_token_ids: frozenset[int], max_total_tokens: int, metrics: RequestMetrics, parent_id: int | None = None,
        index: int = 0, sampling: "SamplingRow | None" = None, output_token_ids: list[int] | None = None,
    ) -> None:  # fmt: skip
        """`output_token_ids`: the output's first tokens, where it goes on from others."""
        self.request_id = request_id
        """This row's own number; rows of a batch may come in another order."""
        self.arrival: int | None = None
        """The scheduler's number for it, in order of arrival; None until it is queued."""
        self.parent_id = request_id if parent_id is None else parent_id
        """The request whose completion `index` this is."""
        self.index = index
        self.sampling = sampling
        """What greedy and temperature leave out; None for most."""
        self.needs_last_token = sampling is not None and sampling.needs_last_token
        """Whether the row waits for each token to reach the host before it goes on."""
        self.stop_reason: int | str | None = None
        self.token_ids = [*prompt_token_ids, *(output_token_ids or ())]
        self.params = params
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        """Token ids that end the output; empty where they are to be ignored."""
        self.may_stop = bool(stop_token_ids) or (sampling is not None and sampling.watches)
        """Whether anything but its length ends the output."""
        self.max_total_tokens = max_total_tokens
        """Prompt and output together end at this length."""
        self.metrics = metrics
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None

        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = len(self.token_ids)
        self.num_inflight_tokens = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_prompt_cached_tokens: int | None = None
        """num_cached_tokens of the first admission: what a preemption finds later is the request's own work."""

        self.slot = -1
        self.last_token_on_device = False
        """Whether this slot's last sampled token is the row's next input: then the row decodes without host data."""
        self.block_table: list[int] = []
        self.num_hashed_blocks = 0
        """Leading blocks of the table that are known to the prefix cache."""
        self.parent_hash = b""
        """Chained hash of those blocks."""
        self.epoch = 0
        """Counts the times that the blocks were given back: results of a step from an earlier epoch own no blocks."""
        self.is_stale = False
        """Whether blocks hold KV of former weights: then none of them is shared."""
        self.version_starts: list[tuple[int, int]] = []
        """Versions of the weights that the output's tokens come from, and the first token of each."""

    @property
    def num_total_tokens(self) -> int:
        """Tokens of the row, those not yet read from the device included."""
        return self.num_tokens + self.num_inflight_tokens

    @property
    def num_tokens_to_compute(self) -> int:
        return self.num_tokens + self.num_inflight_tokens - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def note_version(self, version: int) -> None:
        """Tokens from here on come from weights of this version."""
        start = self.num_tokens - self.num_prompt_tokens
        if self.version_starts and self.version_starts[-1][1] == start:
            self.version_starts.pop()
        self.version_starts.append((version, start))

    @property
    def weight_versions(self) -> list[tuple[int, int, int]]:
        """See CompletionOutput.weight_versions."""
        end = self.num_tokens - self.num_prompt_tokens
        ends = [*(start for _, start in self.version_starts[1:]), end]
        return [(v, start, end) for (v, start), end in zip(self.version_starts, ends, strict=True) if end > start]

    def append(self, token_id: int) -> None:
        """A sampled token has arrived from the device."""
        self.num_inflight_tokens -= 1
        self.token_ids.append(token_id)
        self.num_tokens += 1

    def drop_output(self) -> None:
        """For max_tokens=0: forgets the token that came with computing the prompt."""
        del self.token_ids[self.num_prompt_tokens :]
        self.num_tokens = self.num_prompt_tokens

    def check(self) -> None:
        """Asserts the order of the lengths in the drawing."""
        assert 0 <= self.num_cached_tokens <= self.num_computed_tokens <= self.num_total_tokens, self
        assert self.num_prompt_tokens <= self.num_tokens == len(self.token_ids), self
        assert self.num_inflight_tokens >= 0, self

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}, {self.status.name}, slot {self.slot}, cached {self.num_cached_tokens} <= "
            f"computed {self.num_computed_tokens} <= total {self.num_tokens}+{self.num_inflight_tokens})"
        )
