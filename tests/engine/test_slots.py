"""Slots for adapters: nobody starves, nobody runs with another's, and rows without adapters wait for nobody."""

import random

import pytest
from simulation import Request, Simulation

from nanovllm.engine.sequence import SequenceStatus
from nanovllm.engine.slots import PATIENCE

RUNNING, WAITING = SequenceStatus.RUNNING, SequenceStatus.WAITING
OPTIONS = {"enable_lora": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def has_begun(request: Request) -> bool:
    return request.seq.status is not WAITING


def test_a_stream_of_one_adapter_does_not_starve_another() -> None:
    """Nor do rows that wait for it hold up a row without an adapter, however many they are."""
    engine = Simulation(max_loras=1, **OPTIONS)
    for _ in range(3):
        engine.add([1, 2, 3], 10, adapter="a")
    engine.step()
    others = [engine.add([4, 5, number], 5, adapter="b") for number in range(100)]
    plain = engine.add([7, 8, 9], 5)
    engine.step()
    assert has_begun(plain) and not any(map(has_begun, others))
    for step in range(4 * PATIENCE):
        if step % 3 == 0:
            engine.add([1, 2, 3], 10, adapter="a")
        engine.step()
        if has_begun(others[0]):
            break
    assert has_begun(others[0])
    engine.run_to_end()


def test_an_heir_that_leaves_gives_its_slot_back() -> None:
    engine = Simulation(max_loras=1, **OPTIONS)
    long = engine.add([1, 2, 3], 200, adapter="a")
    heir = engine.add([4, 5, 6], 5, adapter="b")
    for _ in range(PATIENCE + 3):
        engine.step()
    late = engine.add([1, 2, 4], 5, adapter="a")
    engine.step()
    assert not has_begun(late) and long.seq.status is RUNNING
    engine.abort(heir)
    engine.add([4, 5, 6], 5, adapter="c")
    for _ in range(2):
        engine.step()
    assert has_begun(late)
    engine.run_to_end()


def test_an_heir_that_is_held_keeps_no_slot_from_rows_that_are_not() -> None:
    """As in a call that waits for the rows that have begun, after a preemption."""
    engine = Simulation(max_loras=1, **OPTIONS)
    first = engine.add([1, 2, 3], 200, adapter="a")
    engine.add([4, 5, 6], 5, adapter="b")
    for _ in range(PATIENCE + 3):
        engine.step()
    engine.scheduler.holds_new = True
    engine.scheduler.preempt_all()
    for _ in range(3):
        engine.step()
    assert first.seq.status is RUNNING
    engine.scheduler.holds_new = False
    engine.run_to_end()


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic(seed: int) -> None:
    """Every step's rows have their adapters' slots, filled before (RowSlots.check_integrity), also preempted ones."""
    draw = random.Random(seed)
    engine = Simulation(max_loras=2, num_blocks=draw.choice([12, 64]), **OPTIONS)
    held: dict[int, str] = {}
    for _ in range(300):
        if draw.random() < 0.5:
            prompt = [draw.randrange(5) for _ in range(draw.randint(1, 20))]
            adapter = draw.choice([None, *"abcdef"])
            engine.add(prompt, draw.randint(1, 12), adapter=adapter)
        live = [one for one in engine.requests.values() if one.seq.status in (RUNNING, WAITING)]
        if live and draw.random() < 0.1:
            engine.abort(draw.choice(live))
        schedule = engine.step()
        if schedule is not None:
            held.update(schedule.adapters)
            for seq in schedule.seqs:
                if seq.status is RUNNING and seq.prompt.adapter is not None:
                    assert held[seq.adapter_slot] == seq.prompt.adapter
    engine.run_to_end()
