"""AsyncLLM: texts as they come, equal to those of LLM, from tasks that come and go."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from threads import run_in_threads

from nanovllm import LLM, AsyncLLM, SamplingParams, TextDelta

DEMO = str(Path(__file__).resolve().parents[1] / "nanovllm" / "demo_model")
OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 128, "max_num_seqs": 8}
LONG = SamplingParams(max_tokens=1000, ignore_eos=True)
PROMPTS = ["Once upon a time", "The capital of France is", "Grüße, 你好 🙂", [5, 6, 7]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=30),
    SamplingParams(temperature=0, max_tokens=30, stop=["the", " a"], logprobs=0),
    SamplingParams(temperature=0, max_tokens=30, stop=["the"], include_stop_str_in_output=True),
    SamplingParams(n=3, seed=7, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=12, temperature=2.0, ignore_eos=True, skip_special_tokens=False),
    SamplingParams(temperature=0, max_tokens=30, stop_token_ids=list(range(0, 900, 2))),
    SamplingParams(temperature=0, max_tokens=30, stop_token_ids=list(range(900)), include_stop_str_in_output=True),
    SamplingParams(temperature=0, max_tokens=9, detokenize=False),
]
CASES = [(prompt, param) for prompt in PROMPTS for param in PARAMS]


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(LLM(DEMO, **OPTIONS))
    yield llm
    asyncio.run(llm.close())


async def whole(deltas: AsyncIterator[TextDelta], n: int = 1) -> list[tuple[str, list[int], Any, Any, int]]:
    """Text, token ids, reasons and number of log-probabilities of each completion."""
    found: list[Any] = [["", [], None, None, 0] for _ in range(n)]
    async for delta in deltas:
        one = found[delta.index]
        assert one[2] is None, "nothing comes after the end"
        one[0] += delta.text
        one[1] += delta.token_ids
        one[4] += len(delta.logprobs or ())
        if delta.finished:
            one[2:4] = delta.finish_reason, delta.stop_reason
    return [(*one,) for one in found]


def test_texts_are_those_of_llm(engine: AsyncLLM) -> None:
    """All at once, whatever ends them."""

    async def run() -> list[Any]:
        return await asyncio.gather(*(whole(engine.generate(*case), case[1].n) for case in CASES))

    found = asyncio.run(run())
    with LLM(DEMO, **OPTIONS) as llm:
        expected = llm.generate([case[0] for case in CASES], [case[1] for case in CASES], use_tqdm=False)
    for case, one, wanted in zip(CASES, found, expected, strict=True):
        facts = [(o.text, o.token_ids, o.finish_reason, o.stop_reason, len(o.logprobs or ())) for o in wanted.outputs]
        assert one == facts, case
    assert {one[2] for request in found for one in request} == {"stop", "length"}


def test_a_text_comes_in_pieces_that_stay(engine: AsyncLLM) -> None:
    async def run() -> list[TextDelta]:
        return [delta async for delta in engine.generate("Once upon a time", SamplingParams(max_tokens=24, seed=1))]

    deltas = asyncio.run(run())
    assert sum(bool(delta.text) for delta in deltas) > 8
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_chats(engine: AsyncLLM) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    params = SamplingParams(temperature=0, max_tokens=16)
    parts = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("5 + ", "0 =")]}]
    template = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
    with LLM(DEMO, **OPTIONS) as llm:
        for each, options in ((chat, {"enable_thinking": False}), (parts, {"chat_template": template})):
            [(text, *_)] = asyncio.run(whole(engine.chat(each, params, **options)))
            assert text == llm.chat(each, params, use_tqdm=False, **options)[0].text
    for messages, wrong in (([], "must be one chat, found 0"), ([chat, chat], "found 2"), ([{}], "dict with a 'role'")):
        with pytest.raises(ValueError, match=f"messages.*{wrong}"):
            asyncio.run(whole(engine.chat(messages)))  # type: ignore[arg-type]


async def until(condition: Any) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["break", "aclosing", "a chat's", "cancelled", "cancelled at once"])
def test_leaving_the_loop_aborts(engine: AsyncLLM, how: str) -> None:
    """And no other request notices."""
    aborted = engine.llm.stats().finished.get("abort", 0)

    async def leave() -> None:
        chat = engine.chat([{"role": "user", "content": "A story"}], LONG)
        deltas = chat if how == "a chat's" else engine.generate("A story", LONG)
        async with aclosing(deltas) if how in ("aclosing", "a chat's") else nullcontext():
            async for _ in deltas:
                if not how.startswith("cancelled"):
                    break

    async def run() -> Any:
        other = asyncio.create_task(whole(engine.generate("Once upon a time", PARAMS[0])))
        task = asyncio.create_task(leave())
        if how.startswith("cancelled"):
            await asyncio.sleep(0)
            if how == "cancelled":
                await until(lambda: engine.llm.stats().num_running >= 1)
            task.cancel()
        await asyncio.wait([task])
        text = await other
        await until(lambda: not engine.llm.has_unfinished_requests())
        return text

    [(text, ids, *_)] = asyncio.run(run())
    assert len(ids) == 30 or text
    assert engine.llm.stats().finished.get("abort", 0) <= aborted + 1
    assert how == "cancelled at once" or engine.llm.stats().finished["abort"] == aborted + 1


def test_the_event_loop_runs_on_while_the_engine_starts_and_computes() -> None:
    """In turns of the loop: had any of it held the loop up, there would be few."""

    async def run() -> tuple[int, int]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count())
        async with await AsyncLLM.start(DEMO, **OPTIONS) as llm:
            starting = turns
            await whole(llm.generate("A story of " * 300, SamplingParams(max_tokens=8, ignore_eos=True)))
            counting.cancel()
            return starting, turns - starting

    assert min(asyncio.run(run())) > 50


def test_a_request_that_is_checked_for_long_holds_up_no_other(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar may compile for seconds. Others get their tokens meanwhile, and the event loop goes on."""
    book, is_checked, goes_on = engine.llm.engine.book, threading.Event(), threading.Event()
    check = book.check

    def slow(prompt: Any, params: SamplingParams, *more: Any) -> None:
        if params.max_tokens == 3:
            is_checked.set()
            assert goes_on.wait(60)
        check(prompt, params, *more)

    monkeypatch.setattr(book, "check", slow)

    async def run() -> Any:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        running = asyncio.create_task(whole(engine.generate([5], params)))
        await until(lambda: engine.llm.stats().num_running)
        slow = asyncio.create_task(whole(engine.generate([6], SamplingParams(max_tokens=3, ignore_eos=True))))
        try:
            await until(is_checked.is_set)
            async with aclosing(engine.generate([7], params)) as left:
                await asyncio.wait_for(anext(left), 30)
            first = await asyncio.wait_for(running, 30)
        finally:
            goes_on.set()
        return first, await slow

    [[(_, ids, *_)], [(_, few, *_)]] = asyncio.run(run())
    assert (len(ids), len(few)) == (200, 3)


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ([], None, "at least one token"),
        ([5000], None, "vocab_size"),
        ("x", SamplingParams(logit_bias={9999: 1.0}), "logit_bias"),
    ],
)
def test_mistakes_are_raised_to_their_task(engine: AsyncLLM, prompt: Any, params: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        asyncio.run(whole(engine.generate(prompt, params)))


def test_two_event_loops_share_an_engine(engine: AsyncLLM) -> None:
    def run() -> Any:
        return asyncio.run(whole(engine.generate("Once upon a time", PARAMS[0])))

    first, second = run_in_threads(run, run)
    assert first == second and first[0][2] is not None


def test_new_weights_come_between_two_steps(engine: AsyncLLM) -> None:
    async def run() -> Any:
        story = asyncio.create_task(whole(engine.generate("A story", SamplingParams(max_tokens=200, ignore_eos=True))))
        await until(lambda: engine.llm.stats().num_running)
        for method, *args in (("begin_update",), ("update", DEMO), ("finish_update",)):
            await asyncio.to_thread(getattr(engine.llm, method), *args)
            await asyncio.sleep(0.05)
        return await story

    assert len(asyncio.run(run())[0][1]) == 200


@pytest.mark.parametrize("end", ["closed", "failed"])
def test_requests_hear_of_the_engines_end(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        llm = await AsyncLLM.start(DEMO, **OPTIONS, skip_tokenizer_init=True)
        few = SamplingParams(max_tokens=5, ignore_eos=True)
        assert [(one[0], len(one[1])) for one in await whole(llm.generate([5, 6], few))] == [("", 5)]
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        tasks = [asyncio.create_task(whole(llm.generate([5 + n], params))) for n in range(3)]
        await until(lambda: llm.llm.stats().num_running == 3)
        if end == "closed":
            await llm.close()
        else:

            def broken() -> None:
                raise OSError("the device is gone")

            monkeypatch.setattr(llm.llm, "step", broken)
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, RuntimeError) and ("closed" if end == "closed" else "is gone") in str(found)
        with pytest.raises(RuntimeError, match="has ended"):
            await whole(llm.generate([5]))
        await llm.close()
        await llm.close()

    asyncio.run(run())


def test_threads_of_the_event_loop_may_all_wait_for_requests(engine: AsyncLLM) -> None:
    """As those of rewards that ask the model: it needs none of them."""

    async def run() -> list[Any]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))

        def ask() -> Any:
            return asyncio.run_coroutine_threadsafe(whole(engine.generate("A story", PARAMS[0])), loop).result(20)

        return await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(4)))

    assert len(asyncio.run(run())) == 4


def test_requests_of_an_event_loop_that_is_closed_are_aborted(engine: AsyncLLM) -> None:
    aborted = engine.llm.stats().finished.get("abort", 0)
    loop = asyncio.new_event_loop()
    deltas = engine.generate("A story", LONG)
    loop.run_until_complete(anext(deltas))
    loop.close()
    asyncio.run(until(lambda: not engine.llm.has_unfinished_requests()))
    assert engine.llm.stats().finished.get("abort", 0) == aborted + 1 and not engine._streams


def test_an_engine_that_nobody_has_any_more_ends() -> None:
    llm = LLM(DEMO, **OPTIONS)
    end, engine = llm._turns.close, AsyncLLM(llm)
    del llm
    asyncio.run(whole(engine.generate("A story", PARAMS[0])))
    assert end.alive
    del engine
    asyncio.run(until(lambda: not end.alive))
