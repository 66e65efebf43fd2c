"""Requests of several engines as one: pure, with frames in and frames out."""

from recorded_engines import INFO, PROMPT, Engines

from nanovllm.host import wire


def test_a_request_goes_on_behind_its_tokens_when_its_engine_is_lost() -> None:
    engines = Engines(2)
    first = engines.add(7)
    engines.fleet.take(first, wire.Step([7], [50]))
    engines.fleet.take(first, wire.Step([7], [51]))
    engines.out()
    engines.fleet.lose(first, "died")
    [(second, add)] = engines.take_sent()
    assert second != first and add.known_ids() == [50, 51]
    assert engines.started == [first]
    engines.fleet.take(second, wire.Step([], [], [wire.Finish(7, 52, "length", None)], [wire.Done(7)]))
    [step] = engines.out()
    assert isinstance(step, wire.Step) and step.finishes[0].token == 52
    assert step.finishes[0].weight_versions == [(0, 0, 3)] and not engines.fleet.requests.num_live


def test_tokens_of_several_completions_are_computed_again_and_left_out() -> None:
    engines = Engines(2)
    first = engines.add(4, n=2)
    engines.fleet.take(first, wire.Step([4, 5], [50, 60]))
    engines.fleet.take(first, wire.Step([5], [61], [wire.Finish(4, 51, "stop", None)]))
    engines.out()
    engines.fleet.lose(first, "died")
    [(second, add)] = engines.take_sent()
    assert add.known_ids() == []
    for step in (
        wire.Step([4, 5], [50, 60], logprobs=[(4, b"a"), (5, b"b")]),
        wire.Step([5], [61], [wire.Finish(4, 51, "stop", None)]),
        wire.Step([5], [62], logprobs=[(5, b"c")]),
        wire.Step([], [], [wire.Finish(5, 63, "length", None)], [wire.Done(4)]),
    ):
        engines.fleet.take(second, step)
    steps = [step for step in engines.out() if isinstance(step, wire.Step)]
    assert [(step.rows, step.tokens, step.logprobs) for step in steps if step.rows] == [([5], [62], [(5, b"c")])]
    assert [(end.row, end.token) for step in steps for end in step.finishes] == [(5, 63)]


def test_a_step_may_bring_tokens_that_are_known_and_others() -> None:
    engines = Engines(2)
    first = engines.add(4, n=2)
    engines.fleet.take(first, wire.Step([4, 4, 5], [50, 51, 60]))
    engines.out()
    engines.fleet.lose(first, "died")
    [(second, _)] = engines.take_sent()
    lines = [(4, b"a"), (4, b"b"), (4, b"c"), (4, b"d"), (5, b"e"), (5, b"f")]
    ends = [wire.Finish(4, 53, "length", None), wire.Finish(5, 61, "length", None)]
    engines.fleet.take(second, wire.Step([4, 4, 4, 5], [50, 51, 52, 60], ends, [wire.Done(4)], lines))
    [step] = engines.out()
    assert isinstance(step, wire.Step)
    assert (step.rows, step.tokens, step.logprobs) == ([4], [52], [(4, b"c"), (4, b"d"), (5, b"f")])
    assert [(end.row, end.token) for end in step.finishes] == [(4, 53), (5, 61)]


def test_a_request_that_takes_every_engine_with_it_is_ended() -> None:
    """The others go on, and so does one that gains tokens on each engine, however many are lost."""
    engines, where = Engines(2), dict[int, int]()
    engines.fleet.requests.add(3, PROMPT, {"n": 2})
    engines.fleet.requests.add(7, PROMPT, {})
    engines.fleet.requests.bind()
    for number in range(4):
        where |= {frame.request_id: engine for engine, frame in engines.take_sent()}
        engines.fleet.take(where[7], wire.Step([7], [50 + number]))
        if number == 0:
            engines.fleet.take(where[3], wire.Step([4], [70], [wire.Finish(3, 61, "length", None)]))
        engines.fleet.lose(where[3], "crashed")
        engines.fleet.take(where[3], wire.Ready(INFO))
    ends = [end for step in engines.out() if isinstance(step, wire.Step) for end in step.finishes]
    assert [(end.row, end.reason) for end in ends] == [(3, "length"), (4, "abort")]
    assert ends[1].stop_reason == "3 replicas were lost while they computed this request: crashed"
    assert engines.fleet.requests.num_live == 1


def test_an_abort_ends_a_request_wherever_it_is() -> None:
    engines = Engines(2)
    bound = engines.add(0)
    engines.fleet.requests.abort(0)
    assert engines.take_sent() == [(bound, wire.Abort(0))] and not engines.out()
    engines.fleet.lose(bound, "died")
    [step] = engines.out()
    assert isinstance(step, wire.Step) and [end.reason for end in step.finishes] == ["abort"]
    for request_id in range(1, 40):
        engines.fleet.requests.add(request_id, PROMPT, {})
    engines.fleet.requests.abort(39)
    [step] = engines.out()
    assert isinstance(step, wire.Step) and step.done[0].request_id == 39
    assert not engines.take_sent(), "no engine had it"


def test_an_engine_gets_the_bound_of_a_request_or_that_of_the_fleet() -> None:
    """The longest text that all engines can hold: another one may have to continue it."""
    engines, most = Engines(2), INFO["max_model_len"] - len(PROMPT)
    for request_id, (asked, sent) in enumerate([(0, 0), (9, 9), (most, most), (most + 1, most), (None, most)]):
        engines.fleet.requests.add(request_id, PROMPT, {"max_tokens": asked, "min_tokens": 9})
        engines.fleet.requests.bind()
        [(engine, add)] = engines.take_sent()
        assert add.params["max_tokens"] == sent
        engines.fleet.take(engine, wire.Step([], [], done=[wire.Done(request_id)]))
    engines.fleet.requests.add(9, PROMPT, {})
    engines.fleet.requests.bind()
    [(_, add)] = engines.take_sent()
    assert "max_tokens" not in add.params
