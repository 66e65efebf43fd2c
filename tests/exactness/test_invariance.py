"""A request's tokens do not depend on its neighbours, on chunks, cache, preemption, ranks, or order.

The reference of every comparison: each request alone, whole, in steps that wait for each other, without prefix cache.
Of FP8 keys and values: a key that another order of float32 sums moves across the border between two e4m3 is rare; what
it does to a score is within the bound of comparing.py for models of this size.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_model, save
from comparing import Expected, assert_same
from observing import StepWitness
from workload import BLOCK, LONGEST, ROOMY, Request, assert_outputs, make_requests, run, shuffles, tokens_alone

from nanovllm import LLM, SamplingParams

ONE_REQUEST = LONGEST // BLOCK  # blocks


@dataclass(frozen=True)
class Setting:
    """An engine, and what is to be seen of it so that it is the scenario that it is named for."""

    options: dict[str, Any]
    chunks: bool = False
    preempts: bool = False
    crowd: int = 2
    """Rows that are together in some step."""
    model: dict[str, Any] = field(default_factory=dict)


COMMON: dict[str, Any] = {**ROOMY, "max_num_batched_tokens": 1024}
TIGHT = {"num_kvcache_blocks": ONE_REQUEST, "disable": ("lookahead",)}
TWO, FOUR = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}
SETTINGS = {
    "defaults": Setting({}, crowd=12),
    "synchronous, no prefix cache": Setting(
        {"disable": ("async_scheduling",), "enable_prefix_caching": False}, crowd=12),
    "one slot": Setting({"max_num_seqs": 1}, crowd=1),
    "one block a step": Setting({"max_num_batched_tokens": BLOCK}, chunks=True),
    "fewer tokens than rows": Setting({"max_num_batched_tokens": 3, "max_num_seqs": 8}, chunks=True, crowd=3),
    "blocks of 48, no chunk left over": Setting(
        {"kvcache_block_size": 48, "max_num_batched_tokens": 50, "max_num_partial_prefills": 1}, chunks=True),
    "room for one request": Setting(TIGHT, preempts=True),
    "room for one, chunked": Setting({**TIGHT, "max_num_batched_tokens": BLOCK}, chunks=True, preempts=True),
    "room for one, looking ahead": Setting({"num_kvcache_blocks": ONE_REQUEST}),
    "two ranks, tight": Setting({**TIGHT, **TWO, "max_num_batched_tokens": 20}, chunks=True, preempts=True),
    "four ranks, tight": Setting({**TIGHT, **FOUR, "max_num_batched_tokens": 32}, chunks=True, preempts=True),
    "room for one, chunked, fp8": Setting(
        {**TIGHT, "max_num_batched_tokens": 20, "kv_cache_dtype": "fp8"}, chunks=True, preempts=True),
    "two ranks, fp8": Setting({**TWO, "max_num_batched_tokens": 64, "kv_cache_dtype": "fp8"}, chunks=True),
    "two ranks, heads cut unevenly": Setting(
        {**TWO, "max_num_batched_tokens": 64}, chunks=True,
        model={"num_attention_heads": 6, "num_key_value_heads": 3}),
    "three ranks, tied, two heads in a group of six": Setting(
        {**TIGHT, "tensor_parallel_size": 3, "max_num_batched_tokens": 64, "num_kvcache_blocks": 8}, chunks=True,
        preempts=True, model={"num_attention_heads": 6, "num_key_value_heads": 1, "tie_word_embeddings": True,
                              "intermediate_size": 131}),  # no rank count divides it: padded
}  # fmt: skip
NIGHTLY = {"four ranks, tight", "two ranks, fp8", "two ranks, heads cut unevenly"}
REQUESTS = make_requests()


def in_settings(*by_day: str) -> pytest.MarkDecorator:
    """Marks a test of an engine in all settings; if some are named, the others are nightly."""
    nightly = NIGHTLY | (SETTINGS.keys() - by_day if by_day else set())
    params = [pytest.param(name, marks=[pytest.mark.slow] * (name in nightly)) for name in SETTINGS]
    return pytest.mark.parametrize("case", params, indirect=True, scope="module")


class Models:
    """Checkpoints by their configuration, with the reference's texts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, tuple[str, list[Expected]]] = {}

    def get(self, config: dict[str, Any], kv_cache_dtype: str = "auto") -> tuple[str, list[Expected]]:
        key = repr((sorted(config.items()), kv_cache_dtype))
        if key not in self._made:
            path = str(save(make_model(seed=1, **config), self._folder / str(len(self._made))))
            self._made[key] = (path, tokens_alone(path, REQUESTS, kv_cache_dtype=kv_cache_dtype))
        return self._made[key]


@dataclass
class Case:
    llm: LLM
    witness: StepWitness
    setting: Setting
    expected: list[Expected]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, models: Models) -> Iterator[Case]:
    setting = SETTINGS[request.param]
    path, expected = models.get(setting.model, setting.options.get("kv_cache_dtype", "auto"))
    with LLM(path, **{**COMMON, **setting.options}) as llm:
        yield Case(llm, StepWitness().watch(llm), setting, expected)


def test_reference_is_varied(models: Models) -> None:
    """Texts that repeat one token would hide mistakes."""
    _, expected = models.get({})
    assert sum(len(set(one.token_ids)) for one in expected) > 0.5 * sum(len(one.token_ids) for one in expected)


@in_settings()
def test_in_a_crowd(case: Case) -> None:
    """All at once on a fresh engine: the prefix cache starts empty, and fills while they run."""
    outputs = run(case.llm, REQUESTS)
    assert_outputs(outputs, REQUESTS, case.expected)
    assert (case.witness.num_partial_chunks > 0) == case.setting.chunks
    assert (case.witness.num_rows_after_preemption > 0) == case.setting.preempts
    assert case.witness.most_rows >= case.setting.crowd


@in_settings("defaults", "synchronous, no prefix cache", "one block a step", "room for one request", "two ranks, tight",
             "room for one, chunked, fp8")  # fmt: skip
def test_in_any_order_and_any_call(case: Case) -> None:
    """A later call on the same engine finds more of its prompts in the cache."""
    caching = case.llm.config.enable_prefix_caching
    requests, expected = next(shuffles(REQUESTS, case.expected, seed=2))
    outputs = run(case.llm, requests)
    assert_outputs(outputs, requests, expected)
    assert any(output.num_cached_tokens for output in outputs) == caching


def begun(request: Request, expected: Expected, count: int = 8) -> tuple[Request, Expected]:
    """A request of so many tokens at most, and what is expected of it."""
    params = replace(request.params, max_tokens=min(count, request.params.max_tokens))
    ids, margins = expected.token_ids[:count], expected.margins[:count]
    return replace(request, params=params), replace(expected, token_ids=ids, margins=margins)


@in_settings("defaults", "synchronous, no prefix cache", "blocks of 48, no chunk left over",
             "room for one, looking ahead", "three ranks, tied, two heads in a group of six")  # fmt: skip
def test_alone(case: Case) -> None:
    """One after another, each twice: the second time from its own cached blocks, all but the last token."""
    for i in (0, 2, 4, 9, 11):  # one token, whole blocks, the longest, a block again behind another one
        request, one = begun(REQUESTS[i], case.expected[i])
        for repeat in range(2):
            outputs = run(case.llm, [request])
            assert_outputs(outputs, [request], [one], f"time {repeat}")
        block = case.llm.config.kvcache_block_size
        assert block is not None
        whole_blocks = (len(request.prompt) - 1) // block * block
        if case.llm.config.enable_prefix_caching:
            assert whole_blocks <= outputs[0].num_cached_tokens < len(request.prompt)
        else:
            assert outputs[0].num_cached_tokens == 0


@in_settings("defaults", "one slot", "fewer tokens than rows", "room for one, chunked", "two ranks, tight",
             "three ranks, tied, two heads in a group of six")  # fmt: skip
def test_in_a_loop_of_ones_own(case: Case) -> None:
    """add_request, step and abort: requests come and go at any time, and the rest do not notice."""
    draw = random.Random(4)
    llm, waiting = case.llm, list(enumerate(REQUESTS))
    draw.shuffle(waiting)
    request_of: dict[int, int] = {}
    gained: dict[int, list[int]] = {}
    ended: dict[int, str | None] = {}
    aborted: set[int] = set()
    while waiting or not llm.is_finished():
        for _ in range(draw.randrange(3)):
            if waiting:
                index, request = waiting.pop()
                request_id = llm.add_request(request.prompt, request.params)
                request_of[request_id], gained[request_id] = index, []
        for output in llm.step():
            assert output.request_id not in ended
            gained[output.request_id] += output.new_token_ids
            if output.finished:
                ended[output.request_id] = output.finish_reason
        alive = sorted(request_of.keys() - ended.keys())
        if alive and draw.random() < 0.08:
            aborted.add(draw.choice(alive))
            llm.abort(max(aborted))
        llm.engine.scheduler.check_integrity()
    assert ended.keys() == request_of.keys()
    assert 0 < sum(reason == "abort" for reason in ended.values()) < len(REQUESTS) // 2
    for request_id, index in request_of.items():
        expected, tokens = case.expected[index], gained[request_id]
        if ended[request_id] == "abort":
            assert request_id in aborted
            sure = min(expected.num_sure, len(tokens))
            assert tokens[:sure] == expected.token_ids[:sure]
        else:
            assert_same(tokens, expected, f"request {index}")


def test_own_seed_makes_a_draw_and_engine_seed_the_rest(models: Models) -> None:
    """Requests without a seed draw from the engine's seed and their number: a second engine repeats the first's."""
    path, _ = models.get({})
    params = SamplingParams(temperature=1.0, max_tokens=12)
    prompts = [request.prompt for request in REQUESTS[:4]]
    options = {"num_kvcache_blocks": 64, "skip_tokenizer_init": True, "device": "cpu"}

    def texts(seed: int) -> list[list[int]]:
        with LLM(path, seed=seed, **options) as llm:
            return [output.token_ids for output in llm.generate([*prompts, prompts[0]], params, use_tqdm=False)]

    first = texts(seed=5)
    assert texts(seed=5) == first
    assert texts(seed=6) != first
    assert first[0] != first[-1], "the same prompt twice draws twice"


def test_length_ends_where_the_memory_ends(models: Models) -> None:
    """A request that would outgrow the whole KV cache ends with its last token, whatever max_tokens says."""
    path, _ = models.get({})
    request = Request(REQUESTS[8].prompt, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    texts = []
    for blocks in (4, 16):
        with LLM(path, num_kvcache_blocks=blocks, skip_tokenizer_init=True, device="cpu") as llm:
            (output,) = run(llm, [request])
            assert output.finish_reason == "length"
            assert len(request.prompt) + len(output.token_ids) == min(blocks * BLOCK, len(request.prompt) + 200)
            texts.append(output.token_ids)
    assert texts[1][: len(texts[0])] == texts[0]


def test_any_end_of_text_token_ends_a_text(models: Models) -> None:
    """ignore_eos goes past them."""
    path, expected = models.get({})
    greedy = [request for request in REQUESTS if not request.params.temperature]
    stops = [expected[0].token_ids[5], expected[2].token_ids[3]]
    with LLM(path, **ROOMY, hf_overrides={"eos_token_id": stops}) as llm:
        texts = [output.token_ids for output in run(llm, greedy)]
        ended = run(llm, [replace(one, params=replace(one.params, ignore_eos=False)) for one in greedy])
    for output, whole in zip(ended, texts, strict=True):
        ends = [place for place, token in enumerate(whole) if token in stops]
        assert output.token_ids == (whole[: ends[0] + 1] if ends else whole)
        assert output.finish_reason == ("stop" if ends else "length")
    assert ended[0].finish_reason == ended[1].finish_reason == "stop"
