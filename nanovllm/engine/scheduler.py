"""Scheduler: decides in each step how many more tokens of which rows to compute.

Every request is a row of tokens, some computed and some not; the scheduler picks how many more of which rows this step
computes, within one budget of tokens. There is no prefill phase and no decode phase: a decode is a row with one token
to compute, a prompt chunk one with many, a preempted request one whose computed count fell back to its cached prefix.

Steps are scheduled one ahead of their results. The scheduler therefore works with counts: a sampled token that is still
on the device counts as an inflight token, and its value is needed only to see whether the text has ended. A row that
turns out to have ended computed too much in the step already launched; what that brings is dropped when it arrives.
Where a step may bring a row several tokens, its lengths are bounds until they arrive (Sequence).
"""

from collections import Counter

from nanovllm.config import EngineConfig
from nanovllm.engine.chunk_size import Chunk, is_partial, most_prompt_tokens
from nanovllm.engine.drafting import Drafting, PlaceCost
from nanovllm.engine.lookahead import Lookahead
from nanovllm.engine.prefix_cache import CachedPrefix
from nanovllm.engine.row_memory import RowMemory
from nanovllm.engine.schedule import Schedule
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.slots import RowSlots
from nanovllm.engine.waiting import WaitingQueues, has_begun
from nanovllm.speculative import most_places
from nanovllm.wire.state import StateSize, table_width
from nanovllm.wire.step import UPDATE_SIZE, most_block_updates


class Scheduler:
    """Owner of the queues, of every length and of every block. A pure function of its queues: no clock, no device."""

    def __init__(
        self, config: EngineConfig, size: StateSize, is_dense: bool = True, tokens_per_step: int = 1,
        place_cost: PlaceCost = PlaceCost(),  # noqa: B008
    ) -> None:  # fmt: skip
        """`is_dense`: no tokens choose experts: a step reads all weights, so a small chunk beside decodes costs little.
        `tokens_per_step`: of a row, at most. `place_cost`: see Drafting."""
        self.config, self._is_dense = config, is_dense
        width = table_width(config.max_model_len or 0, size.block_size, size.num_tables)
        self.drafting = Drafting(tokens_per_step, most_places(config.max_num_seqs, tokens_per_step), place_cost)
        self._num_wide_in_flight = 0  # steps with several places a decode
        self.memory = RowMemory(size, config.enable_prefix_caching, width, tokens_per_step, config.reads_pairs)
        self._most_updates = most_block_updates(size, config.max_num_seqs)
        self.lookahead = Lookahead(self.memory, config.uses("lookahead"), tokens_per_step)
        self.running: list[Sequence] = []
        """Running rows, oldest first. Preemption takes from the end."""
        self.waiting = WaitingQueues(config.long_prefill_threshold)
        self.holds_new = False
        """Whether requests that have not begun must wait, whatever room there is."""
        self._last_schedule: Schedule | None = None
        self.num_preemptions = 0
        """Number of times that a row has lost its blocks to an older one."""
        self.num_prompt_tokens = 0
        """Prompt tokens of all requests that have begun; each prompt counts once."""
        self.num_prompt_cached_tokens = 0
        """Prompt tokens of these that the prefix cache had."""
        self._num_added = 0
        self.slots = RowSlots(config.max_num_seqs, config.max_loras if config.enable_lora else 0)

    # -- queues -------------------------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one request can hold when it has the whole KV cache."""
        return self.memory.capacity_tokens

    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def has_begun(self) -> bool:
        """Whether any unfinished row was admitted once."""
        return bool(self.running) or any(map(has_begun, self.waiting))

    def add(self, seq: Sequence) -> None:
        """Queues `seq`."""
        assert seq.status is SequenceStatus.WAITING and seq.arrival < 0, seq
        assert seq.num_tokens < seq.max_total_tokens <= self.capacity_tokens + 1, seq  # the last token needs no KV
        seq.arrival = self._num_added
        self._num_added += 1
        self.waiting.append(seq)

    def abort(self, seq: Sequence) -> None:
        """Ends `seq` wherever it is; tokens of it that are still on the device are dropped when they arrive."""
        if seq.status is not SequenceStatus.FINISHED:
            self._finish(seq, "abort")

    def preempt_all(self) -> None:
        """Puts every running row back into the queue with nothing computed: its KV is no longer valid."""
        self._last_schedule = None
        while self.running:
            self._preempt_newest()
        self.memory.forget_cached()

    def keep_all(self) -> None:
        """Lets running rows go on with their KV, which no other row may share from here on."""
        self._last_schedule = None
        for seq in self.running:
            self.memory.cache.withhold(seq)
        self.memory.forget_cached()

    def reset_prefix_cache(self) -> None:
        """Lets rows that begin from here on share nothing that was computed before. Running rows go on."""
        self._last_schedule = None
        for seq in self.running:
            self.memory.cache.withhold(seq, self.memory.num_blocks_for(seq.num_computed_tokens))
        self.memory.forget_cached()

    # -- one step -----------------------------------------------------------------------------------------------

    def schedule(self) -> Schedule | None:
        """Schedules the next step, once the last is launched. None: no row can go on, or can before results arrive."""
        self._publish_last_schedule()
        if (lines := self.memory.lines) is not None:
            lines.begin_step()
        schedule = Schedule()
        budget = self._schedule_decodes(schedule, self.config.max_num_batched_tokens)
        prompts = [seq for seq in self.running if not seq.last_token_on_device]
        if prompts or self.waiting:
            self._schedule_prompts(schedule, prompts, budget)
        if schedule.seqs:
            if self.config.model_drafts:
                rows, waiting = len(self.running), len(self.waiting)
                soon, drafting = min(waiting, self.slots.num_free, self.memory.room_beside(rows)), self.drafting
                schedule.enter(drafting.wants_entries(rows + soon, waiting - soon), drafting.wants_drafts(self.running))
            schedule.block_copies, self.memory.pool.copies = self.memory.pool.copies, []
            if lines is not None:
                schedule.keeps |= self.memory.expect_states(schedule.seqs[: schedule.num_old_rows])
                schedule.lines = lines.columns(schedule.seqs, schedule.keeps)
            self._last_schedule, schedule.num_adapted = schedule, self.slots.num_adapted(schedule.seqs)
        return self._last_schedule

    def _schedule_decodes(self, schedule: Schedule, budget: int) -> int:
        """Adds the rows whose last token is sampled, oldest first; makes room by preempting the newest."""
        seqs, starts, left, gained = schedule.seqs, schedule.starts, budget, 1
        lengths, most_new = (seq.num_tokens for seq in self.running), min(self.slots.num_free, len(self.waiting))
        schedule.places = places = self.drafting.places(len(self.running), most_new, budget, lengths)
        are_bounds = places > 1 or self._num_wide_in_flight > 0
        for seq in self.running:  # _grow may shorten the list from its end meanwhile; iteration then ends earlier
            if left < places:
                break
            total = seq.num_tokens + seq.num_inflight_tokens
            if not seq.last_token_on_device or (
                total >= seq.max_total_tokens and seq.num_least_tokens >= seq.max_total_tokens
            ):
                continue  # a prompt, or a row whose last token is on its way
            if seq.needs_last_token and seq.num_inflight_tokens:
                continue  # what it may sample next depends on a token that is not here yet
            end = seq.num_computed_tokens + 1
            if are_bounds:
                end, gained = seq.next_end(places), places
            if end > seq.memory.num_reserved_tokens and not self._grow(schedule, seq, end):
                continue  # it was the newest itself and had to go
            seqs.append(seq)
            starts.append(end - 1)
            seq.num_computed_tokens = end
            seq.num_inflight_tokens += gained
            seq.num_inflight_drafts += gained - 1
            left -= places
        schedule.num_old_rows = schedule.num_decode_rows = schedule.num_sample_rows = len(seqs)
        schedule.num_tokens, schedule.counts = places * len(seqs), [1] * len(seqs)
        if self.config.enable_lora:
            schedule.sort_decodes()
        self._num_wide_in_flight += places > 1
        return left

    def _grow(self, schedule: Schedule, seq: Sequence, end: int) -> bool:
        """Gives `seq` blocks for its tokens up to `end`. False: `seq` itself was preempted, being the newest."""
        while not self.memory.can_grow(seq, end):
            self.num_preemptions += 1
            if self._preempt_newest() is seq:
                return False
        schedule.block_updates += self.memory.reserve(seq, end - seq.num_computed_tokens)
        self.memory.save_state(seq)
        return True

    def _schedule_prompts(self, schedule: Schedule, prompts: list[Sequence], budget: int) -> None:
        """Adds chunks of prompts: of `prompts`, which have begun, and of rows that wait."""
        if schedule.num_decode_rows:
            num_decodes, num_waiting = schedule.num_decode_rows * schedule.places, self.waiting.num_tokens
            most, is_dense = self.drafting.most_places, self._is_dense
            budget = min(budget, most_prompt_tokens(self.config, is_dense, num_decodes, num_waiting, prompts, most))
        chunks, budget = self._continue_prompts(schedule, prompts, budget)
        prompts = [seq for seq in prompts if seq.status is SequenceStatus.RUNNING]
        self._admit(schedule, prompts, budget, chunks)
        for seq, count in sorted(chunks, key=is_partial):  # those that finish first, else in this order
            self._add_row(schedule, seq, count)

    def _continue_prompts(self, schedule: Schedule, prompts: list[Sequence], budget: int) -> tuple[list[Chunk], int]:
        """Continues prompts that an earlier step began, in order of admission. Returns their chunks, and the budget
        that is left for others: 0 where a prompt lacks memory for its layers with windows."""
        chunks: list[Chunk] = []
        waiting, lacks_memory = self.waiting, False
        short_waits = bool(waiting.short) or any(not waiting.is_long(seq.num_tokens_to_compute) for seq in prompts)
        for seq in prompts:
            if budget == 0:
                break
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted for one before it
            count = self.memory.prepare(seq, self._chunk(seq.num_tokens_to_compute, budget, short_waits))
            while not (count or chunks or schedule.seqs) and self.running[-1] is not seq:  # or nobody would get on
                self._preempt_newest()
                self.num_preemptions += 1
                count = self.memory.prepare(seq, 1)
            assert count or len(self.running) > 1, seq  # beside rows whose last tokens are on their way
            if count:
                schedule.block_updates += self.memory.reserve(seq, count)
                chunks.append((seq, count))
                budget -= count
            else:
                lacks_memory = True
        return chunks, 0 if lacks_memory else budget

    def _chunk(self, num_remaining_tokens: int, budget: int, short_waits: bool) -> int:
        """Number of a prompt's tokens that this step computes."""
        count = min(num_remaining_tokens, budget)
        if short_waits and self.waiting.is_long(num_remaining_tokens):
            # Leave room for the short prompts after it, also where the budget itself is below the threshold.
            count = min(count, self.config.long_prefill_threshold, max(1, budget // 2))
        return count

    def _admit(self, schedule: Schedule, prompts: list[Sequence], budget: int, chunks: list[Chunk]) -> None:
        """Takes waiting requests in order of arrival, until budget, slots, memory or the partial-prefill limits end.

        A row is admitted only where all its known tokens fit, and gets their blocks at once. So a chunk never waits for
        memory, and with nothing running every request fits: admission cannot deadlock. And only where the step has room
        to announce its blocks, which the first always has; and where, beside others, it is expected to keep them.

        A request that begins with what a row is computing now, or whose adapter lacks a slot, waits: others pass.
        """
        memory, waiting = self.memory, self.waiting
        memory.cache.begin_step(prompts)
        self.lookahead.begin_step()
        self.slots.begin_admissions(bool(self.running))
        num_partial = len(prompts) - len(chunks) + sum(map(is_partial, chunks))
        num_long = sum(1 for seq in prompts if waiting.is_long(seq.num_tokens_to_compute))
        while budget > 0 and waiting and self.slots.num_free and memory.has_free:
            seq = waiting.next(num_long < self.config.max_long_partial_prefills, self.holds_new, self.slots.passes)
            if seq is None or seq.num_inflight_tokens:  # preempted, and its last token is not known yet
                break
            copies_held = bool(waiting.held) and memory.cache.are_copies(seq, waiting.held[-1])
            prefix = None if copies_held else memory.cache.lookup(seq)
            if prefix is None:
                if not waiting.hold(seq):
                    break
                continue
            count = self._chunk(seq.num_tokens - prefix.num_tokens, budget, short_waits=bool(waiting.short))
            prefix, count = memory.fit(seq, prefix, count)
            if not count or (self.running and not self.lookahead.fits(seq, prefix, self.running)):
                break
            if len(schedule.block_updates) // UPDATE_SIZE + memory.num_updates(seq, prefix, count) > self._most_updates:
                break
            remaining = seq.num_tokens - prefix.num_tokens
            if count < remaining and num_partial >= self.config.max_num_partial_prefills:
                break
            waiting.remove(seq)
            self._start(schedule, seq, prefix, count)
            memory.cache.note_computing(seq)
            num_long += waiting.is_long(remaining)
            budget -= count
            if remaining == schedule.places == 1 and not (seq.sampling and seq.sampling.num_prompt_logprobs_missing):
                self._add_decode(schedule, seq)
            else:
                chunks.append((seq, count))
                num_partial += count < remaining
        waiting.put_back_held()
        self.slots.end_admissions(waiting.adapters.keys())

    def _start(self, schedule: Schedule, seq: Sequence, prefix: CachedPrefix, count: int) -> None:
        """Gives a waiting row a slot and memory. `count`: number of tokens that it computes first."""
        self.memory.admit(seq, prefix, count)
        seq.status = SequenceStatus.RUNNING
        self.slots.take(seq, schedule)
        seq.num_computed_tokens = seq.num_cached_tokens = prefix.num_tokens
        if seq.num_prompt_cached_tokens is None:
            seq.num_prompt_cached_tokens = min(prefix.num_tokens, seq.num_prompt_tokens)
            if seq.index == 0:
                self.num_prompt_tokens += seq.num_prompt_tokens
                self.num_prompt_cached_tokens += seq.num_prompt_cached_tokens
        self.running.append(seq)
        self.lookahead.note_admitted(seq)
        schedule.block_updates += self.memory.all_updates(seq)

    def _add_row(self, schedule: Schedule, seq: Sequence, count: int) -> None:
        """Adds a row that computes its next `count` tokens, and gains a token where these are its last."""
        start = seq.num_computed_tokens
        schedule.seqs.append(seq)
        schedule.starts.append(start)
        schedule.counts.append(count)
        schedule.host_token_ids += seq.token_ids[start : start + count]
        schedule.num_tokens += count
        if self.memory.lines is not None:
            schedule.keeps[seq] = self.memory.keep_within(seq, start, count)
        seq.num_computed_tokens = start + count
        if not seq.num_tokens_to_compute:
            schedule.num_sample_rows += 1
            seq.num_inflight_tokens += 1
            seq.last_token_on_device = True

    def _add_decode(self, schedule: Schedule, seq: Sequence) -> None:
        """Adds a row that begins with all but one token cached as a decode: its slot record has all that a decode
        needs. So far the step has decodes alone."""
        self._add_row(schedule, seq, 1)
        schedule.host_token_ids.pop()
        schedule.num_decode_rows += 1

    # -- results ------------------------------------------------------------------------------------------------

    def apply(self, schedule: Schedule, token_ids: list[int], drafted: int | None = None) -> list[tuple[Sequence, int]]:
        """Takes in the tokens that a step's first rows gained, of a decode one for each place: -1 where a draft before
        it was wrong, -2 where there was none. drafted: tokens that were drafted for later. Returns which sequence
        gained which token, in order. Tokens behind the end of a sequence are dropped."""
        if schedule is self._last_schedule:
            self._publish_last_schedule()  # before any of its rows ends
        gained: list[tuple[Sequence, int]] = []
        rows = schedule.seqs[: schedule.num_sample_rows]
        results = self.drafting.results(rows, token_ids, schedule.num_decode_rows, schedule.places, drafted)
        results = self.memory.note_passed(schedule.keeps, results)
        block_size, publish = self.memory.block_size, self.memory.cache.publish
        running, finished = SequenceStatus.RUNNING, SequenceStatus.FINISHED  # members of an Enum are slow to look up
        for seq, token_id in results:
            status = seq.status
            if status is finished:
                continue
            seq.num_inflight_tokens -= 1
            seq.token_ids.append(token_id)
            seq.num_tokens = num_tokens = seq.num_tokens + 1
            gained.append((seq, token_id))
            if status is not running:
                self.waiting.num_tokens += 1  # preempted while this token was on the device
            elif (num_tokens - 1) % block_size == 0:  # all but this token are written, and fill a block
                publish(seq, num_tokens - 1)
            if token_id in seq.stop_token_ids:
                self._finish(seq, "stop")
            elif (
                seq.sampling is not None
                and seq.sampling.watches
                and (ended := seq.sampling.accept(seq.token_ids, seq.num_output_tokens))
            ):
                self._finish(seq, ended.reason, ended.why)
            elif num_tokens >= seq.max_total_tokens:
                self._finish(seq, "length")
        if schedule.places > 1:
            self._num_wide_in_flight -= 1
            counts = Counter(seq for seq, _ in gained)
            for seq in rows[: schedule.num_decode_rows]:
                if seq.status is not finished:
                    seq.note_gained(counts[seq], schedule.places)
        return gained

    def _publish_last_schedule(self) -> None:
        """Makes what the prompts of the last launched step write available to later steps, whose tokens are known
        already, and gives back what their windows leave behind."""
        schedule, self._last_schedule = self._last_schedule, None
        if schedule is None:
            return
        for row in range(schedule.num_old_rows, schedule.num_rows):
            seq = schedule.seqs[row]
            if seq.memory.pages:  # of this step: else the row has ended, since nothing was preempted meanwhile
                self.memory.cache.publish(seq, schedule.starts[row] + schedule.counts[row])
                self.memory.leave_behind(seq)

    def _finish(self, seq: Sequence, reason: str, why: str | None = None) -> None:
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self._release(seq)
        else:
            self.waiting.remove(seq)
        seq.end(reason, why)
        if reason != "abort" and seq.params.max_tokens != 0:
            self.lookahead.note_end(seq)

    def _preempt_newest(self) -> Sequence:
        """Puts the newest running row back into its queue. It begins again from what is still cached by then."""
        seq = self.running.pop()
        self._release(seq)
        seq.num_computed_tokens = seq.num_cached_tokens = 0
        seq.status = SequenceStatus.WAITING
        self.waiting.put_back(seq)
        return seq

    def _release(self, seq: Sequence) -> None:
        # Safe while a launched step still writes there: the next owner of the slot or a block runs in a later step.
        self.memory.release(seq)
        self.lookahead.note_released(seq)
        self.slots.release(seq)
        seq.last_token_on_device = False

    def check_integrity(self) -> None:
        """Asserts that queues, lengths, slots and blocks agree. For tests and idle moments."""
        waiting = [*self.waiting]
        for seq in [*self.running, *waiting]:
            seq.check()
        assert all(seq.status is SequenceStatus.RUNNING and seq.slot >= 0 for seq in self.running)
        assert all(seq.status is SequenceStatus.WAITING and not seq.memory.pages for seq in waiting)
        self.slots.check_integrity(self.running)
        self.waiting.check_integrity()
        assert len({seq.number for seq in [*self.running, *waiting]}) == len(self.running) + len(waiting)
        self.lookahead.check_integrity(self.running)
        self.memory.check_integrity(self.running)
