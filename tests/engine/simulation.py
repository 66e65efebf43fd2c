"""A scheduler and a fake device, run as the engine runs them, with every documented limit checked at each step."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fake_device import FakeDevice, extend_digest, next_token

from nanovllm.config import EngineConfig
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.sampling.row import Ended
from nanovllm.engine.schedule import Schedule
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.outputs import RequestMetrics
from nanovllm.sampling_params import SamplingParams
from nanovllm.speculative import most_places
from nanovllm.wire.shapes import TILE
from nanovllm.wire.state import PageGroup, StateSize, table_width
from nanovllm.wire.step import SlotConstants, most_block_updates, packed_capacity


class Watcher:
    """A row's `sampling` that ends the output after two tokens in a row: as a stop string, or as a grammar would, which
    lets the row go on only when the host knows what it has."""

    num_prompt_logprobs_missing, prompt_logprob_rows = 0, None
    watches = True

    def __init__(self, last_two: tuple[int, int], is_grammar: bool) -> None:
        self.last_two, self.needs_last_token = last_two, is_grammar

    def accept(self, token_ids: list[int], num_output_tokens: int) -> Ended | None:
        is_end = num_output_tokens > 1 and tuple(token_ids[-2:]) == self.last_two
        return Ended("stop", "the two") if is_end else None


def make_sequence(
    request_id: int, prompt: list[int], max_tokens: int = 4, *, stop: frozenset[int] = frozenset(), seed: int = 0,
    capacity: int = 10**9, temperature: float = 0.0, watcher: Watcher | None = None, salt: str | None = None,
    known_ids: tuple[int, ...] = (), adapter: str | None = None,
) -> Sequence:  # fmt: skip
    return Sequence(
        request_id,
        Prompt.of(prompt, salt, adapter),
        SamplingParams(max_tokens=max_tokens),
        constants=SlotConstants(temperature, seed),
        stop_token_ids=stop,
        max_total_tokens=min(len(prompt) + max_tokens, capacity + 1),  # the last token needs no KV
        metrics=RequestMetrics(arrival_time=0.0),
        sampling=watcher,  # type: ignore[arg-type]
        known_ids=known_ids,
    )


@dataclass
class Request:
    """A request and the text it gets when nobody else is there."""

    seq: Sequence
    prompt: list[int]
    gained: list[int] = field(default_factory=list)
    aborted: bool = False
    _text: list[int] = field(default_factory=list)
    _digest: int = 0

    def text_alone(self, length: int) -> list[int]:
        """The first `length` tokens of prompt and continuation, ends of text ignored."""
        while len(self._text) < length:
            at = len(self._text)
            token = self.prompt[at] if at < len(self.prompt) else next_token(self._digest, self.seq.constants.seed)
            self._text.append(token)
            self._digest = extend_digest(self._digest, token)
        return self._text[:length]

    def output_alone(self) -> tuple[list[int], str]:
        """The output and the reason of its end."""
        output = self.text_alone(self.seq.max_total_tokens)[len(self.prompt) :]
        for index, token in enumerate(output):
            watcher = self.seq.sampling
            if token in self.seq.stop_token_ids or (watcher and watcher.accept(output[: index + 1], index + 1)):
                return output[: index + 1], "stop"
        return output, "length"


class Simulation:
    """`depth` steps may be launched whose results the scheduler has not seen: 2 as in the engine, 1 without overlap."""

    def __init__(
        self, *, num_blocks: int = 64, block_size: int = 4, depth: int = 2, tokens_per_step: int = 1,
        gain: Callable[[int], int] | None = None, groups: tuple[PageGroup, ...] = (PageGroup(),), num_lines: int = 0,
        **options: object,
    ) -> None:  # fmt: skip
        """`gain`, `groups`, `num_lines`: see FakeDevice."""
        self.config = EngineConfig.from_options("model", **{"max_model_len": 1 << 16, **options})
        self.size = StateSize(num_blocks, block_size, groups, num_lines=num_lines)
        self.scheduler = Scheduler(self.config, self.size, tokens_per_step=tokens_per_step)
        width = table_width(1 << 16, block_size, self.size.num_tables)
        self.device = FakeDevice(self.config.max_num_seqs, num_blocks, block_size, gain, groups, width, num_lines)
        self.depth = depth
        self.pipeline: deque[tuple[Schedule, list[int]]] = deque()
        self.requests: dict[int, Request] = {}
        self.num_preemptions = 0
        self.begun: set[Sequence] = set()
        """Rows that were admitted once."""

    def add(self, prompt: list[int], max_tokens: int = 4, stop: frozenset[int] = frozenset(), **more: Any) -> Request:
        """`more`: see make_sequence."""
        capacity = self.scheduler.capacity_tokens
        seq = make_sequence(len(self.requests), prompt, max_tokens, stop=stop, capacity=capacity, **more)
        self.requests[seq.request_id] = Request(seq, list(prompt))
        self.scheduler.add(seq)
        return self.requests[seq.request_id]

    def abort(self, request: Request) -> None:
        was_live = request.seq.status is not SequenceStatus.FINISHED
        self.scheduler.abort(request.seq)
        if was_live:
            request.aborted = True
            assert request.seq.ending.reason == "abort"
        self.check()

    def replace_weights(self) -> None:
        self.scheduler.preempt_all()
        self.device.load_weights()
        self.check()

    # -- steps --------------------------------------------------------------------------------------------------

    def launch(self) -> Schedule | None:
        """Schedules a step, checks it, and lets the device run it; its results wait for collect()."""
        assert len(self.pipeline) < self.depth
        running_before = [*self.scheduler.running]
        waiting_before = self._with_status(SequenceStatus.WAITING)
        schedule = self.scheduler.schedule()
        self.check()
        self._check_preempted(running_before, schedule)
        if schedule is None:
            # Nothing can go on: then it is results that are missing, or everything has ended.
            assert self.pipeline or not self.scheduler.has_unfinished(), "deadlock"
            return None
        self._check_limits(schedule, waiting_before)
        self._check_order_of_admission(schedule)
        self._check_shared(schedule)
        tokens, nodes = self.device.execute(schedule.pack(self.config.max_num_seqs))
        for row, (seq, node) in enumerate(zip(schedule.seqs, nodes, strict=True)):
            start, count = schedule.starts[row], schedule.counts[row]
            length = self.device.num_computed[seq.slot]
            expected = self.requests[seq.request_id].text_alone(length)
            assert self.device.text(node) == expected, f"{seq} computed another text"
            constants = self.device.temperature[seq.slot], self.device.seed[seq.slot]
            assert constants == (np.float32(seq.constants.temperature), seq.constants.seed)
            assert length <= start + count and (length == start + count or row < schedule.num_old_rows)
            assert length >= seq.num_least_computed - 1 or length == seq.max_total_tokens - 1
        self.pipeline.append((schedule, tokens))
        return schedule

    def collect(self) -> list[tuple[Sequence, int]]:
        """Gives the oldest launched step's tokens to the scheduler."""
        schedule, tokens = self.pipeline.popleft()
        gained = self.scheduler.apply(schedule, tokens)
        for seq, token in gained:
            request = self.requests[seq.request_id]
            assert not request.aborted, "a token arrives after an abort"
            request.gained.append(token)
        for seq in {seq for seq, _ in gained}:
            self._check_outcome(self.requests[seq.request_id])
        self.check()
        return gained

    def step(self) -> Schedule | None:
        """One turn of the engine's loop."""
        if len(self.pipeline) == self.depth:
            self.collect()
        schedule = self.launch()
        if self.pipeline and (schedule is None or len(self.pipeline) == self.depth):
            self.collect()
        return schedule

    def drain(self) -> None:
        while self.pipeline:
            self.collect()

    def run_to_end(self) -> int:
        """Steps until everything has finished; a generous bound on their number stands for "never"."""
        live = self._with_status(SequenceStatus.WAITING, SequenceStatus.RUNNING)
        bound = 20 + 4 * sum(seq.max_total_tokens for seq in live) * max(1, len(live))
        steps = 0
        while self.scheduler.has_unfinished() or self.pipeline:
            self.step()
            steps += 1
            assert steps <= bound, f"not finished after {bound} steps"
        for request in self.requests.values():
            assert request.seq.status is SequenceStatus.FINISHED
            self._check_outcome(request)
        assert self.scheduler.memory.num_free_blocks == self.scheduler.memory.num_blocks
        assert self.scheduler.waiting.num_tokens == 0
        return steps

    # -- what always holds --------------------------------------------------------------------------------------

    def check(self) -> None:
        self.scheduler.check_integrity()
        for seq in self._with_status(SequenceStatus.WAITING):
            assert seq.num_computed_tokens == seq.num_cached_tokens == 0
        for seq in self.scheduler.running:
            assert seq.memory.num_reserved_tokens >= seq.num_computed_tokens

    def _with_status(self, *statuses: SequenceStatus) -> list[Sequence]:
        return [request.seq for request in self.requests.values() if request.seq.status in statuses]

    def _check_outcome(self, request: Request) -> None:
        """A prefix of what the request gets alone while it runs or was aborted, all of it once finished."""
        seq, (expected, reason) = request.seq, request.output_alone()
        assert seq.output_token_ids == request.gained == expected[: len(request.gained)]
        if seq.status is SequenceStatus.FINISHED and not request.aborted:
            assert (request.gained, seq.ending and seq.ending.reason) == (expected, reason)
        elif seq.status is not SequenceStatus.FINISHED:
            assert len(request.gained) < len(expected), f"{seq} goes on past its end"

    def _check_preempted(self, running_before: list[Sequence], schedule: Schedule | None) -> None:
        """Only the newest rows give their blocks back, and never the oldest: somebody always gets on."""
        again = schedule.new_slots if schedule is not None else []
        kept = [seq.status is SequenceStatus.RUNNING and seq not in again for seq in running_before]
        assert kept == sorted(kept, reverse=True)
        assert kept[:1] != [False]
        assert all(seq.status is not SequenceStatus.FINISHED for seq in running_before)
        self.num_preemptions += kept.count(False)

    def _check_limits(self, schedule: Schedule, waiting_before: list[Sequence]) -> None:
        config = self.config
        assert len(schedule.block_updates) <= 3 * most_block_updates(self.size, config.max_num_seqs)
        capacity = packed_capacity(self.size, config.max_num_seqs, config.max_num_batched_tokens)
        assert len(schedule.pack(config.max_num_seqs)) <= capacity
        num_tokens = sum(schedule.counts) + (schedule.places - 1) * schedule.num_decode_rows
        assert 0 < schedule.num_tokens == num_tokens <= config.max_num_batched_tokens
        assert schedule.num_rows <= config.max_num_seqs
        num_places = schedule.num_rows + (schedule.places - 1) * schedule.num_decode_rows
        assert num_places <= most_places(config.max_num_seqs, self.scheduler.drafting.tokens_per_step)
        assert len(set(schedule.seqs)) == schedule.num_rows
        assert len(self.scheduler.running) <= config.max_num_seqs
        if schedule.num_old_rows:
            cap = config.max_num_prefill_tokens_with_decodes
            if cap is None:
                cap = min(4096, max(1024, sum(seq.num_total_tokens for seq in [*waiting_before, *schedule.seqs]) // 8))
                cap += TILE // 2  # chunks and decodes fill whole tiles
            assert schedule.num_prefill_tokens <= cap
        assert schedule.num_decode_rows <= schedule.num_sample_rows <= schedule.num_rows
        for row, (seq, start, count) in enumerate(zip(schedule.seqs, schedule.starts, schedule.counts, strict=True)):
            assert start + count == seq.num_computed_tokens <= seq.num_total_tokens
            assert seq.last_token_on_device == (row < schedule.num_sample_rows)
            if row < schedule.num_sample_rows:  # computed all there was, and gained what nobody has seen yet
                assert seq.num_least_tokens - 1 <= start + count <= seq.num_total_tokens - 1
            assert count == 1 or row >= schedule.num_decode_rows
            assert start + count < seq.max_total_tokens >= seq.num_least_tokens, "sampled past the end"
        half_computed = [seq for seq in self.scheduler.running if not seq.last_token_on_device]
        assert len(half_computed) <= config.max_num_partial_prefills
        if any(not self._is_long(seq) for seq in self._waiting_for_room(schedule)):
            for seq, start, count in zip(schedule.seqs, schedule.starts, schedule.counts, strict=True):
                if self._is_long(seq) and seq.num_tokens - start > config.long_prefill_threshold:
                    assert count <= config.long_prefill_threshold

    def _check_shared(self, schedule: Schedule) -> None:
        """Cached tokens were computed for a request that begins with them and has the same salt."""
        for seq in schedule.new_slots:
            cached = seq.token_ids[: seq.num_cached_tokens]
            owners = [one.seq for one in self.requests.values() if one.seq is not seq or seq in self.begun]
            owners = [owner for owner in owners if owner.prompt.extras == seq.prompt.extras]
            assert not cached or any(owner.token_ids[: len(cached)] == cached for owner in owners)
        self.begun.update(schedule.new_slots)

    def _waiting_for_room(self, schedule: Schedule) -> list[Sequence]:
        """Rows that wait, without those that may wait to share what rows of this step do not share yet, and those whose
        adapter has no slot."""
        size = self.scheduler.memory.block_size
        beginnings = [
            seq.token_ids[: min(start, seq.prefix.num_published * size) + 1]
            for seq, start in zip(schedule.seqs, schedule.starts, strict=True)
        ]
        return [
            seq
            for seq in self._with_status(SequenceStatus.WAITING)
            if not any(seq.token_ids[: len(known)] == known for known in beginnings)
            and (seq.prompt.adapter is None or self.scheduler.slots.adapters.find(seq.prompt.adapter) is not None)
        ]

    def _is_long(self, seq: Sequence) -> bool:
        return 0 < self.config.long_prefill_threshold < seq.num_prompt_tokens

    def _check_order_of_admission(self, schedule: Schedule) -> None:
        """First come, first served among short and among long prompts. A long one never overtakes a short one; a short
        one overtakes a long one only where as many long ones are in progress as may be. Whoever begins with what
        a row of this step does not share yet may be overtaken: it waits to share that."""
        for seq in schedule.new_slots:
            assert seq.num_cached_tokens < seq.num_tokens
        waiting = self._waiting_for_room(schedule)
        start_of = dict(zip(schedule.seqs, schedule.starts, strict=True))
        threshold = self.config.long_prefill_threshold
        num_long = sum(
            0 < threshold < seq.num_tokens - start_of.get(seq, seq.num_computed_tokens)
            for seq in self.scheduler.running
        )
        for admitted in schedule.new_slots:
            for left in waiting:
                if left.request_id < admitted.request_id:
                    assert self._is_long(left) and not self._is_long(admitted), f"{admitted} overtook {left}"
                    assert num_long >= self.config.max_long_partial_prefills, f"{admitted} overtook {left}"


def blocks_of(seq: Sequence) -> list[int]:
    """The row's blocks where it has one table, without those that its window has left."""
    [table] = seq.memory.pages
    return [page.blocks[0] for page in table if page is not None]


def rows(schedule: Schedule | None) -> list[tuple[int, int, int]]:
    """(request, first position, tokens) by row."""
    assert schedule is not None
    columns = zip(schedule.seqs, schedule.starts, schedule.counts, strict=True)
    return [(seq.request_id, start, count) for seq, start, count in columns]


def decoding(simulation: Simulation, count: int, max_tokens: int = 40) -> list[Request]:
    """`count` requests that have their first token, and no step in flight."""
    requests = [simulation.add([i % 4, i // 4], max_tokens) for i in range(count)]
    while not all(request.gained for request in requests):
        simulation.step()
    simulation.drain()
    return requests
