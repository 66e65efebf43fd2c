"""Ends of outputs, their number for a request, and what else comes with them."""

import json
import shutil
from pathlib import Path

import pytest
from sampling_engines import DEMO, PROMPT, Engines

from nanovllm import LLM, SamplingParams, StructuredOutput
from nanovllm.outputs import RequestOutput

SEEDED = {"temperature": 0.8, "seed": 1, "max_tokens": 60}


@pytest.fixture(scope="module")
def llm(engines: Engines) -> LLM:
    return engines.get()


@pytest.fixture(scope="module")
def plain(llm: LLM) -> RequestOutput:
    return one(llm)


def one(llm: LLM, prompt: str = PROMPT, **options: object) -> RequestOutput:
    (output,) = llm.generate([prompt], SamplingParams(**{**SEEDED, **options}), use_tqdm=False)  # type: ignore[arg-type]
    return output


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("begin", [0, 3, 7, 20, 41, 90])
def test_stop_strings_end_the_text_where_they_begin(llm: LLM, plain: RequestOutput, begin: int, include: bool) -> None:
    """Whatever piece of the plain text is the stop string, also across tokens."""
    text = plain.text
    stop = text[begin : begin + 5]
    output = one(llm, stop=["never to be found", stop], include_stop_str_in_output=include)
    end = text.find(stop) + (len(stop) if include else 0)
    assert output.text == text[:end]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert plain.token_ids[: len(output.token_ids)] == output.token_ids
    assert stop in llm.tokenizer.decode(output.token_ids) and stop not in llm.tokenizer.decode(output.token_ids[:-1])


def test_an_output_that_a_stop_string_has_ended_does_not_go_on(llm: LLM, plain: RequestOutput) -> None:
    with pytest.raises(ValueError, match="there is nothing to go on with"):
        llm.add_request(PROMPT, SamplingParams(**SEEDED, stop=plain.text[3:8]), output_token_ids=plain.token_ids[:30])
    assert not llm.engine.book.rows


def test_stop_strings_of_bytes_that_are_split(llm: LLM) -> None:
    """A grammar makes the model write characters that its tokenizer has only as single bytes."""
    pytest.importorskip("llguidance")
    assert len(llm.tokenizer.encode("€漢")) == 6
    output = one(llm, structured_outputs=StructuredOutput(regex="a€漢b"), stop=["x", "€漢"])
    assert (output.text, output.outputs[0].stop_reason) == ("a", "€漢")
    assert one(llm, structured_outputs=StructuredOutput(regex="a€漢b"), stop="漢b").text == "a€"


def test_stop_token_ids(llm: LLM, plain: RequestOutput) -> None:
    token_id = plain.token_ids[9]
    at = plain.token_ids.index(token_id)
    output = one(llm, stop_token_ids=[token_id])
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", token_id)
    assert output.token_ids == plain.token_ids[: at + 1]
    assert output.text == llm.tokenizer.decode(plain.token_ids[:at])
    whole = one(llm, stop_token_ids=[token_id], include_stop_str_in_output=True)
    assert whole.text == llm.tokenizer.decode(output.token_ids)


def test_end_of_text_has_no_stop_reason(llm: LLM) -> None:
    eos = llm.model_config.eos_token_ids[0]
    output = one(llm, logit_bias={eos: 100})
    assert (output.token_ids, output.finish_reason, output.outputs[0].stop_reason) == ([eos], "stop", None)
    kept = one(llm, logit_bias={eos: 100}, ignore_eos=True, max_tokens=3, skip_special_tokens=False)
    assert kept.token_ids == [eos] * 3 and kept.text == llm.tokenizer.decode([eos]) * 3
    assert one(llm, logit_bias={eos: 100}, ignore_eos=True, stop_token_ids=[eos]).outputs[0].stop_reason == eos


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_end_that_the_tokenizer_names_is_one(tmp_path: Path, replicas: int) -> None:
    """The configuration names another one, as that of a base model does beside the tokenizer of its fine-tuning."""
    folder = shutil.copytree(DEMO, tmp_path / "model")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 1021}), encoding="utf-8")
    with LLM(str(folder), device="cpu", num_kvcache_blocks=64, data_parallel_size=replicas) as llm:
        end = llm.tokenizer.eos_token_id
        assert llm.model_config.eos_token_ids == (1021, end)
        likely = {"logit_bias": {end: 100}}
        assert (one(llm, **likely).token_ids, one(llm, **likely).finish_reason) == ([end], "stop")
        assert one(llm, **likely, ignore_eos=True, max_tokens=3).token_ids == [end] * 3
        assert one(llm, **likely, min_tokens=3).token_ids.index(end) == 3
        pytest.importorskip("llguidance")
        grammar = StructuredOutput(regex="a+")
        assert one(llm, **likely, structured_outputs=grammar).finish_reason == "stop"


def test_min_tokens(llm: LLM, plain: RequestOutput) -> None:
    eos = llm.model_config.eos_token_ids[0]
    output = one(llm, logit_bias={eos: 100}, min_tokens=7)
    assert len(output.token_ids) == 8 and eos not in output.token_ids[:-1]
    stop = plain.text[3:6]
    late = one(llm, stop=stop, min_tokens=50)
    assert len(late.token_ids) >= 50
    assert one(llm, min_tokens=60).token_ids == plain.token_ids, "what is suppressed would not have been drawn anyway"


@pytest.mark.parametrize("allowed", [[89], [0, 89]], ids=["the word's token alone", "another too"])
def test_bad_words_that_leave_nothing_end_the_text(llm: LLM, allowed: list[int]) -> None:
    """A "z" that ends the prompt counts for nothing."""
    prompt = PROMPT + " zz"
    assert llm.tokenizer.encode(prompt)[-1] == 89
    options = {"logit_bias": {89: 50.0}, "ignore_eos": True, "max_tokens": 6}
    output = one(llm, prompt, bad_words=["zz"], allowed_token_ids=allowed, **options)
    if allowed == [89]:
        assert output.token_ids[0] == 89 and len(output.token_ids) == 2
        assert output.finish_reason == "abort"
        assert output.outputs[0].stop_reason == "allowed_token_ids, bad_words: they left no token to sample"
        watched = one(llm, bad_words=["zz"], allowed_token_ids=allowed, stop="Paris", **options)
        assert (watched.token_ids, watched.text) == (output.token_ids, output.text)
    else:
        assert (output.token_ids, output.finish_reason) == ([89, 0, 89, 0, 89, 0], "length")


def test_bad_words(llm: LLM, plain: RequestOutput) -> None:
    for word in (" was", "named Lily"):
        assert word in plain.text
        output = one(llm, bad_words=[word])
        assert word not in output.text and output.finish_reason != "abort"


def test_text_options(llm: LLM) -> None:
    assert one(llm, detokenize=False).text == ""
    eos = llm.model_config.eos_token_ids[0]
    shown = one(llm, seed=3, logit_bias={eos: 30}, ignore_eos=True, skip_special_tokens=False)
    assert llm.tokenizer.eos_token in shown.text


def test_n_completions_share_the_prompt(llm: LLM) -> None:
    prompt = PROMPT * 20
    output = one(llm, prompt, n=5, max_tokens=12, logprobs=1, prompt_logprobs=0)
    assert [completion.index for completion in output.outputs] == list(range(5))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 5
    for index, completion in enumerate(output.outputs):
        alone = one(llm, prompt, seed=1 + index, max_tokens=12)
        assert completion.token_ids == alone.token_ids and completion.text == alone.text
        assert completion.logprobs is not None and len(completion.logprobs) == 12
    assert output.prompt_logprobs is not None and all(output.prompt_logprobs[1:])
    assert llm.is_finished()


def test_greedy_duplicates_are_allowed(llm: LLM) -> None:
    output = one(llm, n=3, temperature=0, seed=None, max_tokens=5)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 1


def test_abort_ends_all_completions(llm: LLM) -> None:
    for steps in (0, 1, 4):
        request = llm.add_request(PROMPT, SamplingParams(n=3, max_tokens=50, ignore_eos=True))
        outputs = []
        for _ in range(steps):
            outputs += llm.step()
        llm.abort(request)
        while not llm.is_finished():
            outputs += llm.step()
        assert sorted(o.index for o in outputs if o.finished) == [0, 1, 2]
        assert all((o.finish_reason, o.new_token_ids) == ("abort", []) for o in outputs if o.finished)
        assert request not in llm.engine.book.rows


def test_metrics(llm: LLM) -> None:
    metrics = one(llm, max_tokens=5, ignore_eos=True).metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time
    assert metrics.queued == metrics.first_scheduled_time - metrics.arrival_time
    assert metrics.time_to_first_token == metrics.first_token_time - metrics.arrival_time
    assert len(metrics.token_times) == 5 and metrics.token_times == sorted(metrics.token_times)
    assert metrics.first_token_time == metrics.token_times[0] and metrics.finished_time == metrics.token_times[-1]
    assert metrics.time_per_output_token is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {1030: 1.0}}, "logit_bias.*1030.*vocab_size=1030"),
        ({"allowed_token_ids": [0, 5000]}, "allowed_token_ids.*5000.*vocab_size=1030"),
        ({"stop_token_ids": [1030]}, "stop_token_ids.*1030"),
        ({"prompt_logprobs": 21}, r"prompt_logprobs=21: must be in 0..20 \(max_logprobs\)"),
        ({"logprobs": -1}, r"logprobs=-1: must be in 0..20 \(max_logprobs\)"),
    ],
)
def test_ids_outside_the_vocabulary(llm: LLM, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one(llm, **options)
    assert llm.is_finished()


def test_what_needs_a_tokenizer(engines: Engines) -> None:
    llm = engines.get(skip_tokenizer_init=True)
    for options in ({"stop": "x"}, {"bad_words": "x"}):
        with pytest.raises(ValueError, match="needs a tokenizer"):
            llm.generate([[1, 2]], SamplingParams(**options), use_tqdm=False)
    (output,) = llm.generate([[1, 2]], SamplingParams(logprobs=1, max_tokens=2), use_tqdm=False)
    assert output.text == "" and next(iter((output.outputs[0].logprobs or [{}])[0].values())).decoded_token is None
