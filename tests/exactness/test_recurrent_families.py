"""Families whose layers keep states, and Gemma 4, against transformers: texts of every length around blocks and pieces,
chats, beginnings in common, completions of one prompt, sleep, new weights, few states, and the states themselves."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from family_cases import CASES, OPTIONS, TOLERANCE, Case, for_four_ranks, make_model, reference_logits, save
from observing import StepWitness
from safetensors.torch import load_file
from test_families import expect_best_tokens
from test_overlap import lower_thresholds

from nanovllm import LLM, SamplingParams

KINDS = {
    "qwen3_5": 1, "nemotron_h": 2, "lfm2": 3, "gemma4": 0,
    "qwen3_next": 2, "qwen3_5_moe": 3, "olmo_hybrid": 3, "granite 4": 1, "granite 4 without experts": 2, "lfm2_moe": 2,
    "nemotron_h that ends with experts": 1, "nemotron_h with latent experts": 3, "gemma4, experts": 0,
    "gemma4, keys of other layers and inputs of each": 0, "gemma4_unified": 0,
}  # fmt: skip
"""States of an engine that has few of them, by family; 0: its layers keep none. Layers of one kind in gemma4_unified
have three heads of keys."""
OFTEN = ("qwen3_5", "nemotron_h", "lfm2", "gemma4")
SERVED = [
    pytest.param((name, ranks), id=f"{name}, {ranks}", marks=[pytest.mark.slow] * (name not in OFTEN or ranks > 1))
    for name in KINDS for ranks in (1, 2, 4)
    if ranks < 4 or name != "gemma4_unified"
]  # fmt: skip
RECURRENT = [pytest.param(name, marks=[pytest.mark.slow] * (name not in OFTEN)) for name, few in KINDS.items() if few]
LENGTHS = (1, 2, 15, 16, 17, 33, 63, 64, 65, 127, 128, 129, 200)
BUDGET = 23
"""Maximum tokens of a step."""
OFFSETS = (1, 2, 3, 4, 7, 8, 15, 16, 17, BUDGET)
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def text(length: int, number: int = 0) -> list[int]:
    return [(37 * i + 11 * number + i * i // 7) % 211 for i in range(length)]


class Served(NamedTuple):
    llm: LLM
    case: Case
    model: Any
    has_states: bool


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine whose steps of 23 tokens cut prompts at many offsets; those of several ranks are cut in halves, too."""
    name, ranks = request.param
    options = {**OPTIONS, "num_kvcache_blocks": 192, "max_num_batched_tokens": BUDGET, "disable": ()}
    case = for_four_ranks(CASES[name]) if ranks == 4 else CASES[name]
    model = make_model(case)
    folder = str(save(model, case, tmp_path_factory.mktemp("family")))
    with pytest.MonkeyPatch.context() as patch:
        lower_thresholds(patch, 6, 2)
        with LLM(folder, **options, enable_sleep=True, tensor_parallel_size=ranks) as llm:
            yield Served(llm, case, model, KINDS[name] > 0)


def run(served: Served, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Any]:
    """Outputs, whose tokens are those of transformers, and log-probabilities of prompts if they are asked for."""
    outputs = served.llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expect_best_tokens(reference_logits(served.model, prompt, output.token_ids), output.token_ids)
        if params.prompt_logprobs is not None:
            found = [line[token].logprob for token, line in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
            theirs = reference_logits(served.model, prompt[:1], prompt[1:]).log_softmax(-1)
            wanted = theirs.gather(1, torch.tensor(prompt[1:], dtype=torch.long)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(found), wanted, **TOLERANCE)
    return outputs


@pytest.mark.parametrize("lengths", [LENGTHS, pytest.param(range(1, 201), marks=pytest.mark.slow)], ids=["some", "all"])
def test_prompts_of_every_length_have_the_logprobs_of_transformers(served: Served, lengths: Sequence[int]) -> None:
    """Together, so that cuts go through them anywhere. All are for one rank."""
    if lengths == LENGTHS or served.llm.config.tensor_parallel_size == 1:
        prompts = [text(length, number) for number, length in enumerate(lengths, 1)]  # no router of these has a tie
        run(served, prompts, replace(GREEDY, prompt_logprobs=0))


@pytest.mark.parametrize("offsets", [OFFSETS, pytest.param(range(1, BUDGET + 1), marks=pytest.mark.slow)],
                         ids=["some", "all"])  # fmt: skip
def test_a_prompt_is_cut_at_every_offset(
    served: Served, offsets: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a first piece of each length, and so does what follows on a hit."""
    scheduler, firsts = served.llm.engine.scheduler, list[int]()
    chunk = scheduler._chunk

    def cut(num_remaining: int, budget: int, short_waits: bool) -> int:
        return chunk(num_remaining, min(budget, firsts.pop()) if firsts else budget, short_waits)

    monkeypatch.setattr(scheduler, "_chunk", cut)
    served.llm.reset_prefix_cache()
    for first in offsets:
        prompt = text(70, 100 + first)
        for number, longer in enumerate((prompt, [*prompt, *text(40, first)])):
            firsts.append(first)
            [output] = run(served, [longer], replace(GREEDY, prompt_logprobs=None if number else 0))
            assert output.num_cached_tokens == 64 * number and not firsts


def test_a_chat_goes_on_from_its_last_turn(served: Served) -> None:
    chat = text(37, 50)
    for turn in ([], [7, 3, 9], [5], [2, 4]):
        known, chat = len(chat), [*chat, *turn]
        [output] = run(served, [chat], replace(GREEDY, max_tokens=14))
        assert output.num_cached_tokens >= (known - 2) // 16 * 16 * bool(turn)
        chat += output.token_ids


def test_a_beginning_in_common_is_computed_twice_at_most(served: Served) -> None:
    found = [run(served, [[*text(50, 60), *[number] * 20]])[0].num_cached_tokens for number in range(3)]
    assert found == [0, 0 if served.has_states else 48, 48]


def test_completions_of_one_prompt_compute_it_once(served: Served) -> None:
    prompt, before = text(100, 70), served.llm.engine.computed[0]
    [output] = served.llm.generate([prompt], replace(GREEDY, n=8, temperature=1.0), use_tqdm=False)
    assert served.llm.engine.computed[0] - before <= 100 + 7 * 16
    for one in output.outputs:
        assert len(one.token_ids) == GREEDY.max_tokens


def test_nothing_is_found_after_sleep_and_new_weights(served: Served, tmp_path: Path) -> None:
    """Of what was computed before."""
    prompt, other = text(70, 80), make_model(served.case, seed=1)
    new_weights = load_file(save(other, served.case, tmp_path) / "model.safetensors")

    def sleep() -> Served:
        served.llm.sleep()
        served.llm.wake_up()
        return served

    def load() -> Served:
        served.llm.load_weights(new_weights.items())
        return served._replace(model=other)

    for change in (lambda: served, sleep, load):
        now = change()
        assert [run(now, [prompt])[0].num_cached_tokens for _ in range(2)] == [0, 64]


def states_of(model: Any, prompt: list[int]) -> list[torch.Tensor]:
    """Memory that transformers has of a prompt in recurrent layers, in the shapes of ours: states, then last inputs of
    convolutions, of which it keeps one more."""
    layers = model(torch.tensor([prompt]), use_cache=True).past_key_values.layers
    kept = [layer for layer in layers if hasattr(layer, "conv_states")]
    is_mamba = type(model).__name__.startswith(("NemotronH", "GraniteMoeHybrid"))
    states = [layer.recurrent_states[0][0] for layer in kept if layer.recurrent_states[0] is not None]
    return [*(one.mT if is_mamba else one for one in states), *(layer.conv_states[0][0, :, 1:].mT for layer in kept)]


@pytest.mark.parametrize("name", RECURRENT)
def test_states_are_those_of_transformers_and_few_serve_many_rows(name: str, tmp_path: Path) -> None:
    """After a prompt in chunks of seven tokens; then rows wait for a state."""
    case, few = CASES[name], KINDS[name]
    model, prompt = make_model(case), text(67)
    options = {**OPTIONS, "num_kvcache_blocks": 9, "max_num_batched_tokens": 7, "num_state_lines": few}
    with LLM(str(save(model, case, tmp_path)), **options) as llm:
        llm.add_request(prompt, GREEDY)
        while not llm.step():
            pass
        [row] = llm.engine.scheduler.running
        mixers = llm.engine.executor.runner.model.mixers()
        found = [getattr(one, kind) for kind in ("states", "last_inputs") for one in mixers if hasattr(one, kind)]
        for ours, theirs in zip(found, states_of(model, prompt), strict=True):
            torch.testing.assert_close(ours[row.memory.line], theirs, **TOLERANCE)
        prompts, witness = [text(5 + 2 * number, number) for number in range(16)], StepWitness().watch(llm)
        outputs = llm.generate(prompts, replace(GREEDY, max_tokens=8), use_tqdm=False)
        assert witness.most_rows == few
    for one, output in zip(prompts, outputs, strict=True):
        expect_best_tokens(reference_logits(model, one, output.token_ids), output.token_ids)
