"""Rows that gain several tokens in a step: what comes behind an end is dropped, and memory serves the bounds. The same
outputs whatever a step brings: SeveralTokensMachine of test_scheduler_machine.py."""

import random
from typing import Any, cast

import pytest
from fake_executor import fake_engine
from simulation import make_sequence

from nanovllm.config import EngineConfig
from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.request_book import RequestBook
from nanovllm.engine.sampling.row import SamplingRow
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import Step, aborted
from nanovllm.host import wire
from nanovllm.host.engine_host import EngineHost
from nanovllm.host.fleet_rows import FleetRows
from nanovllm.sampling_params import SamplingParams
from nanovllm.wire.state import PageGroup, StateSize

STOP = 7


def scheduler_of(num_blocks: int, tokens_per_step: int, *groups: PageGroup, **options: object) -> Scheduler:
    config = EngineConfig.from_options("model", max_num_seqs=16, max_model_len=400, **options)
    return Scheduler(config, StateSize(num_blocks, 4, groups or (PageGroup(),)), tokens_per_step=tokens_per_step)


def begin(scheduler: Scheduler, seq: Sequence) -> None:
    """Brings the row to its first token, with no step in flight."""
    scheduler.add(seq)
    schedule = scheduler.schedule()
    scheduler.apply(schedule, [1])
    assert seq.last_token_on_device


def test_a_row_with_windows_gets_on_in_the_memory_that_is_kept_for_it() -> None:
    """Alone in as many blocks as `row_blocks` says, it is never preempted, whatever each step brings."""
    chosen = random.Random(3)
    for window in (1, 4, 5, 8, 11):
        for tokens_per_step in (1, 2, 5, 9):
            groups = PageGroup(), PageGroup(window)
            most = scheduler_of(1, tokens_per_step, *groups).memory.row_blocks(120)
            scheduler = scheduler_of(most, tokens_per_step, *groups, max_num_batched_tokens=16)
            assert scheduler.capacity_tokens >= 120
            seq = make_sequence(0, [3] * 4, 117)
            begin(scheduler, seq)
            launched = [scheduler.schedule()]
            while seq.status is SequenceStatus.RUNNING:
                if (schedule := scheduler.schedule()) is not None:
                    launched.append(schedule)
                count = chosen.randint(1, most_now := (step := launched.pop(0)).places)
                scheduler.apply(step, [2] * count + [-1] * (most_now - count))
                scheduler.check_integrity()
            assert seq.num_output_tokens == 117 and scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    ("bad_words", "drafts", "banned"),
    [
        ((), [], [{1}, {1}, set()]),
        (((3, 4), (4, 5, 6)), [4, 5], [{1, 4}, {1}, {6}]),
        (((3, 7), (9, 7, 2)), [-1, -1], [{1, 7}, {1}, set()]),
    ],
)
def test_bans_at_a_place_are_those_of_the_text_with_the_drafts_before_it(
    bad_words: tuple[tuple[int, ...], ...], drafts: list[int], banned: list[set[int]]
) -> None:
    """1 ends texts of at least 5 tokens."""
    params = SamplingParams(stop_token_ids=(1,), min_tokens=5)
    own: Any = {"text": None, "matcher": None, "num_prompt_tokens": 2}
    row = SamplingRow(params, stop_ids=frozenset({1}), vocab_size=16, bad_words=bad_words, **own)
    row.drafts = drafts
    for place, expected in enumerate(banned):
        edits = row.edits([9, 7, 8, 8, 3], 3, place)
        assert {entry[1] for entry in ([] if edits is None else edits.tolist())} == expected


def outputs_of(tokens_per_step: int) -> list[Any]:
    """Outputs that requests get of an engine. Its driver must hear the same of them over the wire."""
    chosen = random.Random(tokens_per_step)
    gain = (lambda most: chosen.randint(1, most)) if tokens_per_step > 1 else None
    room = {"max_num_seqs": 8, "max_model_len": 128, "num_kvcache_blocks": 24, "kvcache_block_size": 16}
    engine = fake_engine(tokens_per_step, gain, **room)
    own = engine.config, engine.model_config, engine.tokenizer
    book = RequestBook(*own, engine.scheduler.capacity_tokens, EngineState())
    sent: list[Any] = []
    host, rows = EngineHost(engine, sent.append, cast(Any, None)), FleetRows(book)
    decode = engine.tokenizer.own.decode
    every = [
        SamplingParams(max_tokens=40, seed=1),
        SamplingParams(max_tokens=40, seed=2, stop=(decode([3]), decode([5]))),
        SamplingParams(max_tokens=40, seed=3, stop=(decode([3, 9]),), stop_token_ids=(2,), logprobs=0),
        SamplingParams(max_tokens=30, seed=4, n=3, logprobs=0),
        SamplingParams(max_tokens=30, seed=5, min_tokens=6, stop_token_ids=(1, 2, 4)),
        SamplingParams(max_tokens=0, seed=6),
    ]
    ids = []
    for number, params in enumerate(every):
        prompt = Prompt([1, 2, 3 + number])
        ids.append(book.open(prompt, params, num_waiting=lambda: 0, queue=lambda seqs: None))
        host.handle(wire.Add.of(ids[-1], prompt, wire.params_fields(params)))
    gained: dict[tuple[int, int], list[int]] = {}
    ended: list[tuple[int, int]] = []
    while engine.has_unfinished_requests():
        step = engine.step()
        for output in engine.book.outputs(step):
            gained.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
            assert output.logprobs is None or [next(iter(at or {})) for at in output.logprobs] == output.new_token_ids
            if output.finished:
                ended.append((output.request_id, output.index))
        host._send_gained(step)
        for each in sent:
            rows.take(each)
        sent.clear()
        engine.scheduler.check_integrity()
    assert sorted(ended) == sorted(gained) and engine.scheduler.memory.num_free_blocks == 24
    found = []
    for request_id in ids:
        for one in book.take(request_id).outputs:
            assert gained[request_id, one.index] == one.token_ids
            logprobs = one.logprobs and [next(iter(at or {})) for at in one.logprobs]
            assert logprobs in (None, one.token_ids)
            found.append((one.text, one.token_ids, one.finish_reason, one.stop_reason, one.cumulative_logprob))
    return found


def test_the_driver_keeps_nothing_of_a_request_that_its_caller_forgot() -> None:
    """As generate() does after Ctrl-C, before the engine has ended it."""
    engine = fake_engine(1, None, max_model_len=128, num_kvcache_blocks=24, kvcache_block_size=16)
    rows = FleetRows(engine.book)
    number = engine.add_request(Prompt([1, 2, 3]), SamplingParams(max_tokens=9))
    rows.take(Step(rows=[number], tokens=[5]))
    assert rows._plain
    engine.book.forget(number)
    rows.take(aborted(number, 1))
    assert not rows._plain


def test_a_request_may_come_while_a_step_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with grammars come from threads that have checked them."""
    engine = fake_engine(1, None, max_num_seqs=8, max_model_len=128, num_kvcache_blocks=24, kvcache_block_size=16)
    host = EngineHost(engine, lambda frame: None, cast(Any, None))
    params = wire.params_fields(SamplingParams(max_tokens=9, logprobs=0))

    def add(number: int) -> None:
        host.handle(wire.Add.of(number, Prompt([1, 2, 3 + number]), params))

    add_details = host._add_details

    def add_one_meanwhile(step: Step, request_id: int, sent: list[int]) -> None:
        if 9 not in engine.book.rows:
            add(9)
        add_details(step, request_id, sent)

    monkeypatch.setattr(host, "_add_details", add_one_meanwhile)
    for number in (0, 1):
        add(number)
    while engine.has_unfinished_requests():
        host._send_gained(engine.step())
    assert not engine.book.rows and not host._detailed


def test_engine_and_driver_hand_out_the_same_whatever_a_step_brings() -> None:
    expected = outputs_of(1)
    assert {reason for _, _, reason, _, _ in expected} == {"stop", "length"}
    assert {type(why) for *_, why, _ in expected} == {int, str, type(None)}
    for tokens_per_step in (2, 5, 9):
        assert outputs_of(tokens_per_step) == expected
