"""exact_bits on a GPU: int32 views of all log-probabilities of random requests in random situations, on shapes of
Qwen3-0.6B, 8B and 30B-A3B with few layers and one of odd sizes. Ranks take turns on a GPU where there are too few."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput

pytestmark = pytest.mark.gpu

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.6B": ("Qwen3-0.6B", {"num_hidden_layers": 4}),
    "8B": ("Qwen3-8B", {"num_hidden_layers": 2}),
    "odd": ("Qwen3-0.6B", {
        "num_hidden_layers": 3, "hidden_size": 896, "intermediate_size": 4872, "num_attention_heads": 14,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32008, "eos_token_id": 0}),
    "experts": ("Qwen3-30B-A3B", {"num_hidden_layers": 2}),
}  # fmt: skip
COMMON: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "share_gpus": True, "max_model_len": 3328,
    "max_num_seqs": 64, "num_kvcache_blocks": 1024, "exact_bits": "batch",
}  # fmt: skip
OPTIMISATIONS = ("pdl", "async_scheduling", "longest_first")
Request = tuple[list[int], SamplingParams]
Bits = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Extent:
    """Extent of a run: requests, situations, and engines of drawn options that these are spread over."""

    requests: int
    situations: int
    engines: int


EXTENTS = [Extent(40, 6, 2), pytest.param(Extent(200, 30, 4), marks=pytest.mark.slow)]


def draw_requests(vocab_size: int, count: int, longest: int = 3000) -> list[Request]:
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


def draw_engine(draw: random.Random, number: int) -> dict[str, Any]:
    """Options of an engine; every second one is eager, of every four two have so little memory that they preempt."""
    disabled, is_tight = [name for name in OPTIMISATIONS if draw.random() < 0.3], number % 4 in (1, 2)
    return {
        "enforce_eager": number % 2 == 1,
        "num_kvcache_blocks": draw.randint(27, 30) if is_tight else 1024,
        "max_num_seqs": draw.choice((16, 64, 256)),
        "max_num_batched_tokens": int(256 * 40 ** draw.random()),
        "enable_prefix_caching": draw.random() < 0.8,
        "disable": (*disabled, *["lookahead"] * is_tight),
    }


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


def run_in_bursts(llm: LLM, requests: Sequence[Request], draw: random.Random) -> list[Bits]:
    """Requests come while others run, and beside them some that are taken away again."""
    found: list[Bits] = [([], []) for _ in requests]
    number_of: dict[int, int] = {}
    passing: list[int] = []
    while len(number_of) < len(requests) or llm.has_unfinished_requests():
        for _ in range(draw.randint(0 if llm.has_unfinished_requests() else 1, 8)):
            if len(number_of) < len(requests):
                prompt, params = requests[len(number_of)]
                number_of[llm.add_request(prompt, params)] = len(number_of)
        if draw.random() < 0.1:
            prompt = [draw.randrange(5000) for _ in range(draw.randint(1, 900))]
            passing.append(llm.add_request(prompt, SamplingParams(max_tokens=40, ignore_eos=True)))
        if passing and draw.random() < 0.1:
            llm.abort(passing.pop())
        for gained in llm.step():
            if (number := number_of.get(gained.request_id)) is not None:
                found[number][0].extend(gained.new_token_ids)
                pairs = zip(gained.logprobs or (), gained.new_token_ids, strict=True)
                found[number][1].extend(as_bits(table[token].logprob) for table, token in pairs)
    return found


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

    def __init__(self, name: str, extent: Extent) -> None:
        self.model, self.overrides = SHAPES[name]
        self.extent = extent
        self.requests = draw_requests(self.overrides.get("vocab_size", 151936), extent.requests)
        with self.start(enable_prefix_caching=False) as llm:
            assert llm.engine_info()["attention_backend_reason"] == "exact_bits='batch'"
            self.expected = [run(llm, [request])[0] for request in self.requests]

    def start(self, **options: Any) -> LLM:
        return LLM(self.model, **{**COMMON, "hf_overrides": self.overrides, **options})

    def check(self, llm: LLM, kind: str, picked: list[int], draw: random.Random) -> None:
        """A situation: the requests `picked` at once, in bursts, or scored again with the tokens that they got."""
        requests, expected = ([each[i] for i in picked] for each in (self.requests, self.expected))
        if kind == "scored again":
            found = [(tokens, bits) for (tokens, _), bits in zip(expected, rescore(llm, requests, expected),
                                                                 strict=True)]  # fmt: skip
        else:
            found = run(llm, requests) if kind == "at once" else run_in_bursts(llm, requests, draw)
        assert_equal(found, expected, f"{kind}, {llm.config.disable}, {llm.engine_info()}")


@pytest.mark.parametrize("extent", EXTENTS, ids=["short", "long"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_no_bit_depends_on_the_situation(name: str, extent: Extent) -> None:
    draw, shape, num_preemptions = random.Random(name), Shape(name, extent), 0
    for number in range(extent.engines):
        with shape.start(**draw_engine(draw, number)) as llm:
            shape.check(llm, "at once", draw.sample(range(extent.requests), extent.requests), draw)
            for _ in range(number + extent.engines, extent.situations, extent.engines):
                kind = draw.choice(("at once", "in bursts", "scored again"))
                count = max(1, int(extent.requests ** draw.random()))
                shape.check(llm, kind, draw.sample(range(extent.requests), count), draw)
            num_preemptions += llm.engine.scheduler.num_preemptions
    assert num_preemptions


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SHAPES))
def test_several_ranks_by_themselves(name: str) -> None:
    model, overrides = SHAPES[name]
    requests = draw_requests(overrides.get("vocab_size", 151936), 24)
    with LLM(model, **{**COMMON, "hf_overrides": overrides, "tensor_parallel_size": 2}) as llm:
        alone = [run(llm, [request])[0] for request in requests]
        assert_equal(run(llm, requests), alone, "a crowd on two ranks")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "experts"])
def test_no_bit_depends_on_the_ranks(name: str) -> None:
    model, overrides = SHAPES[name]
    requests, expected = draw_requests(overrides.get("vocab_size", 151936), 16, 900), None
    for size in (1, 2, 4):
        if overrides.get("num_attention_heads", 16) % size:
            continue
        options = {"tensor_parallel_size": size, "num_kvcache_blocks": 256, "max_num_seqs": 16, "exact_bits": "tp"}
        with LLM(model, **{**COMMON, "hf_overrides": overrides, **options}) as llm:
            found = run(llm, requests)
            if expected is None:
                expected = found
                assert_equal([run(llm, [request])[0] for request in requests], expected, "alone")
            assert_equal(found, expected, f"{size} ranks")
