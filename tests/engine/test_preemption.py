"""Rows that lose their blocks: by preemption, when weights are replaced, by abort. Nobody's text suffers."""

from functools import partial

from simulation import Simulation as AnySimulation
from simulation import make_sequence, rows

from nanovllm.engine.sequence import SequenceStatus

Simulation = partial(AnySimulation, disable=("lookahead",))  # which keeps rows from being preempted

# -- preemption -----------------------------------------------------------------------------------------------------


def test_a_preempted_request_goes_on_from_its_cached_prefix() -> None:
    simulation = Simulation(num_blocks=6, block_size=4, depth=1, max_num_seqs=2)
    simulation.add([1] * 8, max_tokens=9)
    new = simulation.add([2] * 8, max_tokens=16)
    while simulation.num_preemptions == 0:
        simulation.step()
    assert new.seq.status is SequenceStatus.WAITING and new.gained
    while new.seq.status is SequenceStatus.WAITING:
        plan = simulation.step()
    assert plan.seqs[-1] is new.seq and plan.starts[-1] == new.seq.num_cached_tokens == 8
    assert new.seq.num_prompt_cached_tokens == 0, "what preemption finds again is no hit of the prompt"
    simulation.run_to_end()


def test_a_step_from_before_a_preemption_makes_no_hits_of_blocks_owned_since() -> None:
    simulation = Simulation(max_num_batched_tokens=12, long_prefill_token_threshold=8)
    prompt = [1] * 20
    simulation.add(prompt)
    assert rows(simulation.launch()) == [(0, 0, 12)]
    simulation.replace_weights()
    simulation.add([2])
    assert rows(simulation.launch()) == [(1, 0, 1), (0, 0, 6)], "the same row again, by less"
    simulation.collect()
    again = simulation.add(prompt)
    assert simulation.scheduler.memory.cache.num_hits(again.seq, 19) == 0
    simulation.run_to_end()


def test_kv_of_former_weights_is_shared_once_it_is_computed_anew() -> None:
    simulation = Simulation(depth=1, block_size=4)
    kept = simulation.add([1] * 9, max_tokens=20)
    simulation.step()
    simulation.scheduler.keep_all()
    simulation.add([1] * 9, max_tokens=1)
    text = make_sequence(2, kept.text_alone(21))
    for expected in (2, 5):  # of the second request; of the first, preempted
        for _ in range(15 if expected == 2 else 2):
            simulation.step()
        assert simulation.scheduler.memory.cache.num_hits(text, 20) == expected
        simulation.replace_weights()


# -- abort ----------------------------------------------------------------------------------------------------------


def test_the_slot_and_blocks_of_an_aborted_request_serve_the_next_at_once() -> None:
    simulation = Simulation(num_blocks=2, block_size=4, max_num_seqs=1)
    first = simulation.add([1] * 5, max_tokens=3)
    second = simulation.add([2] * 5, max_tokens=3)
    simulation.launch()
    simulation.abort(first)
    plan = simulation.launch()
    assert plan.seqs == [second.seq], "while the step of the aborted one is still in flight"
    simulation.collect()
    simulation.run_to_end()
