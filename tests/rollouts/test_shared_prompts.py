"""Common beginnings of prompts are computed once, with blocks as large as on a GPU; tokens and scores stay the same."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from stepping import drain, tokens_of
from tiny_policy import OPTIONS, VOCAB, Policy

from nanovllm import LLM, SamplingParams

LARGE_BLOCKS = {**OPTIONS, "kvcache_block_size": 128, "num_kvcache_blocks": 40}
PROMPT = [number * 7 % VOCAB for number in range(500)]


@pytest.fixture(scope="module", params=[{"tensor_parallel_size": 2}, {"kv_cache_dtype": "fp8"}], ids=str)
def llm(request: pytest.FixtureRequest, policies: tuple[Policy, Policy]) -> Iterator[LLM]:
    with LLM(policies[0].folder, **LARGE_BLOCKS, **request.param) as llm:
        yield llm


def apart(params: list[SamplingParams]) -> list[SamplingParams]:
    """Parameters like these for requests that share nothing."""
    return [replace(param, cache_salt=str(number)) for number, param in enumerate(params)]


def num_computed(llm: LLM) -> int:
    return llm.engine.computed[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["n", "a step apart"])
def test_a_group_computes_its_prompt_once(llm: LLM, way: str) -> None:
    """Eight samples of one prompt, each with its own seed."""
    prompt = [len(way), *PROMPT]
    params = [SamplingParams(max_tokens=8, ignore_eos=True, seed=number) for number in range(8)]
    before = num_computed(llm)
    if way == "n":
        [output] = llm.generate([prompt], replace(params[0], n=8), use_tqdm=False)
        found = [completion.token_ids for completion in output.outputs]
    else:
        outputs = [output for param in params if llm.add_request(prompt, param) >= 0 for output in llm.step()]
        found = [tokens for _, tokens in sorted(tokens_of(outputs + drain(llm)).items())]
    assert num_computed(llm) - before == len(prompt) + 7
    assert found == [output.token_ids for output in llm.generate([prompt] * 8, apart(params), use_tqdm=False)]


def test_groups_in_a_crowd(llm: LLM) -> None:
    """More prompts than fit, of which many begin alike: rows wait, pass each other and are preempted."""
    prompts = [[*PROMPT[: 90 + 37 * (number % 5)], number % 3, *PROMPT[: 11 * (number % 7)]] for number in range(30)]
    params = [SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)] * 30
    outputs, expected = (llm.generate(prompts, given, use_tqdm=False) for given in (params, apart(params)))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    llm.engine.scheduler.check_integrity()
