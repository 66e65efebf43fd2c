"""A program's own alarm, of which its handler makes a timeout, cuts no step in half."""

import signal
from contextlib import suppress

import pytest
from process_checks import GREEDY, LONG, tiny_llm, token_ids


@pytest.mark.parametrize("raises", [True, False])
def test_an_alarm_leaves_the_engine_usable(raises: bool, tiny: str, mark: str) -> None:
    calls = []

    def handler(number: int, frame: object) -> None:
        calls.append(number)
        if raises:
            raise TimeoutError("time is up")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with tiny_llm(tiny) as llm:
            expected = token_ids(llm, [5] * 9, [6] * 9)
            for number in range(1, 9):
                signal.setitimer(signal.ITIMER_REAL, 0.01 * number)
                with suppress(TimeoutError):
                    if number % 2:
                        llm.generate([[5] * 9, [6] * 9], LONG if raises else GREEDY, use_tqdm=False)
                    while len(calls) < number:
                        llm.add_request([7] * 9, GREEDY)
                        llm.step()
                assert len(calls) == number and signal.getsignal(signal.SIGALRM) is handler
                llm.abort_all()
                while llm.has_unfinished_requests():
                    llm.step()
                assert token_ids(llm, [5] * 9, [6] * 9) == expected and llm.is_finished()
            llm.engine.scheduler.check_integrity()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
