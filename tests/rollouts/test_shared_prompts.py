"""What prompts have in common is computed once, with blocks as large as on a GPU; tokens and scores stay the same."""

from collections.abc import Iterator

import pytest
from tiny_policy import OPTIONS, VOCAB, Policy

from nanovllm import LLM, SamplingParams

LARGE_BLOCKS = {**OPTIONS, "kvcache_block_size": 128, "num_kvcache_blocks": 40}
PROMPT = [number * 7 % VOCAB for number in range(500)]


@pytest.fixture(scope="module")
def sharing(policies: tuple[Policy, Policy]) -> Iterator[LLM]:
    with LLM(policies[0].folder, tensor_parallel_size=2, **LARGE_BLOCKS) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(policies: tuple[Policy, Policy]) -> Iterator[LLM]:
    with LLM(policies[0].folder, enable_prefix_caching=False, **LARGE_BLOCKS) as llm:
        yield llm


@pytest.mark.parametrize("length", [500, 512])
@pytest.mark.parametrize("way", ["n", "copies", "a step apart"])
def test_a_group_computes_its_prompt_once(sharing: LLM, alone: LLM, way: str, length: int) -> None:
    """Eight samples of one prompt, each with its own seed."""
    begin = 20 * len(way) + length  # no other case's
    prompt = (PROMPT * 4)[begin : begin + length]
    params = [SamplingParams(max_tokens=8, ignore_eos=True, seed=number) for number in range(8)]
    expected = [output.token_ids for output in alone.generate([prompt] * 8, params, use_tqdm=False)]
    before = sharing.engine.num_prefill_tokens
    if way == "n":
        params_of_all = SamplingParams(n=8, max_tokens=8, ignore_eos=True, seed=0)
        [output] = sharing.generate([prompt], params_of_all, use_tqdm=False)
        found = [completion.token_ids for completion in output.outputs]
    elif way == "copies":
        found = [output.token_ids for output in sharing.generate([prompt] * 8, params, use_tqdm=False)]
    else:
        gained: dict[int, list[int]] = {}
        for param in params:
            gained[sharing.add_request(prompt, param)] = []
            for step in sharing.step():
                gained[step.request_id] += step.new_token_ids
        while sharing.has_unfinished_requests():
            for step in sharing.step():
                gained[step.request_id] += step.new_token_ids
        found = [*gained.values()]
    assert found == expected
    assert sharing.engine.num_prefill_tokens - before == length + 7


def test_answers_to_a_question_compute_it_once(sharing: LLM, alone: LLM) -> None:
    question = [*PROMPT, *PROMPT]
    prompts = [[*question, *range(answer, answer + 5)] for answer in range(4)]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprob_start=len(question))
    before = sharing.engine.num_prefill_tokens
    outputs = sharing.generate(prompts, params, use_tqdm=False)
    assert sharing.engine.num_prefill_tokens - before <= 1340
    for output, expected in zip(outputs, alone.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None and expected.prompt_logprobs is not None
        for found, wanted, token in zip(
            output.prompt_logprobs[1000:], expected.prompt_logprobs[1000:], output.prompt_token_ids[1000:], strict=True
        ):
            assert found is not None and wanted is not None
            assert found[token].logprob == pytest.approx(wanted[token].logprob, abs=1e-4)


def test_groups_in_a_crowd(sharing: LLM, alone: LLM) -> None:
    """More prompts than fit, of which many begin alike: rows wait, pass each other and are preempted."""
    prompts = [[*PROMPT[: 90 + 37 * (number % 5)], number % 3, *PROMPT[: 11 * (number % 7)]] for number in range(48)]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    outputs, expected = (llm.generate(prompts, params, use_tqdm=False) for llm in (sharing, alone))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    sharing.engine.scheduler.check_integrity()
