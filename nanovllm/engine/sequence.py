"""One request as a row of tokens, some computed and some not."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from nanovllm.engine.block_pool import Page
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.step import Done, Finish
from nanovllm.engine.version_spans import VersionStarts, note_version, version_spans
from nanovllm.outputs import RequestMetrics
from nanovllm.sampling_params import SamplingParams
from nanovllm.wire.step import NO_LINE, SlotConstants

if TYPE_CHECKING:
    import numpy as np

    from nanovllm.engine.sampling.row import SamplingRow


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class RowPages:
    """Memory of a row; RowMemory alone writes it."""

    pages: list[list[Page | None]] = field(default_factory=list)
    """Pages by group of layers and block of tokens; None: the group needs that block no more."""
    num_held_blocks: int = 0
    """Number of blocks of all these pages."""
    num_reserved_tokens: int = 0
    """Number of tokens for which every group has pages."""
    line: int = NO_LINE
    """Line of memory of fixed size (engine/lines.py) that the row writes in its next step; LinePool writes both."""
    read_line: int = NO_LINE
    """Line that it reads there; NO_LINE: zeros."""
    keep_line: int = NO_LINE
    """Line that gets the state after `keep_at` tokens in the step that passes these, where steps verify drafts."""
    keep_at: int = -1
    has_passed: bool = False
    """Whether that state is there."""


@dataclass(slots=True, eq=False)
class RowPrefix:
    """Blocks that a row may share with others; PrefixCache alone writes it."""

    keys: list[bytes] = field(default_factory=list)
    """Keys of the row's first blocks, as far as they were needed."""
    matched: list[list[Page]] = field(default_factory=list)
    """Pages that the last look-up in the prefix cache found for the row's first blocks, by group without a window. Kept
    while the row waits."""
    matched_at: int = -1
    """The cache's generation (PrefixCache) when `matched` was found."""
    num_published: int = 0
    """Number of leading blocks that need not be published: the prefix cache has them, or must not have them."""
    has_entries: bool = True
    """Whether a model that drafts has taken in all tokens computed so far, those of shared blocks too; Schedule.enter
    writes it as well."""
    keeps_states: bool = True
    """Whether what layers of fixed size remember may be shared: nothing of it is older than the cache's contents."""
    num_cached: int = 0
    """Number of leading blocks whose pages were cached when the row was looked up last, with a state after them or
    not."""
    saved_key: bytes | None = None
    """Key of the block after which the row's state was saved last while it decoded (LinePool)."""


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """A request's tokens, lengths, memory and slot.

        0 ......... num_cached_tokens ...... num_computed_tokens ...... num_tokens ..... num_total_tokens
        | KV found in the prefix | KV computed by a step that | known to the | sampled on the device, |
        | cache at admission     | has been launched          | host         | not yet read by us     |

    `num_computed_tokens` advances when a step is scheduled, not when it ends: everything on the device happens in the
    order of launches, so what a launched step writes is there for every later one.

    A step may bring a row that decodes several tokens, one for each of its places, and only the device knows how many
    until they are read. Computed and total are then the most that they can be: memory is kept for these. What has left
    a window, and whether the row has ended, goes by the least (`num_least_tokens`): each step in flight brings one at
    least.
    """

    request_id: int
    """Id of the request of which this is completion `index`."""
    prompt: Prompt
    params: SamplingParams
    _: KW_ONLY
    constants: SlotConstants
    stop_token_ids: frozenset[int]
    """Token ids that end the output."""
    max_total_tokens: int
    """Maximum tokens of prompt and output together."""
    metrics: RequestMetrics
    index: int = 0
    siblings: list["Sequence"] = field(default_factory=list)
    """All rows of the request, this one among them."""
    reported_stop_ids: frozenset[int] = frozenset()
    """Ids of stop_token_ids that are reported as stop_reason; ends of text are not."""
    sampling: "SamplingRow | None" = None
    """Sampling beyond greedy and temperature; None for most rows."""
    known_ids: InitVar[Iterable[int]] = ()
    """Token ids that the output begins with."""

    number: int = field(init=False)
    """Id of this row alone: a request has as many ids as completions (RequestBook.reserve_ids)."""
    token_ids: list[int] = field(init=False)
    """Token ids of prompt and output; the row's own list."""
    num_prompt_tokens: int = field(init=False)
    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)
    arrival: int = field(default=-1, init=False)
    """Number by order of arrival at the scheduler; -1 until the row is queued."""
    ending: Finish | None = field(default=None, init=False)
    needs_last_token: bool = field(init=False)
    """Whether the row waits for each token to reach the host before it goes on."""
    may_stop: bool = field(init=False)
    """Whether anything but its length may end the output."""
    num_tokens: int = field(init=False)
    num_inflight_tokens: int = field(default=0, init=False)
    """Maximum tokens that launched steps bring whose tokens are not read yet."""
    num_inflight_drafts: int = field(default=0, init=False)
    """Number of these that may not come: all but one of each step."""
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    num_prompt_cached_tokens: int | None = field(default=None, init=False)
    """Prompt tokens cached at the first admission: what a preemption finds later is the request's own work."""
    slot: int = field(default=-1, init=False)
    adapter_slot: int = field(default=-1, init=False)
    """Slot of the running row's adapter (AdapterSlots); -1: it has none."""
    last_token_on_device: bool = field(default=False, init=False)
    """Whether this slot's last sampled token is the row's next input: then the row decodes without host data."""
    memory: RowPages = field(default_factory=RowPages, init=False)
    prefix: RowPrefix = field(default_factory=RowPrefix, init=False)
    pooled: "np.ndarray | None" = field(default=None, init=False)
    """Final hidden state of the last token, float32 [hidden], of a model of embeddings."""
    version_starts: VersionStarts = field(default_factory=list, init=False)
    """Versions of the weights that the output's tokens come from."""

    def __post_init__(self, known_ids: Iterable[int]) -> None:
        self.number = self.request_id + self.index
        self.token_ids = [*self.prompt.token_ids, *known_ids]
        self.num_prompt_tokens, self.num_tokens = len(self.prompt.token_ids), len(self.token_ids)
        self.needs_last_token = self.sampling is not None and self.sampling.needs_last_token
        self.may_stop = bool(self.stop_token_ids) or (self.sampling is not None and self.sampling.watches)

    @property
    def num_total_tokens(self) -> int:
        """Maximum tokens of the row, those not yet read from the device included."""
        return self.num_tokens + self.num_inflight_tokens

    @property
    def num_least_tokens(self) -> int:
        """Minimum tokens of the row, unless it has ended."""
        return self.num_tokens + self.num_inflight_tokens - self.num_inflight_drafts

    @property
    def num_least_computed(self) -> int:
        """Minimum tokens whose keys and values are there when the next step begins."""
        return min(self.num_computed_tokens, self.num_least_tokens - 1)

    @property
    def num_tokens_to_compute(self) -> int:
        return self.num_tokens + self.num_inflight_tokens - self.num_computed_tokens

    def next_end(self, places: int) -> int:
        """End of what the row may compute in its next step, of so many places: before the last token of all, which
        needs no KV."""
        return min(self.num_computed_tokens + places, self.max_total_tokens - 1)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known to the host."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def note_version(self, version: int) -> None:
        """Tokens from here on come from weights of this version."""
        note_version(self.version_starts, version, self.num_output_tokens)

    @property
    def weight_versions(self) -> list[tuple[int, int, int]]:
        """See CompletionOutput.weight_versions."""
        return version_spans(self.version_starts, self.num_output_tokens)

    def note_gained(self, num_tokens: int, places: int) -> None:
        """Notes that a step of so many places has brought `num_tokens` tokens and no more: its bound no longer
        counts."""
        self.num_inflight_tokens -= places - num_tokens
        self.num_inflight_drafts -= places - 1
        if self.last_token_on_device:
            self.num_computed_tokens = min(self.num_computed_tokens, self.num_total_tokens - 1)

    def end(self, reason: str, why: int | str | None = None) -> None:
        """Ends the output. `reason`, `why`: see Finish. Whether it ends with a token, the loop knows."""
        if reason == "stop" and why is None and self.token_ids[-1] in self.reported_stop_ids:
            why = self.token_ids[-1]
        if reason == "length" and self.params.max_tokens == 0:
            del self.token_ids[self.num_prompt_tokens :]  # the token that came with computing the prompt
            self.num_tokens = self.num_prompt_tokens
        self.status = SequenceStatus.FINISHED
        versions = self.weight_versions if any(version for version, _ in self.version_starts) else []
        pooled = None if self.pooled is None else self.pooled.tobytes()
        self.ending = Finish(self.number, None, reason, why, versions, pooled)

    @property
    def done(self) -> Done | None:
        """End of the request; None while a row of it has not been reported as ended."""
        if any(each.metrics.finished_time is None for each in self.siblings):
            return None
        first = self.siblings[0]
        metrics = first.metrics
        end = metrics.finished_time
        assert end is not None
        begin, token = metrics.first_scheduled_time or end, metrics.first_token_time or end
        cached = first.num_prompt_cached_tokens or 0
        return Done(self.request_id, cached, begin - metrics.arrival_time, token - begin, end - token)

    def check(self) -> None:
        """Asserts the order of the lengths in the drawing."""
        assert 0 <= self.num_cached_tokens <= self.num_computed_tokens <= self.num_total_tokens, self
        assert self.num_prompt_tokens <= self.num_tokens == len(self.token_ids), self
        assert self.num_inflight_tokens >= 0, self

    def __repr__(self) -> str:
        return (
            f"Sequence({self.number}, {self.status.name}, slot {self.slot}, cached {self.num_cached_tokens} <= "
            f"computed {self.num_computed_tokens} <= total {self.num_tokens}+{self.num_inflight_tokens})"
        )
