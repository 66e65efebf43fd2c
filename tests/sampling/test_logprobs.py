"""Log-probabilities are those of the reference's float32 softmax, of outputs and of prompts, however they were
computed."""

import copy
import pickle
from dataclasses import asdict
from typing import Any

import pytest
import torch
from sampling_engines import Engines, reference_logits

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import LogprobsList, RequestOutput

PROMPTS = ["Once upon a time there was a young rabbit named Lily. She lived", "The capital of France is", "7 + 5 ="]
TOLERANCE = 2e-4


def check(found: LogprobsList, token_ids: list[int], logits: torch.Tensor, k: int, llm: LLM) -> None:
    """`logits` [n, vocab] stand before each of token_ids."""
    logprobs = logits.log_softmax(1)
    assert len(found) == len(token_ids)
    for at, (token_id, row) in enumerate(zip(token_ids, found, strict=True)):
        assert row is not None
        assert next(iter(row)) == token_id
        top = logprobs[at].topk(k) if k else None
        assert len(row) in (k, k + 1)
        for place in range(k):
            assert top is not None
            listed = next(token for token in row.values() if token.rank == place + 1)
            assert listed.logprob == pytest.approx(float(top.values[place]), abs=TOLERANCE)
        for other, token in row.items():
            assert token.logprob == pytest.approx(float(logprobs[at, other]), abs=TOLERANCE)
            assert token.decoded_token == llm.tokenizer.decode([other])
        rank = int((logprobs[at] > logprobs[at, token_id] + TOLERANCE).sum()) + 1
        close = int((logprobs[at] > logprobs[at, token_id] - TOLERANCE).sum())
        assert rank <= row[token_id].rank <= max(rank, close)


def check_output(output: RequestOutput, params: SamplingParams, llm: LLM) -> None:
    prompt, generated = output.prompt_token_ids, output.outputs[0].token_ids
    logits = reference_logits(prompt + generated)
    begin = len(prompt)
    if params.logprobs is not None:
        found = output.outputs[0].logprobs
        assert found is not None
        check(found, generated, logits[begin - 1 : -1], params.logprobs, llm)
        own = logits[begin - 1 : -1].log_softmax(1).gather(1, torch.tensor(generated).unsqueeze(1)).sum()
        assert output.outputs[0].cumulative_logprob == pytest.approx(float(own), abs=1e-3)
    else:
        assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None
    if params.prompt_logprobs is not None:
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        check(output.prompt_logprobs[1:], prompt[1:], logits[: begin - 1], params.prompt_logprobs, llm)
        assert output.num_cached_tokens == 0
    else:
        assert output.prompt_logprobs is None


SETTINGS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks": {"tensor_parallel_size": 2},
    "chunked": {"max_num_batched_tokens": 16},
    "preempted": {"num_kvcache_blocks": 7, "max_model_len": 112, "disable": ("lookahead",)},
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_against_a_float32_softmax(engines: Engines, options: dict[str, Any]) -> None:
    llm = engines.get(**options)
    base: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.3}
    asked = [
        {"logprobs": 0, "seed": 1},
        {"logprobs": 5, "seed": 2, "top_k": 10, "repetition_penalty": 1.5},
        {"logprobs": 20, "prompt_logprobs": 1, "seed": 3},
        {"prompt_logprobs": 7, "seed": 4},
        {"prompt_logprobs": 0, "logprobs": 2, "temperature": 0.0},
        {"seed": 6},
    ]
    for _ in range(2):  # the second time with the prompts in the prefix cache
        params = [SamplingParams(**{**base, **one}) for one in asked]
        texts = [PROMPTS[i % 3] * (1 + i % 3) for i in range(len(asked))]
        for output, one in zip(llm.generate(texts, params, use_tqdm=False), params, strict=True):
            check_output(output, one, llm)


def copies(output: Any) -> list[Any]:
    return [pickle.loads(pickle.dumps(output)), copy.deepcopy(output), pickle.loads(pickle.dumps(copy.copy(output)))]


def test_outputs_can_be_sent_and_copied(engines: Engines) -> None:
    """To another process, say, which has no engine; and without what others had in the same steps."""
    llm = engines.get()
    asked = [{"logprobs": 2, "prompt_logprobs": 1, "n": 2}, {"logprobs": 5}, {"prompt_logprobs": 0}]
    params = [SamplingParams(max_tokens=8, seed=3, ignore_eos=True, **one) for one in asked]
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        for again in copies(output):
            assert again == output
            assert [one.cumulative_logprob for one in again.outputs] == [o.cumulative_logprob for o in output.outputs]
        asdict(output)
    request = llm.add_request(PROMPTS[0], params[0])
    count = 0
    while not llm.is_finished():
        for gained in llm.step():
            assert gained.request_id == request and gained.logprobs is not None
            assert [next(iter(row or {})) for row in gained.logprobs] == gained.new_token_ids
            count += len(gained.new_token_ids)
            assert all(list(again.logprobs) == list(gained.logprobs) for again in copies(gained))
    assert count == 2 * 8
