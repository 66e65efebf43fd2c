"""Log-probabilities as a trainer needs them: of what the tokens were drawn from, and of the ids that were kept."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from processed_logits import processed
from stepping import drain
from tiny_policy import OPTIONS, VOCAB, Policy

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import CompletionOutput
from nanovllm.serve.formats.logprobs import LOWEST, read_line

PROMPT = [5, 17, 200, 31, 5, 9]
CASES: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 12, "top_p": 0.9},
    {"min_p": 0.05, "logprobs": 20},
    {"temperature": 1.2, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    {"temperature": 0.8, "repetition_penalty": 1.2, "top_p": 0.7, "logprobs": 3},
    {"allowed_token_ids": range(3, 6), "presence_penalty": 0.7, "frequency_penalty": 0.4},  # they come again
    {"logit_bias": {7: 2.5, 12: -4.0}, "allowed_token_ids": range(3, 40), "top_k": 9},
    {"temperature": 0, "presence_penalty": 1.5, "top_p": 0.5, "logprobs": 4},
    {"temperature": 0.6, "logprobs": -1},
    {"temperature": 1.1, "top_p": 0.9, "logprobs": -1},
    {},
]


@pytest.fixture(scope="module", params=[False, True], ids=["twins", "kernels"])
def single(request: pytest.FixtureRequest, policies: tuple[Policy, Policy]) -> Iterator[LLM]:
    with LLM(policies[0].folder, logprobs_mode="processed", **OPTIONS) as llm:
        if request.param:
            language = pytest.importorskip("triton.language")
            if type(language.zeros).__name__ != "InterpretedFunction":
                pytest.skip("triton was imported before tests/rollouts/conftest.py asked for its interpreter")
            from nanovllm.kernels import select_kernels

            runner = llm.engine.executor.runner
            runner.option_sampler._kernels = select_kernels("cpu", interpret=True)
        yield llm


def record_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every step's logits from here on."""
    model, seen = llm.engine.executor.runner.model, []  # type: ignore[attr-defined]
    compute = model.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(compute(hidden).clone())
        return seen[-1]

    monkeypatch.setattr(model, "logits", logits)
    return seen


def check(output: CompletionOutput, prompt: list[int], logits: torch.Tensor, options: dict[str, Any],
          tolerance: float) -> None:  # fmt: skip
    """`logits` [tokens, vocab]: those that each token was drawn from."""
    assert output.logprobs is not None and output.sampling_mask is not None
    assert len(output.logprobs) == len(output.sampling_mask) == len(output.token_ids)
    for at, token_id in enumerate(output.token_ids):
        expected, kept = processed(logits[at], prompt, output.token_ids[:at], **options)
        found = output.logprobs[at]
        assert found is not None and next(iter(found)) == token_id
        assert output.sampling_mask[at].tolist() == kept.nonzero().squeeze(1).tolist()
        for other, logprob in found.items():
            assert logprob.logprob == pytest.approx(float(expected[other]), abs=tolerance)
        most = options.get("logprobs", 0)
        most = VOCAB if most == -1 else most
        assert len(found) in (min(most, int(kept.sum())), most + 1)
        assert found[token_id].rank == int((expected > expected[token_id]).sum()) + 1


@pytest.mark.parametrize("options", CASES, ids=str)
def test_against_torch_on_the_same_logits(
    single: LLM, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_logits(single, monkeypatch)
    params = SamplingParams(**{"logprobs": 0, **options}, max_tokens=5, seed=5, sampling_mask=True)
    [output] = single.generate([PROMPT], params, use_tqdm=False)
    check(output.outputs[0], PROMPT, torch.cat(seen)[:5], options, tolerance=1e-5)


@pytest.mark.parametrize("logit", [-math.inf, math.nan])
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_a_token_of_logits_that_leave_nothing_has_no_probability(
    single: LLM, mode: str, logit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As weights that have diverged give them. JSON has no NaN."""
    model = single.engine.executor.runner.model  # type: ignore[attr-defined]
    compute = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: torch.full_like(compute(hidden), logit))
    params = SamplingParams(max_tokens=2, logprobs=1, logprobs_mode=mode, seed=5, prompt_logprobs=1, top_p=0.9)
    [output] = single.generate([PROMPT], params, use_tqdm=False)
    [completion] = output.outputs
    assert completion.cumulative_logprob == -math.inf
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    for found in (*completion.logprobs, *output.prompt_logprobs[1:]):
        assert found is not None and [one.logprob for one in found.values()] == [-math.inf]
    for position in range(2):
        line = completion.logprobs._rows.words(position)
        assert line is not None
        row = read_line(line.tobytes(), 1)
        assert (row.value, *(value for _, value in row.top)) == (LOWEST, LOWEST)


def test_together_as_alone(llm: LLM, policies: tuple[Policy, Policy]) -> None:
    """Any mixture of modes and numbers, on any number of ranks: what a request gets is its own."""
    common = {"max_tokens": 6, "sampling_mask": True, "logprobs_mode": "processed", "logprobs": 0}
    params = [SamplingParams(**{**common, **options}, seed=number) for number, options in enumerate(CASES)]
    params += [SamplingParams(logprobs=k, top_p=0.9, max_tokens=6, seed=2, prompt_logprobs=k) for k in (2, -1)]
    prompts = [[number, *PROMPT] for number in range(len(params))]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, param, output, options in zip(prompts, params, together, CASES, strict=False):
        [alone] = llm.generate([prompt], param, use_tqdm=False)
        assert alone.token_ids == output.token_ids
        logits = policies[0].logits(prompt + output.token_ids)[len(prompt) - 1 : -1]
        check(output.outputs[0], prompt, logits, options, tolerance=1e-4)
    for prompt, output in zip(prompts[-2:], together[-2:], strict=True):
        raw = policies[0].logits(prompt + output.token_ids).double().log_softmax(1)
        assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
        for at, found in enumerate([*output.prompt_logprobs[1:], *output.outputs[0].logprobs]):
            assert found is not None
            assert all(one.logprob == pytest.approx(float(raw[at, other]), abs=1e-4) for other, one in found.items())
    assert len(together[-1].outputs[0].logprobs[0]) == len(together[-1].prompt_logprobs[1]) == VOCAB  # type: ignore


def test_penalties_count_what_an_output_begins_with(llm: LLM) -> None:
    """As where a row was preempted, or its request comes from a replica that was lost."""
    params = SamplingParams(temperature=0, frequency_penalty=0.5, max_tokens=12, ignore_eos=True, logprobs=0,
                            logprobs_mode="processed", allowed_token_ids=range(3, 6))  # fmt: skip
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    llm.add_request(PROMPT, params, output_token_ids=output.token_ids[:8])
    rest = [next(iter(row.values())).logprob for gained in drain(llm) for row in gained.logprobs or () if row]
    whole = [next(iter(row.values())).logprob for row in output.outputs[0].logprobs or () if row]
    assert rest == pytest.approx(whole[8:], abs=1e-5)


def test_scoring_takes_its_context_from_the_cache(llm: LLM, policies: tuple[Policy, Policy]) -> None:
    """prompt_logprob_start: four answers to one question compute the question once; the values are those of a whole
    pass."""
    question = [(7 * i * i + 3 * i) % VOCAB for i in range(1000)]
    prompts = [[*question, answer, 2, 3, answer, 5] for answer in range(4)]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprob_start=1000)
    before = llm.engine.computed[0]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.computed[0] - before <= 1340
    for prompt, output in zip(prompts, outputs, strict=True):
        rows = output.prompt_logprobs
        assert rows is not None and len(rows) == 1005 and rows[999] is None
        expected = policies[0].logits(prompt).log_softmax(1)
        for at in range(1000, 1005):
            assert rows[at][prompt[at]].logprob == pytest.approx(float(expected[at - 1, prompt[at]]), abs=1e-4)


@pytest.mark.parametrize("start", [1, 16, 17, 49, 80])
def test_any_start(llm: LLM, start: int) -> None:
    prompt = [(5 * i * i + i) % VOCAB for i in range(50)]
    [whole] = llm.generate([prompt], SamplingParams(max_tokens=2, prompt_logprobs=1, seed=1), use_tqdm=False)
    params = SamplingParams(max_tokens=2, prompt_logprobs=1, seed=1, prompt_logprob_start=start)
    [part] = llm.generate([prompt], params, use_tqdm=False)
    assert part.token_ids == whole.token_ids
    assert part.prompt_logprobs is not None and whole.prompt_logprobs is not None
    assert [row is not None for row in part.prompt_logprobs] == [at >= max(1, start) for at in range(50)]
    for at in range(max(1, start), 50):
        one, other = part.prompt_logprobs[at], whole.prompt_logprobs[at]
        assert one is not None and other is not None and one.keys() == other.keys()
        assert one[prompt[at]].logprob == pytest.approx(other[prompt[at]].logprob, abs=1e-5)
