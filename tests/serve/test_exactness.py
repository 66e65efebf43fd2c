"""Over HTTP the tokens and texts are LLM.generate's: streamed or not, in a crowd."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serving import COMPLETIONS, DEMO, Server, streamed

from nanovllm import LLM, SamplingParams, StructuredOutput

_WORDS = "Once upon a time there was the capital of France Monday Tuesday 1 2 3 hot cold Paris é 漢 🙂".split()
NUM_REQUESTS = 60


def random_requests() -> list[dict[str, Any]]:
    """Prompts and sampling options of all kinds that do not depend on other requests."""
    rng = random.Random(7)
    requests = []
    for number in range(NUM_REQUESTS):
        prompt = " ".join(rng.choices(_WORDS, k=rng.randint(1, 12)))
        request: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(1, 24), "seed": number}
        request["temperature"] = rng.choice((0, 0, 0.7, 1.5))
        extras: list[dict[str, Any]] = [
            {},
            {"top_p": 0.9, "top_k": 40},
            {"stop": ["e", "the th"]},
            {"stop": [" a"], "include_stop_str_in_output": True},
            {"n": 3},
            {"presence_penalty": 0.5, "repetition_penalty": 1.2},
            {"min_tokens": 1, "ignore_eos": True},
            {"logit_bias": {"5": 3.0}},
            {"structured_outputs": {"regex": "[a-z]{3,8}"}},
            {"stop_token_ids": [32, 101, 256], "skip_special_tokens": False},
        ]
        requests.append(request | extras[number % len(extras)])
    return requests


Texts = list[tuple[str, list[int], str | None]]
"""Text, token ids and finish reason of each completion."""


@pytest.fixture(scope="module")
def expected() -> list[Texts]:
    requests, params = random_requests(), []
    for request in requests:
        fields = {name: value for name, value in request.items() if name != "prompt"}
        if (wanted := fields.get("structured_outputs")) is not None:
            fields["structured_outputs"] = StructuredOutput(**wanted)
        params.append(SamplingParams(**fields))
    with LLM(str(DEMO), device="cpu", max_num_seqs=32, num_kvcache_blocks=1024) as llm:
        outputs = llm.generate([request["prompt"] for request in requests], params, use_tqdm=False)
    return [[(one.text, one.token_ids, one.finish_reason) for one in output.outputs] for output in outputs]


def ask(client: httpx.Client, request: dict[str, Any]) -> Texts:
    answer = client.post(COMPLETIONS, json=request | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return [(one["text"], one["token_ids"], one["finish_reason"]) for one in answer.json()["choices"]]


def ask_streamed(client: httpx.Client, request: dict[str, Any]) -> Texts:
    found: list[Any] = [["", [], None] for _ in range(request.get("n", 1))]
    for event in streamed(client, COMPLETIONS, request | {"return_token_ids": True}):
        for choice in event["choices"]:
            one = found[choice["index"]]
            assert one[2] is None, "text after the end"
            one[0] += choice["text"]
            one[1] += choice.get("token_ids", [])
            one[2] = choice["finish_reason"]
    return [tuple(one) for one in found]


@pytest.mark.parametrize("how", [ask, ask_streamed])
def test_in_a_crowd(server: Server, expected: list[Texts], how: Any) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as client, ThreadPoolExecutor(NUM_REQUESTS) as pool:
        found = list(pool.map(lambda request: how(client, request), random_requests()))
    for request, one, wanted in zip(random_requests(), found, expected, strict=True):
        assert one == wanted, request


def test_several_prompts_answer_as_each_alone(served: httpx.Client, expected: list[Texts]) -> None:
    same = [number for number, request in enumerate(random_requests()) if request["temperature"] == 0][:6]
    prompts = [random_requests()[number]["prompt"] for number in same]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 8}
    together = [text for text, *_ in ask(served, body)]
    assert together == [ask(served, body | {"prompt": prompt})[0][0] for prompt in prompts]
