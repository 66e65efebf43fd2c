"""exact_bits on a GPU: int32 views of all log-probabilities, over random requests in random situations, on shapes of
Qwen3-0.6B and 8B with few layers and on one of odd sizes. Ranks take turns on a GPU where there are too few."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.6B": ("Qwen3-0.6B", {"num_hidden_layers": 4}),
    "8B": ("Qwen3-8B", {"num_hidden_layers": 2}),
    "odd": ("Qwen3-0.6B", {
        "num_hidden_layers": 3, "hidden_size": 896, "intermediate_size": 4872, "num_attention_heads": 14,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32008, "eos_token_id": 0}),
}  # fmt: skip
COMMON: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "share_gpus": True, "max_model_len": 3328,
    "max_num_seqs": 64, "num_kvcache_blocks": 1024, "attention_backend": "triton",
}  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager, small chunks": {"enforce_eager": True, "max_num_batched_tokens": 200},
    "preempting": {"num_kvcache_blocks": 40, "max_num_batched_tokens": 777, "disable": ("lookahead",)},
}
NUM_REQUESTS, NUM_SITUATIONS = 60, 6
Request = tuple[list[int], SamplingParams]
Bits = tuple[list[int], list[int]]


def draw_requests(vocab_size: int, count: int = NUM_REQUESTS, longest: int = 3000) -> list[Request]:
    """Greedy and sampled in turn; a third begin alike."""
    draw = random.Random(5)
    shared = [draw.randrange(vocab_size) for _ in range(600)]
    requests = []
    for i in range(count):
        length = int(longest ** draw.random())
        prompt = [draw.randrange(vocab_size) for _ in range(length)]
        if i % 3 == 0:
            prompt = (shared[: draw.choice((128, 256, 600))] + prompt)[:longest]
        params = SamplingParams(
            temperature=float(i % 2), max_tokens=int(200 ** draw.random()), seed=i, ignore_eos=True, logprobs=0
        )
        requests.append((prompt, params))
    return requests


def as_bits(logprob: float) -> int:
    return int(np.float32(logprob).view(np.int32))


def sampled_bits(output: RequestOutput) -> Bits:
    tables = output.outputs[0].logprobs
    assert tables is not None
    return output.token_ids, [as_bits(table[token].logprob) for table, token in zip(tables, output.token_ids,
                                                                                    strict=True)]  # fmt: skip


def run(llm: LLM, requests: Sequence[Request]) -> list[Bits]:
    prompts, params = map(list, zip(*requests, strict=True))
    return [sampled_bits(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def rescore(llm: LLM, requests: Sequence[Request], expected: Sequence[Bits]) -> list[list[int]]:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    whole = [prompt + tokens for (prompt, _), (tokens, _) in zip(requests, expected, strict=True)]
    found = []
    for (prompt, _), output in zip(requests, llm.generate(whole, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        own = list(zip(output.prompt_logprobs, output.prompt_token_ids, strict=True))[len(prompt) :]
        found.append([as_bits(table[token].logprob) for table, token in own if table is not None])
    return found


def assert_equal(found: Sequence[Bits], expected: Sequence[Bits], what: object) -> None:
    wrong = [i for i, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    assert not wrong, f"{what}: {len(wrong)} of {len(expected)} requests differ: {wrong[:10]}"


class Shape:
    """Engines of one shape, and the reference: each request alone, by graphs, without prefix cache."""

    def __init__(self, name: str) -> None:
        self.model, self.overrides = SHAPES[name]
        self.requests = draw_requests(self.overrides.get("vocab_size", 151936))
        with self.start(enable_prefix_caching=False) as llm:
            self.expected = [run(llm, [request])[0] for request in self.requests]

    def start(self, **options: Any) -> LLM:
        return LLM(self.model, **{**COMMON, "exact_bits": "batch", "hf_overrides": self.overrides, **options})


@pytest.fixture(scope="module", params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> Iterator[Shape]:
    yield Shape(request.param)


@pytest.mark.parametrize("engine", list(ENGINES))
def test_no_bit_depends_on_the_situation(shape: Shape, engine: str) -> None:
    draw = random.Random(engine)
    with shape.start(**ENGINES[engine]) as llm:
        assert_equal(run(llm, shape.requests), shape.expected, "all at once")
        for _ in range(NUM_SITUATIONS):
            picked = draw.sample(range(len(shape.requests)), draw.randint(1, len(shape.requests)))
            found = run(llm, [shape.requests[i] for i in picked])
            assert_equal(found, [shape.expected[i] for i in picked], f"{len(picked)} of them, prefixes cached")
        scores = rescore(llm, shape.requests, shape.expected)
        assert scores == [scores for _, scores in shape.expected], "scored again as prompts"


def test_several_ranks_by_themselves(shape: Shape) -> None:
    requests = shape.requests[:24]
    with shape.start(tensor_parallel_size=2, num_kvcache_blocks=512) as llm:
        alone = [run(llm, [request])[0] for request in requests]
        assert_equal(run(llm, requests), alone, "a crowd on two ranks")


def test_no_bit_depends_on_the_ranks(shape: Shape) -> None:
    requests, expected = draw_requests(shape.overrides.get("vocab_size", 151936), 16, 900), None
    for size in (1, 2, 4):
        if shape.overrides.get("num_attention_heads", 16) % size:
            continue
        options = {"tensor_parallel_size": size, "num_kvcache_blocks": 256, "max_num_seqs": 16, "exact_bits": "tp"}
        with shape.start(**options) as llm:
            found = run(llm, requests)
            if expected is None:
                expected = found
                assert_equal([run(llm, [request])[0] for request in requests], expected, "alone")
            assert_equal(found, expected, f"{size} ranks")
