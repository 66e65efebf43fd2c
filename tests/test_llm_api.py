"""The user's front: what generate, chat and a loop of one's own take and give, on the checkpoint that ships with us."""

import copy
import gc
import logging
import pickle
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from programs import run
from stepping import assert_nothing_is_left
from tqdm import tqdm

from nanovllm import LLM, SamplingParams, terminal
from nanovllm.attention import Selection
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.engine.inputs import ids_of_texts
from nanovllm.kernels import select_kernels
from nanovllm.runner import model_runner
from nanovllm.runner.cuda_graphs import why_no_graphs

GREEDY = SamplingParams(temperature=0, max_tokens=8)
FIXED = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "num_kvcache_blocks": 64}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **OPTIONS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left(llm: LLM) -> Iterator[None]:
    yield
    assert_nothing_is_left(llm)


def run_loop(llm: LLM) -> tuple[dict[int, list[int]], dict[int, str | None]]:
    """Tokens and finish reasons by request, from a caller's own loop."""
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, str | None] = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finished:
                reasons[output.request_id] = output.finish_reason
    assert llm.is_finished()
    return tokens, reasons


def generate(llm: LLM, prompts: Any, params: Any = FIXED) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False)


def test_one_prompt_many_prompts_text_and_ids_give_the_same(llm: LLM) -> None:
    text = "one two three"
    ids = llm.tokenizer.encode(text)
    [alone] = generate(llm, text)
    assert [output.token_ids for output in generate(llm, ids)] == [alone.token_ids]
    dicts: list[Any] = [{"prompt": text}, {"prompt": None, "prompt_token_ids": np.array(ids)}]
    mixed = generate(llm, [text, ids, tuple(ids), np.array(ids).tolist(), np.array(ids), list(np.array(ids)), *dicts])
    assert [output.token_ids for output in mixed] == [alone.token_ids] * 8
    assert [generate(llm, one)[0].prompt for one in dicts] == [text, None]
    [added, *_] = [llm.add_request(one, FIXED) for one in dicts]
    assert run_loop(llm)[0] == {added: alone.token_ids, added + 1: alone.token_ids}
    assert (alone.prompt, alone.prompt_token_ids) == (text, ids)
    assert [output.prompt for output in mixed] == [text, *[None] * 5, text, None]
    assert all(type(token_id) is int for output in mixed for token_id in output.prompt_token_ids + output.token_ids)
    assert alone.text == llm.tokenizer.decode(alone.token_ids, skip_special_tokens=True)


def test_texts_that_are_tokenized_together_are_those_of_one_alone_and_a_bad_one_is_named(llm: LLM) -> None:
    texts = [f"{n} and {n + 1}" for n in range(300)]
    ids: list[Any] = [llm.tokenizer.encode(text) for text in texts]
    found = ids_of_texts([*texts[:299], ids[5], texts[299]], llm.engine.tokenizer)
    assert list(found) == [*ids[:299], None, ids[299]]
    with pytest.raises(ValueError, match=r"prompts\[298\]: .*surrogate"):
        llm.generate([*texts[:298], "\ud800", *texts[299:]], FIXED, use_tqdm=False)


def test_outputs_come_in_the_order_of_prompts_whatever_ends_first(llm: LLM) -> None:
    lengths = [9, 1, 5, 30, 2]
    prompts = [f"{word} two three" for word in ("one", "red", "four", "six", "ten")]
    outputs = generate(llm, prompts, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths])
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.token_ids) for output in outputs] == lengths
    assert [output.request_id for output in outputs] == sorted(output.request_id for output in outputs)


def test_the_longest_of_a_batch_begin_first_with_the_tokens_they_have_anyway() -> None:
    lengths = [2, 3, 2, 3, 20]
    params = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True) for n in lengths]
    runs = {}
    for longest_first in (True, False):
        with LLM("demo", **OPTIONS, max_num_seqs=2, disable=() if longest_first else ("longest_first",)) as llm:
            outputs = generate(llm, ["one", "two", "three", "four", "five"], params)
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i]) if longest_first else range(len(lengths))
        begun = [outputs[index].metrics.first_scheduled_time for index in order]
        assert begun == sorted(begun)
        steps = len({moment for output in outputs for moment in output.metrics.token_times})
        runs[longest_first] = steps, [output.token_ids for output in outputs]
    assert runs[True][0] == max(lengths) < runs[False][0]
    assert runs[True][1] == runs[False][1]


def test_an_output_is_an_object_and_a_mapping(llm: LLM) -> None:
    [output] = generate(llm, "one two three")
    assert output["text"] == output.text == output.outputs[0].text
    assert output["token_ids"] == output.token_ids == output.outputs[0].token_ids
    assert output["finish_reason"] == output.finish_reason == output.outputs[0].finish_reason == "length"
    llm.add_request("one two three", FIXED)
    gained: list[Any] = []
    while llm.has_unfinished_requests():
        gained += llm.step()
    for what in (output, output.outputs[0], gained[-1]):
        assert set(dict(what)) >= {field.name for field in fields(what) if field.repr}, "every field that is shown"
        assert dict(what) == {name: getattr(what, name) for name in what}
        assert "finish_reason" in what and "keys" not in what
        for unknown in ("txt", "keys", "view", "__class__", "_NAMES", 0):
            with pytest.raises(KeyError):
                what[unknown]
    assert dict(output)["text"] == output.text


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_an_output_equals_its_copies(llm: LLM, again: Any) -> None:
    params = SamplingParams(max_tokens=3, n=2, logprobs=2, prompt_logprobs=1, sampling_mask=True, top_k=4)
    first, second = llm.generate(["one two three"] * 2, params, use_tqdm=False)
    assert again(first) == first != second
    assert again(first.outputs[0].sampling_mask) == first.outputs[0].sampling_mask != None  # noqa: E711


def test_a_step_of_generate_looks_at_no_more_however_many_have_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, counts = llm.engine.step, []

    def counted() -> Any:
        counts.append(len(llm._turns.ended))
        return step()

    monkeypatch.setattr(llm.engine, "step", counted)
    params = [SamplingParams(max_tokens=1 + count, ignore_eos=True) for count in range(20)]
    assert len(llm.generate(["one"] * 20, params, use_tqdm=False)) == 20
    assert len(counts) >= 20 and max(counts) == 0


def test_a_large_batch_exempts_what_was_there_from_collection_and_leaves_the_collector_as_it_was(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full collection in the middle of it would wait for all that the program has imported and made."""
    step, during = llm.engine.step, []

    def observed() -> Any:
        during.append(gc.get_freeze_count())
        return step()

    def frozen_objects_during(num_requests: int) -> int:
        during.clear()
        llm.generate(["Red"] * num_requests, replace(FIXED, max_tokens=1), use_tqdm=False)
        return min(during)

    monkeypatch.setattr(llm.engine, "step", observed)
    gc.freeze()  # as a caller does, who knows
    assert frozen_objects_during(64) > 10_000 and gc.get_freeze_count() > 10_000
    gc.unfreeze()
    try:
        assert frozen_objects_during(64) > 10_000 and gc.get_freeze_count() == 0
        assert frozen_objects_during(2) == 0
    finally:
        gc.freeze()  # as conftest.py left it


def test_empty_batches(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    assert llm.generate([]) == []
    assert llm.generate([], []) == []
    assert llm.chat([]) == []
    assert not capfd.readouterr().err


def test_finish_reasons(llm: LLM) -> None:
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    [stopped] = llm.chat(chat, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[-1] in llm.model_config.eos_token_ids
    assert "5" in stopped.text and "<|" not in stopped.text
    assert llm.tokenizer.encode(stopped.prompt, add_special_tokens=False) == stopped.prompt_token_ids
    assert "What is 2 + 3?" in stopped.prompt
    [cut] = llm.chat([chat], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert (cut.finish_reason, cut.token_ids) == ("length", stopped.token_ids[:2])
    [full] = generate(llm, [7] * 120, SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True))
    assert (full.finish_reason, len(full.token_ids)) == ("length", 8)


def test_several_chats(llm: LLM) -> None:
    chats: list[Any] = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in ((2, 3), (1, 3))]
    together = llm.chat(chats, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    alone = [llm.chat(chat, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0] for chat in chats]
    assert [output.text for output in together] == [output.text for output in alone]
    parts = [[{"role": "user", "content": [{"type": "text", "text": chat[0]["content"]}]}] for chat in chats]
    given = [output.prompt for output in llm.chat(parts, GREEDY, use_tqdm=False)]
    assert given == [output.prompt for output in together]


def test_an_answer_that_goes_on(llm: LLM) -> None:
    """Nothing may stand between its beginning and what is added."""
    chat = [{"role": "user", "content": "What is the capital of Italy?"}]
    [whole] = llm.chat(chat, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    begun = [*chat, {"role": "assistant", "content": whole.text[:11]}]
    for options in ({}, {"add_generation_prompt": False}):
        params = SamplingParams(temperature=0, max_tokens=20)
        [rest] = llm.chat(begun, params, use_tqdm=False, continue_final_message=True, **options)
        assert rest.prompt == whole.prompt + whole.text[:11]
        assert whole.text[:11] + rest.text == whole.text
    [bare] = llm.chat(chat, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert whole.prompt == f"{bare.prompt}<|im_start|>assistant\n"


def test_template_variables_and_misspelt_keywords_of_a_chat(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    template = "{{ messages[0].content }}{% if polite %}, please{% endif %}{{ tools | length if tools else 0 }}"
    options: dict[str, Any] = {"chat_template": template, "use_tqdm": False}
    [plain] = llm.chat(chat, GREEDY, **options)
    [asked] = llm.chat(chat, GREEDY, **options, chat_template_kwargs={"polite": True}, tools=[{"type": "function"}])
    assert (plain.prompt, asked.prompt) == ("hi0", "hi, please1")
    assert llm.chat(chat, GREEDY, **options, polite=True)[0].prompt == "hi, please0"
    with pytest.raises(TypeError, match=r"chat: unknown keyword 'add_generation_promt'; did you mean 'add_generation_"):
        llm.chat(chat, GREEDY, add_generation_promt=False)
    with pytest.raises(TypeError, match="chat: unknown keyword 'polit'; did you mean 'polite'"):
        llm.chat(chat, GREEDY, **options, polit=True)


def test_the_bar_goes_to_stderr_or_nowhere(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(llm, ["one two three"] * 3)
    assert capfd.readouterr() == ("", "")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)  # what Python makes of a closed one
        assert len(llm.generate(["one two three"] * 3, FIXED)) == 3
    llm.generate(["one two three"] * 3, FIXED)
    out, err = capfd.readouterr()
    with monkeypatch.context() as patch:  # as under TQDM_DISABLE
        patch.setattr(terminal, "tqdm", lambda **given: tqdm(**{"disable": True, **given}))
        llm.generate(["one two three"] * 3, FIXED)
    assert out == capfd.readouterr().err == ""
    assert "3/3" in err and "prefill" in err and "decode" in err and "tok/s" in err


def test_a_prompt_too_long_is_refused_without_a_warning(
    llm: LLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    with pytest.raises(ValueError, match="max_model_len"):
        llm.generate("one two three " * 3000)
    assert not caplog.records


def test_abort(llm: LLM) -> None:
    kept, dropped = (llm.add_request("one two three", FIXED) for _ in range(2))
    never_started = llm.add_request("red and blue", FIXED)
    llm.abort(never_started)
    llm.step()
    llm.step()
    llm.abort(dropped)
    llm.abort(123456)  # unknown: ignored
    tokens, reasons = run_loop(llm)
    assert reasons.pop(never_started, "abort") == "abort"  # reported by one of the first two steps
    assert reasons == {kept: "length", dropped: "abort"}
    assert len(tokens[kept]) <= 5 and len(tokens[dropped]) < 5
    llm.abort(kept)  # finished: ignored
    assert llm.is_finished()


def test_requests_of_a_loop_survive_a_generate_in_between(llm: LLM) -> None:
    expected = [output.token_ids for output in generate(llm, ["one two three", "red and blue"])]
    request_id = llm.add_request("one two three", FIXED)
    first = [output for output in llm.step() if output.request_id == request_id]
    assert [output.token_ids for output in generate(llm, "red and blue")] == expected[1:]
    rest, reasons = run_loop(llm)
    gained = [token_id for output in first for token_id in output.new_token_ids] + rest[request_id]
    assert (gained, reasons) == (expected[0], {request_id: "length"})


def test_a_request_is_queued_until_its_first_step_begins(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not until it ends: on a CPU a launch computes the whole step."""
    begun: list[float] = []
    launch = llm.engine.executor.launch

    def noted_launch(packed: Any) -> None:
        begun.append(time.perf_counter())
        launch(packed)

    monkeypatch.setattr(llm.engine.executor, "launch", noted_launch)
    [output] = generate(llm, "one two three")
    assert output.metrics.first_scheduled_time <= begun[0]


def test_token_ids_alone_without_a_tokenizer(llm: LLM) -> None:
    with LLM("demo", skip_tokenizer_init=True, **OPTIONS) as bare:
        [output] = generate(bare, [20, 21, 22])
        assert output.token_ids == generate(llm, [20, 21, 22])[0].token_ids
        assert (output.text, output.prompt) == ("", None)
        for use in (lambda: bare.generate("text"), lambda: bare.add_request("text"), lambda: bare.tokenizer):
            with pytest.raises(ValueError, match="skip_tokenizer_init=True"):
                use()
        assert bare.is_finished()


def test_the_callers_default_device_is_not_ours(llm: LLM) -> None:
    """As torch.set_default_device("cuda") in a notebook, where what is pinned must stay on the host."""
    params = SamplingParams(seed=1, temperature=0.8, top_p=0.9, presence_penalty=0.1, logprobs=1, prompt_logprobs=1)
    expected = generate(llm, [20, 21, 22], params)[0]
    torch.set_default_device("meta")
    try:
        with LLM("demo", **OPTIONS) as other:
            found = generate(other, [20, 21, 22], params)[0]
            assert found.token_ids == expected.token_ids
            assert len(found.prompt_logprobs) == 3
    finally:
        torch.set_default_device(None)


def test_what_cannot_be_captured_runs_without_graphs_and_says_so() -> None:
    gpu, fused = torch.device("cuda"), select_kernels("cuda")
    able, unable = SimpleNamespace(name="able", can_capture=True), SimpleNamespace(name="unable", can_capture=False)
    assert why_no_graphs(gpu, False, fused, able, []) is None
    assert why_no_graphs(gpu, False, fused, unable, []) == "attention backend 'unable' cannot be captured"
    mixers = [SimpleNamespace(can_capture=can_capture) for can_capture in (True, False)]
    assert why_no_graphs(gpu, False, fused, able, mixers[:1]) is None
    assert why_no_graphs(gpu, False, fused, able, mixers) == "mixer SimpleNamespace cannot be captured"
    assert why_no_graphs(gpu, True, fused, able, []) == "enforce_eager=True"
    assert "plain kernels" in str(why_no_graphs(gpu, False, select_kernels("cuda", fused=False), able, []))
    assert "cpu" in str(why_no_graphs(torch.device("cpu"), False, fused, able, []))


def test_the_attention_backend_and_why_is_logged_once_and_is_no_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an optional package is not there, as on most machines."""
    monkeypatch.setattr(
        model_runner, "select_backend", lambda *_, **__: Selection(TorchBackend, "flash: must be installed")
    )
    with caplog.at_level(logging.INFO), LLM("demo", **OPTIONS):
        [record] = [record for record in caplog.records if "attention backend" in record.getMessage()]
    assert record.levelno == logging.INFO
    assert record.getMessage() == "attention backend: torch (flash: must be installed)"


def test_torch_is_left_alone_until_an_engine_starts() -> None:
    program = (
        "import sys, nanovllm.llm; assert 'torch' not in sys.modules\n"  # workers start before it comes in
        "for name in nanovllm.__all__: getattr(nanovllm, name)\n"
        "assert issubclass(nanovllm.WorkerError, RuntimeError) and issubclass(nanovllm.StepTimeout, RuntimeError)\n"
        "assert issubclass(nanovllm.WeightsIncomplete, RuntimeError) and nanovllm.LLM.generate"
    )
    run("-c", program)


def test_closed() -> None:
    llm = LLM("demo", **OPTIONS)
    llm.close()
    llm.close()
    for use in (lambda: llm.generate("text"), lambda: llm.add_request("text"), llm.step, lambda: llm.chat([])):
        with pytest.raises(RuntimeError, match="this engine is closed"):
            use()


def test_what_a_user_does_with_the_tokenizer_does_not_reach_prompts(llm: LLM) -> None:
    text = "one two three " * 10
    [before] = generate(llm, text)
    assert len(before.prompt_token_ids) > 16
    mine = llm.tokenizer
    mine([text, "one"], truncation=True, max_length=16, padding="max_length")
    mine.backend_tokenizer.enable_truncation(max_length=16)
    [after] = generate(llm, text)
    assert after.prompt_token_ids == before.prompt_token_ids
    assert llm.tokenizer is mine
    template = mine.chat_template
    try:
        mine.chat_template = "say {{ messages[0]['content'] }}"
        assert llm.chat([{"role": "user", "content": "hi"}], FIXED, use_tqdm=False)[0].prompt == "say hi"
    finally:
        mine.chat_template = template
