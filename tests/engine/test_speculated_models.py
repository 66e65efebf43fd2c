"""Drafts change nothing of models whose layers keep states or have windows, of packed weights and of several ranks: a
text, what others say that begin with it, and what comes after sleep and new weights, whoever is in a step beside."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness.family_cases import CASES, make_model, save
from mtp_layer import saved
from padding import PaddedSteps
from test_speculation import at_random, draft_always, outputs, params, right, use, wrong

from nanovllm import LLM

NUMBERS = [[(37 * i + 11) % 211 for i in range(40)], *([n, 3 * n, 5, 5, n] for n in range(1, 7))]
TIGHT = {"num_kvcache_blocks": 12, "disable": "lookahead"}
SIZES: dict[str, Any] = {
    "max_num_seqs": 6, "max_model_len": 160, "kvcache_block_size": 16, "num_kvcache_blocks": 60, "device": "cpu",
    "skip_tokenizer_init": True, "enable_sleep": True,
}  # fmt: skip
MANY = 30
PADDED = {"max_num_batched_tokens": 64}
INT4 = {"quantization": "int4"}
TWO = {"tensor_parallel_size": 2}
OFTEN = [
    ("qwen3_5", "half", 3, {"num_state_lines": MANY}), ("nemotron_h", "wrong", 3, TIGHT), ("lfm2", "half", 7, PADDED),
    ("gemma4", "half", 3, {}), ("glm4_moe_lite", "half", 3, PADDED),
]  # fmt: skip
NIGHTLY = [
    ("granite 4", "half", 1, {"num_state_lines": 8}),
    *(("qwen3_next", "half", k, {}) for k in range(1, 8)), ("qwen3_next", "random", 3, {"num_state_lines": 1}),
    ("qwen3_5_moe", "right", 15, {}), ("qwen3_5_moe", "half", 3, {**PADDED, "num_state_lines": 2}),
    ("qwen3_5", "half", 3, INT4), ("qwen3_5", "half", 5, TIGHT),
    ("qwen3_5", "lookup", 3, TWO), ("qwen3_5", "mtp", 2, {**TWO, "num_state_lines": 3}), ("qwen3_5", "mtp", 3, TIGHT),
    ("qwen3_5_moe", "mtp", 3, PADDED), ("qwen3_next", "mtp", 5, {"num_state_lines": 2}), ("glm4_moe", "mtp", 3, TIGHT),
    ("olmo_hybrid", "random", 3, {}), ("olmo_hybrid with rope", "half", 7, {**PADDED, "disable": "async_scheduling"}),
    ("lfm2", "right", 3, TIGHT), ("lfm2_moe", "half", 3, {"num_state_lines": 3}), ("lfm2_moe", "lookup", 7, TWO),
    ("nemotron_h", "lookup", 3, {**TWO, "num_state_lines": 3}), ("nemotron_h with latent experts", "half", 5, {}),
    ("nemotron_h that ends with experts", "right", 3, PADDED), ("granite 4 without experts", "half", 3, TIGHT),
    ("granite 4", "wrong", 7, {"enable_prefix_caching": False}), ("gemma4, experts", "half", 7, TIGHT),
    ("gemma4", "lookup", 3, TWO), ("gemma4", "right", 7, TIGHT), ("gemma4_unified", "half", 3, INT4),
    ("gemma4, keys of other layers and inputs of each", "half", 3, PADDED), ("gpt_oss", "half", 3, TIGHT),
    ("gemma3", "random", 3, TIGHT), ("qwen3_moe", "half", 3, INT4), ("laguna", "half", 3, {}),
    ("deepseek_v2, lite", "half", 3, TIGHT), ("deepseek_v3", "lookup", 3, TWO), ("mistral4", "right", 7, {}),
]  # fmt: skip


def rounds(llm: LLM, folders: list[str], texts: list[list[int]]) -> list[Any]:
    """Outputs of requests, of others that go on from their texts, and all of it again with other weights. texts: gets
    whole texts, for drafters."""
    given = [params(temperature=(0.0, 0.6)[i % 2], seed=i, max_tokens=28) for i in range(len(NUMBERS))]
    given[1] = params(temperature=1.0, seed=9, max_tokens=20, n=3, presence_penalty=0.5)
    given[2] = params(temperature=0.0, max_tokens=20, stop_token_ids=(3, 50, 80, 101, 140, 170))
    after, found = [params(temperature=0.0, max_tokens=12)] * len(NUMBERS), []
    for number, folder in enumerate(folders):
        first = outputs(llm, NUMBERS, given, False)
        whole = [prompt + one[0] for prompt, one in zip(NUMBERS, [*first[:2], *first[4:]], strict=True)]
        found += first + outputs(llm, whole, after, False)
        texts += whole if number == 0 else []
        llm.sleep()
        llm.wake_up()
        found += outputs(llm, whole[:2], after[:2], False)
        llm.load_weights(folder)
    return found


@pytest.mark.parametrize(
    ("family", "drafter", "k", "options"), [*OFTEN, *(pytest.param(*case, marks=pytest.mark.slow) for case in NIGHTLY)]
)
def test_drafts_change_nothing(
    family: str, drafter: str, k: int, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor how many tokens are found in the cache, where there are states enough."""
    random.seed(1)
    draft_always(monkeypatch)
    folders = [tmp_path / str(seed) for seed in range(2)]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        if drafter == "mtp":
            saved(family, folder)
        else:
            save(make_model(CASES[family], seed), CASES[family], folder)
    method = {"method": "mtp"} if drafter == "mtp" else {"method": "ngram", "prompt_lookup_min": 1}
    found, hits, texts = [], [], list[list[int]]()
    for speculative in (None, {**method, "num_speculative_tokens": k}):
        with LLM(str(folders[0]), speculative_config=speculative, **{**SIZES, **options}) as llm:
            padded = PaddedSteps(llm, monkeypatch) if options.items() >= PADDED.items() else None
            if speculative is not None:
                known = {"wrong": wrong, "random": at_random, "right": right(texts), "half": right(texts, 0.5)}
                use(llm, known.get(drafter))
            found.append(rounds(llm, [str(folders[1]), str(folders[0])], texts if speculative is None else []))
            llm.engine.scheduler.check_integrity()
            stats = llm.stats()
            hits.append(stats.prefix_cache_hits)
            assert padded is None or len(padded.used) > 2
            assert (stats.num_preemptions > 0) == (options.items() >= TIGHT.items())
    assert found[0] == found[1]
    assert options.get("num_state_lines") != MANY or hits[0] == hits[1]
    assert stats.spec_decode_num_draft_tokens > 0
    assert drafter not in ("half", "right") or stats.spec_decode_num_accepted_tokens > 50
    assert drafter != "wrong" or stats.spec_decode_num_accepted_tokens <= 50
    assert options.get("num_state_lines") != MANY or stats.prefix_cache_hits > 0


@pytest.mark.parametrize(
    ("family", "method"),
    [("nemotron_h", "ngram"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("qwen3_5", "mtp"),
     ("lfm2", "ngram"), ("glm4_moe", "mtp"), ("gemma4", "ngram"), ("gemma3", "ngram"), ("qwen3_5_moe", "mtp")))],
)  # fmt: skip
def test_what_happens_between_steps_changes_nothing(
    family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses, sleep, weights that are the same again, an empty cache, and others that are aborted."""
    draft_always(monkeypatch)
    torch.manual_seed(0)
    if method == "mtp":
        saved(family, tmp_path)
    else:
        save(make_model(CASES[family]), CASES[family], tmp_path)
    given = [params(temperature=(0.0, 0.6)[i % 2], seed=i, max_tokens=40) for i in range(len(NUMBERS))]
    with LLM(str(tmp_path), **SIZES) as llm:
        expected = [one[0] for one in outputs(llm, NUMBERS, given, False)]
    texts = [prompt + one for prompt, one in zip(NUMBERS, expected, strict=True)]
    chosen, num_drafted = random.Random(1), 0
    random.seed(1)
    for seed in range(2):
        speculative = {"method": method, "num_speculative_tokens": 3}
        options = {**SIZES, "disable": ("async_scheduling",) * seed, "num_kvcache_blocks": 24, "num_state_lines": 5}
        if CASES[family].config.startswith(("Gemma", "Glm")):
            del options["num_state_lines"]
        with LLM(str(tmp_path), speculative_config=speculative, **options) as llm:
            use(llm, right(texts, 0.5) if method == "ngram" else None)

            def nap(llm: LLM = llm) -> None:
                llm.pause()
                llm.sleep()
                llm.wake_up()
                llm.resume()

            def pause(llm: LLM = llm) -> None:
                llm.pause()
                llm.resume()

            calls = [nap, pause, llm.reset_prefix_cache, lambda llm=llm: llm.load_weights(str(tmp_path)),
                     lambda llm=llm: llm.load_weights(str(tmp_path), in_flight="keep"),
                     lambda llm=llm: llm.abort(llm.add_request(NUMBERS[0], given[0])),
                     lambda llm=llm: llm.add_request(NUMBERS[0], params(max_tokens=3))]  # fmt: skip
            found: dict[int, list[int]] = {}
            waiting = [*zip(NUMBERS, given, strict=True)]
            while waiting or llm.has_unfinished_requests():
                if waiting:
                    found[llm.add_request(*waiting.pop(0))] = []
                if chosen.random() < 0.3:
                    chosen.choice(calls)()
                for output in llm.step():
                    found.get(output.request_id, []).extend(output.new_token_ids)
            assert [*found.values()] == expected
            num_drafted += llm.stats().spec_decode_num_draft_tokens
            llm.engine.scheduler.check_integrity()
    assert num_drafted > 100
