"""Whatever is drafted, requests get what they get without drafts: ids, texts, endings and log-probabilities."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import block_head
import eagle_head
import pytest
import torch
from adapters.peft_files import CONFIG, random_tensors
from padding import PaddedSteps
from torch import nn
from transformers import AutoModelForCausalLM

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine import drafting
from nanovllm.kernels.step.drafts import look_up_drafts_reference
from nanovllm.kernels.step.state import DeviceState, StepBuffers

PROMPTS = [
    "The capital of France is", "1 2 3 4 5", "3 + 4 =", "Monday, Tuesday,", "The opposite of hot is",
    "Once upon a time", "def gcd(a, b):", "one two one two one",
]  # fmt: skip
LONG = "".join(f"{number} and then {number + 1} " for number in range(20))
Drafter = Callable[[DeviceState, list[int]], None]


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 22, "ignore_eos": True, **options})


MIXED = [params(temperature=(0.0, 0.5, 1.0)[i % 3], seed=i) for i in range(8)]
OPTIONS = [
    params(temperature=0.8, seed=1, top_p=0.7), params(temperature=1.0, seed=2, top_k=5, logprobs=2),
    params(temperature=0.9, seed=3, min_p=0.1), params(temperature=0.8, seed=4, presence_penalty=0.5),
    params(temperature=0.0, logprobs=1, prompt_logprobs=1), params(temperature=0.6, seed=8, stop=["the", ","]),
    params(temperature=0.7, seed=6, repetition_penalty=1.2, top_p=0.9),
    params(temperature=0.0, min_tokens=10, ignore_eos=False), params(temperature=0.8, seed=9, logit_bias={5: 2.0}),
    params(temperature=0.8, seed=10, bad_words=["the"]),
    params(temperature=0.8, seed=11, allowed_token_ids=tuple(range(20, 400)), logprobs=0),
    params(temperature=1.0, seed=13, stop_token_ids=(13, 200, 300, 14, 15)), params(temperature=0.5, seed=14, n=2),
    params(temperature=0.8, seed=7, top_p=0.8, sampling_mask=True), params(temperature=0.5, seed=15, max_tokens=2),
    params(temperature=0.8, seed=12, structured_outputs={"regex": "[a-c]{3,20}"}),
    params(temperature=0.0, frequency_penalty=1.5),
    params(temperature=0.0, repetition_penalty=1.8, logit_bias={5: 2.0}),
    params(temperature=0.0, presence_penalty=2.0, top_p=0.9, allowed_token_ids=tuple(range(20, 400)), logprobs=1),
    params(temperature=1.0, seed=16, bad_words=["and then", "the", " of the"], frequency_penalty=0.5),
    params(temperature=1.0, seed=17, stop_token_ids=tuple(range(0, 1030, 4)), min_tokens=11, logit_bias={8: 3.0}),
]  # fmt: skip
OBJECT = {
    "type": "object", "properties": {"place": {"enum": ["north", "south"]}, "count": {"type": "integer", "maximum": 99},
    "flag": {"type": "boolean"}}, "required": ["place", "count", "flag"], "additionalProperties": False,
}  # fmt: skip
OF_GRAMMARS = [{"json": OBJECT}, {"regex": "(ab|cd){4,12}"}, {"choice": ["one two three", "one two"]}]
GRAMMARS = [
    params(temperature=(0.0, 0.9)[i % 2], seed=i, max_tokens=80, ignore_eos=False, structured_outputs=each)
    for i, each in enumerate(OF_GRAMMARS * 2)
]
KINDS = ["full_attention", *["sliding_attention"] * 3]
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "layer_types": KINDS}
TINY_POOL = {"num_kvcache_blocks": 16, "disable": "lookahead", "max_model_len": 96}
SCENARIOS: dict[str, tuple[list[str], list[SamplingParams], dict[str, Any]]] = {
    "mixed": (PROMPTS, MIXED, {}),
    "tiny pool": (PROMPTS, MIXED, TINY_POOL),
    "tiny pool, not one ahead": (PROMPTS, MIXED, {**TINY_POOL, "disable": "lookahead,async_scheduling"}),
    "chunks": ([LONG + PROMPTS[i] if i % 2 else PROMPTS[i] for i in range(8)], MIXED, {"max_num_batched_tokens": 48}),
    "options": ((PROMPTS * 3)[: len(OPTIONS)], OPTIONS, {}),
    "grammars": (PROMPTS[:6], GRAMMARS, {}),
    "grammars, padded": (PROMPTS[:6], [replace(one, top_p=0.9) for one in GRAMMARS], {"max_num_batched_tokens": 128}),
    "ends": (PROMPTS, [params(temperature=0.5, seed=i, max_tokens=i + 1) for i in range(8)], {}),
    "the model's end": (PROMPTS[:3], [params(max_tokens=500, seed=i) for i in range(3)], {"max_model_len": 48}),
    "windows": (PROMPTS, MIXED, {"hf_overrides": WINDOWS, **TINY_POOL}),
    "exact": (PROMPTS, [replace(one, logprobs=2) for one in MIXED], {"exact_bits": "batch"}),
    "padded": (PROMPTS, MIXED, {"max_num_batched_tokens": 64}),
    "padded options": ((PROMPTS * 3)[: len(OPTIONS)], OPTIONS, {"max_num_batched_tokens": 128}),
    "options, two ranks": (PROMPTS, [*OPTIONS[3:4], *OPTIONS[-5:], *OPTIONS[6:8]], {"tensor_parallel_size": 2}),
    "options, tiny pool": (PROMPTS, [*OPTIONS[3:4], *OPTIONS[-5:], *OPTIONS[6:8]], TINY_POOL),
    "two ranks": (PROMPTS[:4], MIXED[:4], {"tensor_parallel_size": 2}),
    "padded adapters": (PROMPTS, [replace(one, logprobs=0) for one in MIXED], {"enable_lora": True, "max_loras": 2}),
}


def start(k: int, options: dict[str, Any], head: tuple[str, Path, str | None] | None = None) -> LLM:
    """An engine without drafts, with a head of that method and quantization, or one that looks up."""
    speculative: dict[str, Any] | None = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1}
    if head is not None:
        speculative = dict(zip(("method", "model", "quantization"), head, strict=True), num_speculative_tokens=k)
    speculative = speculative if k else None
    return LLM("demo", device="cpu", seed=5, max_num_seqs=24, speculative_config=speculative, **options)


def outputs(llm: LLM, prompts: list[Any], given: list[SamplingParams], is_exact: bool) -> list[Any]:
    found = []
    for result in llm.generate(prompts, given, use_tqdm=False, lora_request=adapters_of(llm, len(prompts))):
        for one in result.outputs:
            scores = [
                sorted((key, round(value.logprob, 17 if is_exact else 3)) for key, value in (at or {}).items())
                for at in [*(one.logprobs or []), *(result.prompt_logprobs or [])]
            ]
            mask = None if one.sampling_mask is None else [list(at) for at in one.sampling_mask]
            found.append((list(one.token_ids), one.text, one.finish_reason, one.stop_reason, mask, scores))
    return found


def adapters_of(llm: LLM, count: int) -> list[LoRARequest | None] | None:
    """Three adapters or none for each of `count` rows, where the engine takes them."""
    if not llm.config.enable_lora:
        return None
    modules = [name for name, part in demo().named_modules() if isinstance(part, nn.Linear) and name != "lm_head"]
    made = [random_tensors(demo(), modules, CONFIG, seed) for seed in range(3)]
    loaded = [llm.load_adapter(str(n), tensors=tensors, config=CONFIG) for n, tensors in enumerate(made)]
    return [[None, *loaded][number % 4] for number in range(count)]


@cache
def demo() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(EngineConfig("demo").model, dtype=torch.float32)


@cache
def without(name: str) -> tuple[list[Any], list[list[int]]]:
    """Outputs of a scenario's requests without drafts, and their whole texts."""
    prompts, given, options = SCENARIOS[name]
    with start(0, options) as llm:
        found = outputs(llm, prompts, given, "exact_bits" in options)
        ids = [list(llm.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    numbers = [number for number, one in enumerate(given) for _ in range(one.n)]
    return found, [ids[number] + one[0] for number, one in zip(numbers, found, strict=True)]


def text_of(state: DeviceState, slot: int) -> list[int]:
    assert state.ids is not None
    length = int(state.num_computed[slot])
    blocks = state.block_table[slot, 0, : -(-length // state.ids.shape[1])].long()
    return [*state.ids[blocks].flatten()[:length].tolist(), int(state.last_token[slot])]


def wrong(state: DeviceState, slots: list[int]) -> None:
    assert state.drafts is not None
    state.drafts[slots] = ((state.last_token[slots] + 1) % 200)[:, None].expand(-1, state.drafts.shape[1])


def at_random(state: DeviceState, slots: list[int]) -> None:
    assert state.drafts is not None
    for slot in slots:
        count = random.randint(0, state.drafts.shape[1])
        state.drafts[slot] = -1
        state.drafts[slot, :count] = torch.randint(0, 200, (count,), dtype=torch.int32)


def right(texts: list[list[int]], share: float = 1.0) -> Drafter:
    """Drafts what follows in one of `texts`; a share of drafts is spoilt somewhere."""

    def draft(state: DeviceState, slots: list[int]) -> None:
        assert state.drafts is not None
        k = state.drafts.shape[1]
        for slot in slots:
            text, state.drafts[slot] = text_of(state, slot), -1
            follows = next((whole[len(text) :][:k] for whole in texts if whole[: len(text)] == text), [])
            state.drafts[slot, : len(follows)] = torch.tensor(follows, dtype=torch.int32)
            if follows and random.random() > share:
                at = random.randrange(len(follows))
                state.drafts[slot, at] = (follows[at] + 7) % 200

    return draft


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has drafts made and verified in every step, whether or not they pay."""
    monkeypatch.setattr(drafting, "cost", lambda *args: -1e6)  # of places and, with what is added to it, of drafting


def use(llm: LLM, drafter: Drafter | None) -> None:
    if drafter is None:
        return

    def look_up(state: DeviceState, out: StepBuffers, *args: Any) -> None:
        num_decodes, places, first_chunk_row, num_rows = args[:4]
        look_up_drafts_reference(state, out, *args)  # counts, too
        rows = [row * places for row in range(num_decodes)]
        rows += range(first_chunk_row, first_chunk_row + num_rows - num_decodes)
        drafter(state, [slot for slot in out.row_slot[rows].tolist() if slot >= 0])

    work: Any = llm.engine.executor.runner.work  # type: ignore[attr-defined]
    if work.drafter is not None:
        draft = work.drafter.draft

        def draft_otherwise(state: DeviceState, num_rows: int) -> None:
            assert num_rows <= work.drafter.most_rows
            draft(state, num_rows)
            drafter(state, [slot for slot in work.drafter.rows.slot[:num_rows].tolist() if slot >= 0])

        work.drafter.draft = draft_otherwise
    work._kernels = replace(work._kernels, look_up_drafts=look_up)


CASES = [
    ("mixed", "lookup", 3), ("mixed", "wrong", 3), ("mixed", "half", 7), ("tiny pool", "half", 3),
    ("chunks", "half", 3), ("options", "half", 3), ("ends", "right", 3), ("the model's end", "right", 3),
    ("padded options", "half", 2), ("windows", "half", 3), ("exact", "half", 3), ("grammars, padded", "half", 3),
    ("padded adapters", "half", 3), ("options, two ranks", "lookup", 3), ("options, tiny pool", "half", 3),
]  # fmt: skip
MORE = [
    ("mixed", "right", 3), ("padded", "half", 3), ("two ranks", "lookup", 3), ("grammars", "right", 3),
    ("mixed", "random", 3), *(("mixed", "half", k) for k in range(1, 7)), ("mixed", "right", 15),
    ("tiny pool", "lookup", 3), ("tiny pool, not one ahead", "half", 3), ("chunks", "lookup", 3),
    ("options", "wrong", 3), ("options", "lookup", 3), *(("ends", "half", k) for k in (1, 3, 7)),
    ("ends", "right", 1), ("ends", "right", 7), ("padded", "lookup", 7), ("windows", "wrong", 7), ("exact", "right", 7),
]  # fmt: skip


OF_A_HEAD = [
    ("eagle3 fp8", "mixed", "head", 3), ("dflash fp8", "two ranks", "head", 3), ("dspark fp8", "chunks", "head", 3),
    ("eagle3", "tiny pool", "half", 3), ("eagle3", "chunks", "head", 3), ("eagle3", "options", "right", 3),
    ("eagle3", "windows", "wrong", 3), ("eagle3", "two ranks", "head", 3), ("eagle3", "padded adapters", "half", 3),
    ("dflash", "chunks", "head", 7), ("dspark", "padded options", "head", 2), ("dflash", "exact", "half", 3),
]  # fmt: skip
MORE_OF_A_HEAD = [
    ("eagle3", "padded options", "half", 2), ("eagle3", "exact", "half", 3), ("dspark", "windows", "right", 3),
    ("dspark", "tiny pool", "half", 3), ("dspark", "two ranks", "head", 3),
    ("eagle3", "mixed", "head", 7), ("eagle3", "mixed", "random", 3), ("eagle3", "ends", "right", 3),
    ("eagle3", "the model's end", "right", 3), ("eagle3", "padded options", "head", 3),
    ("eagle3", "options", "head", 3), ("eagle3", "tiny pool, not one ahead", "head", 3),
    ("dspark", "mixed", "head", 8), ("dflash", "options", "half", 3), ("dspark", "the model's end", "right", 3),
    ("dflash", "ends", "right", 7), ("dflash", "padded options", "right", 3), ("dspark", "options", "half", 15),
    ("dspark", "tiny pool, not one ahead", "head", 3), ("dspark", "padded adapters", "half", 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "drafter", "k"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_drafts_change_nothing(name: str, drafter: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(name, drafter, k, monkeypatch)


@pytest.mark.parametrize(
    ("method", "name", "drafter", "k"),
    [*OF_A_HEAD, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_OF_A_HEAD)],
)
def test_nor_do_those_of_a_head(
    method: str, name: str, drafter: str, k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids are noted by block as where drafts are looked up, for drafters that know texts."""
    monkeypatch.setattr(EngineConfig, "looks_up", True)
    method, _, rounded = method.partition(" ")
    more: dict[str, Any] = {"num_attention_heads": 8} if rounded else {}  # 128 inputs of o_proj for each of two ranks
    saved = eagle_head.save(tmp_path, **more) if method == "eagle3" else block_head.save(tmp_path, method, **more)
    compare(name, drafter, k, monkeypatch, (method, saved, rounded or None))


def compare(
    name: str, drafter: str, k: int, monkeypatch: pytest.MonkeyPatch,
    head: tuple[str, Path, str | None] | None = None,
) -> None:  # fmt: skip
    """Compares a scenario's outputs with those without drafts."""
    expected, texts = without(name)
    random.seed(1)
    torch.manual_seed(1)
    draft_always(monkeypatch)
    prompts, given, options = SCENARIOS[name]
    drafters = {"wrong": wrong, "random": at_random, "right": right(texts), "half": right(texts, 0.5)}
    with start(k, options, head) as llm:
        padded = PaddedSteps(llm, monkeypatch) if "padded" in name else None
        use(llm, drafters.get(drafter))
        assert outputs(llm, prompts, given, "exact_bits" in options) == expected
        llm.engine.scheduler.check_integrity()
        stats = llm.stats()
        assert stats.spec_decode_num_draft_tokens > 0
        assert sum(stats.spec_decode_accepted_per_pos) == stats.spec_decode_num_accepted_tokens
        assert padded is None or len(padded.used) > 2
        if "pool" in name:
            assert stats.num_preemptions > 0
        if drafter == "right":
            assert stats.spec_decode_num_accepted_tokens > 0.8 * stats.spec_decode_num_draft_tokens
        if drafter == "wrong":
            assert stats.spec_decode_num_accepted_tokens < 0.1 * stats.spec_decode_num_draft_tokens


@pytest.mark.parametrize("k", [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 4, 5, 6, 7))])
def test_texts_end_at_every_offset(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their length, a token and a string, where all drafts are right, and so many of them behind the end."""
    draft_always(monkeypatch)
    prompt, base = PROMPTS[5], params(temperature=0.9, seed=4, max_tokens=24)
    found: list[list[Any]] = []
    for drafts in (0, k):
        with start(drafts, {}) as llm:
            if drafts == 0:
                ids = llm.generate([prompt], base, use_tqdm=False)[0].token_ids
                text, given = llm.tokenizer(prompt)["input_ids"] + ids, []
                for end, token in enumerate(ids, 1):
                    given += [replace(base, max_tokens=end), replace(base, stop_token_ids=(token,))]
                    given += [replace(base, stop=(llm.tokenizer.decode(ids[max(0, end - 2) : end]),), logprobs=0)]
                    given += [replace(base, stop_token_ids=(token,), min_tokens=end)]
            use(llm, right([text]))
            found.append(outputs(llm, [prompt] * len(given), given, False))
            stats = llm.stats()
    assert found[0] == found[1] and {one[2] for one in found[0]} == {"length", "stop"}
    assert len({len(one[0]) for one in found[0]}) == 24 and stats.spec_decode_num_accepted_tokens > 300


def test_drafts_of_rows_are_verified_whatever_their_options() -> None:
    """A step brings several tokens also where what may be drawn depends on the tokens before."""
    _, texts = without("options")
    with start(3, {}) as llm:
        use(llm, right(texts))
        for prompt, one in zip(*SCENARIOS["options"][:2], strict=True):
            before, _, after = llm.stats(), llm.generate([prompt], [one], use_tqdm=False), llm.stats()
            num_tokens = after.generation_tokens - before.generation_tokens
            num_drafts = after.spec_decode_num_drafts - before.spec_decode_num_drafts
            assert num_tokens < 5 or 1 <= num_drafts < num_tokens / 2, one


def test_texts_of_a_grammar_are_as_valid_with_drafts() -> None:
    assert [json.loads(one[1]).keys() for one in without("grammars")[0][::3]] == [OBJECT["properties"].keys()] * 2


def test_hits_of_a_speculated_text_are_those_of_the_text() -> None:
    """A row that ended is in one more step, which must not write into a block that others share by then."""
    prompt, long = "The harbour master", params(temperature=0.0, max_tokens=60)
    with start(0, {}) as llm:
        ids = llm.tokenizer(prompt)["input_ids"]
        given = replace(long, max_tokens=97 - len(ids))  # of which 96 are whole blocks
        whole = ids + llm.generate([prompt], given, use_tqdm=False)[0].token_ids
        after = params(temperature=0.0, max_tokens=8, logprobs=2)
        expected = outputs(llm, [whole], [after], False)
    with start(3, {}) as llm:
        use(llm, right([whole]))
        assert ids + llm.generate([prompt], given, use_tqdm=False)[0].token_ids == whole
        assert outputs(llm, [whole], [after], False) == expected
        assert llm.stats().prefix_cache_hits >= 96


def test_a_copy_of_a_text_takes_a_fraction_of_the_steps_and_other_texts_none_more() -> None:
    steps = []
    for k in (0, 3):
        with start(k, {}) as llm:
            llm.generate(["one two one two one two one two"], params(temperature=0.0, max_tokens=48), use_tqdm=False)
            steps.append(sum(llm.stats().iteration_tokens))
    assert steps[1] < steps[0]


def test_synthetic_rates_are_met_whatever_is_drafted() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "synthetic_acceptance_rates": [0.8, 0.4, 0.2]}
    with LLM("demo", device="cpu", max_num_seqs=8, speculative_config=config) as llm:
        llm.generate(PROMPTS, params(max_tokens=60), use_tqdm=False)
        stats = llm.stats()
    shares = [count / stats.spec_decode_num_drafts for count in stats.spec_decode_accepted_per_pos]
    assert stats.spec_decode_num_drafts > 100
    assert all(abs(share - rate) < 0.15 for share, rate in zip(shares, (0.8, 0.4, 0.2), strict=True)), shares


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "eagle", "num_speculative_tokens": 3}, "method='eagle': must be 'ngram' or 'eagle3' or 'dflash'"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, "model=None: must be a path or hub id"),
        ({"method": "eagle3", "model": "a", "prompt_lookup_max": 3}, "'prompt_lookup_max' is not taken"),
        ({"num_speculative_tokens": 3}, "method=None: must be 'ngram'"),
        ({"method": "ngram"}, "num_speculative_tokens=None: must be an integer from 1 to 15"),
        ({"method": "ngram", "num_speculative_tokens": 16}, "num_speculative_tokens=16"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens=True"),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 5}, "prompt_lookup_min=5: .* 1 to 4"),
        ({"method": "ngram", "num_speculative_tokens": 3, "model": "m"}, "'model' is not taken"),
        ({"method": "ngram", "num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "synthetic_acceptance_rates": [0.2, 0.4]},
            "synthetic_acceptance_rates=.*2 numbers from 1 to 0",
        ),
        *(
            ({"method": method, "num_speculative_tokens": 3, "quantization": "fp8"}, "'quantization' is not taken")
            for method in ("ngram", "mtp", "qwen3_next_mtp")
        ),
        ({"method": "dspark", "model": "a", "quantization": "int4"}, "config: quantization='int4': must be .* 'fp8'"),
        ("ngram", "must be a dict"),
    ],
)
def test_what_is_not_taken_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("demo", device="cpu", speculative_config=config)
