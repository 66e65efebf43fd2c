"""Models from outside the package, with two attentions in a layer or with memory of fixed size: tokens of their torch
twins, whole, in chunks, again, after preemptions, in a crowd that takes its slots in turn, and on two ranks."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import difference_model
import pytest
import recurrent_model
import torch
from comparing import Expected, assert_same
from observing import StepWitness
from twins import COUNT, Twin, check

from nanovllm import LLM, SamplingParams
from nanovllm.cli.main import main
from nanovllm.config import EngineConfig
from nanovllm.executor.resolve import resolve
from nanovllm.models.registry import read_model_config, resolve_model_folder
from nanovllm.runner.footprint import GPUS, footprint_of

SHARED = [(11 * i) % 140 for i in range(35)]
PROMPTS = [[5], [*SHARED, 9, 8, 7], [*SHARED, 30], [*range(20, 45)], [(3 * i) % 140 for i in range(60)], [7, 7], SHARED]
OPTIONS: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 8, "max_model_len": 128}


class DifferenceTwin(Twin):
    """Two attentions a layer, one of which is taken away in part."""

    mixer_name, mlp_name = "mixer", "ffn"

    @classmethod
    def mixer_shapes(cls, config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
        both = {f"{at}.{name}": s for at in ("first", "second") for name, s in cls.attention_shapes(config).items()}
        return {**both, "share": (1,)}

    def mix(self, y: torch.Tensor, layer: int, at: str) -> torch.Tensor:
        return self.attention(y, f"{at}.first") - self.tensors[f"{at}.share"] * self.attention(y, f"{at}.second")

    def activation(self, gate: torch.Tensor) -> torch.Tensor:
        return gate.sigmoid() ** self.config["gate_power"]


class RecurrentTwin(Twin):
    """Recurrences, and attention in some layers."""

    @classmethod
    def mixer_shapes(cls, config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
        if config["mixers"][layer] == "attention":
            return cls.attention_shapes(config)
        return {f"{name}_proj.weight": (config["hidden_size"],) * 2 for name in "avzo"}

    def mix(self, y: torch.Tensor, layer: int, at: str) -> torch.Tensor:
        if self.config["mixers"][layer] == "attention":
            return self.attention(y, at)
        a, v, z, o = (self.tensors[f"{at}.{name}_proj.weight"] for name in "avzo")
        kept, values = (y @ a.T).sigmoid(), y @ v.T
        values_before = torch.cat([torch.zeros_like(values[:1]), values[:-1]])
        state, states = torch.zeros_like(values[0]), []
        for keep, value, before in zip(kept, values, values_before, strict=True):
            state = keep * state + (1 - keep) * (value + before / 2)
            states.append(state)
        return (torch.stack(states) * (y @ z.T).sigmoid()) @ o.T


class Model(NamedTuple):
    """A checkpoint, what the twin says, and the options of an engine that serves it, but for its memory."""

    folder: str
    expected: list[Expected]
    options: dict[str, Any]

    def start(self, **options: Any) -> LLM:
        memory = {} if "cpu_kvcache_gib" in options else {"num_kvcache_blocks": 64}
        return LLM(self.folder, **{**self.options, **memory, **options})


RECURRENT = recurrent_model.TINY
KINDS: dict[str, tuple[type[Twin], Any, dict[str, Any]]] = {
    "difference": (DifferenceTwin, difference_model, difference_model.TINY),
    "hybrid": (RecurrentTwin, recurrent_model, RECURRENT),
    "recurrent": (RecurrentTwin, recurrent_model, {**RECURRENT, "mixers": ["recurrence"] * 3}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    found = {}
    for kind, (twin, module, config) in KINDS.items():
        folder = tmp_path_factory.mktemp(kind)
        expected = twin.random(folder, config).expected(PROMPTS)
        found[kind] = Model(str(folder), expected, {**OPTIONS, "plugins": (module.__file__,)})
    return found


SETTINGS: dict[str, tuple[dict[str, Any], Callable[[StepWitness], bool]]] = {
    "whole": ({}, lambda seen: seen.num_partial_chunks == 0),
    "plain kernels": ({"disable": ("fused_kernels",)}, lambda seen: seen.most_rows > 2),
    "chunks": ({"max_num_batched_tokens": 11}, lambda seen: seen.num_partial_chunks > 0),
    "two slots for seven requests": ({"max_num_seqs": 2}, lambda seen: seen.most_rows == 2),
    "preemptions": (
        {"num_kvcache_blocks": 9, "disable": ("lookahead",)}, lambda seen: seen.num_rows_after_preemption > 0),
    "one state": ({"num_state_lines": 1}, lambda seen: seen.most_rows == 1),
    "three states, in chunks": (
        {"num_state_lines": 3, "max_num_batched_tokens": 24}, lambda seen: seen.num_partial_chunks > 0),
    "two ranks": (
        {"tensor_parallel_size": 2, "max_num_batched_tokens": 24}, lambda seen: seen.num_partial_chunks > 0),
}  # fmt: skip


OF_HYBRIDS_BY_DAY = ("plain kernels", "chunks", "two slots for seven requests", "three states, in chunks")


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(kind, name, marks=[pytest.mark.slow] * (kind != "hybrid" and name in OF_HYBRIDS_BY_DAY))
     for kind in KINDS for name in SETTINGS],
)  # fmt: skip
def test_tokens_are_those_of_the_twin(models: dict[str, Model], kind: str, name: str) -> None:
    """The second time a prefix is found in the cache, and the state of recurrences after it, unless others needed its
    line; else they begin with zeros, whatever the line held before."""
    (options, is_seen), model = SETTINGS[name], models[kind]
    has_states, few_states = kind != "difference", bool({"num_state_lines", "max_num_seqs"} & options.keys())
    if few_states and "max_num_seqs" not in options and not has_states:
        return
    with model.start(**options) as llm:
        witness = StepWitness().watch(llm)
        for count in (COUNT, 6):
            cached = sum(output.num_cached_tokens for output in check(llm, PROMPTS, model.expected, count))
        assert is_seen(witness)
        if not (has_states and few_states):
            assert cached >= (16 if "num_kvcache_blocks" in options else 64)


def test_plan_counts_both_attentions_of_a_layer(
    models: dict[str, Model], capsys: pytest.CaptureFixture[str]
) -> None:
    model = models["difference"]
    assert main(["plan", model.folder, "--plugins", *model.options["plugins"], "-tp", "1"]) == 0
    assert "KV cache: 6 layers that see all keys" in capsys.readouterr().out


def test_a_file_that_is_no_plugin_is_refused_by_name(models: dict[str, Model], tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt.py"
    spoilt.write_text("1 / 0\n", encoding="utf-8")
    missing = tmp_path / "none.py"
    for file, why in ((missing, "must be a Python file that is there"), (spoilt, "raises ZeroDivisionError")):
        with pytest.raises(ValueError, match=rf"plugins='.*{file.name}': .*{why}"):
            models["difference"].start(plugins=(str(file),))


def test_exact_bits_are_not_promised(models: dict[str, Model]) -> None:
    """Nobody knows whether a part from outside the package adds up in one order."""
    for model in models.values():
        with pytest.raises(ValueError, match=r"^model=.*: must be without mixers .*exact_bits='batch'"):
            model.start(exact_bits="batch")


# -- slots ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["hybrid", "recurrent"])
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]


def test_memory_is_counted(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU the blocks have what the slots leave; what has no room for nine, the last for padding, is refused."""
    with model.start(cpu_kvcache_gib=0.001, num_state_lines=8) as llm:
        info = llm.engine_info()
        [group] = info["kv_cache_groups"]
        recurrences = 2 if group["layers"] else 3
        assert info["slot_bytes"] == recurrences * 2 * 256  # 32 numbers each, begun at multiples of 256 bytes
        slots = 9 * info["slot_bytes"]
        blocks = (int(0.001 * (1 << 30)) - slots) // group["block_bytes"] if group["block_bytes"] else 8 * 8
        assert info["num_kvcache_blocks"] == blocks
    has, needs = f"leaves {slots // 2} bytes for the KV cache", rf"{slots} bytes in states of fixed size"
    with pytest.raises(ValueError, match=rf"^cpu_kvcache_gib=.*: {has}, must leave at least .*\({needs}"):
        model.start(cpu_kvcache_gib=slots / 2 / (1 << 30), num_state_lines=8)
    command = ["plan", model.folder, "--plugins", *model.options["plugins"], "-tp", "1", "--num-state-lines", "8"]
    assert main([*command, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["plans"]
    assert found["slots"] == slots and found["graphs"] == 0  # the recurrence cannot be captured
    assert set(found["users"].values()) == {8}  # no more than slots, however many blocks there are
    assert main(command) == 0
    assert "States of fixed size: 8, each of" in capsys.readouterr().out


def test_slots_that_are_taken_are_memory_in_use(model: Model) -> None:
    with model.start(max_num_seqs=2) as llm:
        for used in (0.5, 1.0):
            llm.add_request(PROMPTS[0], SamplingParams(max_tokens=COUNT, ignore_eos=True))
            llm.step()
            assert llm.stats().kv_cache_usage == used


def test_slots_that_do_not_fit_are_refused(model: Model) -> None:
    own = {name: model.options[name] for name in ("plugins", "device", "skip_tokenizer_init")}
    config = resolve_model_folder(EngineConfig.from_options(model.folder, **own))
    family = read_model_config(config)
    few, many = (resolve(replace(config, num_state_lines=lines), family) for lines in (8, 1 << 26))
    assert footprint_of(few, family, GPUS["L4"]).blocks > 0
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=.* GiB in states of fixed size"):
        footprint_of(many, family, GPUS["L4"]).blocks  # noqa: B018 (raises)


def test_rows_that_have_begun_sleep(model: Model) -> None:
    """Their slots are lost with the cache: they begin anew, from zeros."""
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    with model.start(enable_sleep=True) as llm:
        gained: dict[int, list[int]] = {llm.add_request(prompt, params): [] for prompt in PROMPTS}

        def step() -> None:
            for output in llm.step():
                gained[output.request_id] += output.new_token_ids

        while not all(gained.values()):
            step()
        llm.pause()
        llm.sleep()
        with torch.inference_mode():  # a CPU's memory stays where it is
            for mixer in llm.engine.executor.runner.model.mixers():
                for state in (getattr(mixer, name) for name in ("states", "last_values") if hasattr(mixer, name)):
                    state.fill_(float("nan"))
        llm.wake_up()
        llm.resume()
        while llm.has_unfinished_requests():
            step()
        for tokens, one in zip(gained.values(), model.expected, strict=True):
            assert_same(tokens, one)


# -- kept states ----------------------------------------------------------------------------------------------------


def test_a_chat_goes_on_from_the_state_of_its_last_turn(model: Model) -> None:
    """Each turn begins with what the turn before computed, and says what it says alone. A block that the turn's last
    token but one fills has no state after it: that is counted."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    turns = [[7, 3, 9, 11], [5, 5], [1], [2, 4]]
    with model.start(max_model_len=256) as llm, model.start(max_model_len=256, enable_prefix_caching=False) as alone:
        text, misses = [(13 * i + 5) % 140 for i in range(37)], 0
        for turn in [[], *turns]:
            known = len(text)
            text += turn
            [output], [wanted] = (each.generate([text], params, use_tqdm=False) for each in (llm, alone))
            assert output.token_ids == wanted.token_ids
            assert output.num_cached_tokens >= (known - 2) // 16 * 16 * bool(turn)
            misses += ((known - 1) // 16 * 16 - output.num_cached_tokens) * bool(turn)
            assert llm.stats().prefix_cache_state_misses == misses
            text += output.token_ids
        assert misses == 16


def test_a_beginning_in_common_is_computed_twice_at_most(model: Model) -> None:
    """The first text leaves a state at its end alone; the second one finds where they part, misses a state there, and
    leaves one."""
    shared = [(11 * i + 3) % 140 for i in range(50)]
    texts = [[*shared, *[number] * 30] for number in range(5)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with model.start(max_model_len=256) as llm:
        found = []
        for text in texts:
            [output] = llm.generate([text], params, use_tqdm=False)
            found.append((output.num_cached_tokens, llm.stats().prefix_cache_state_misses))
    assert found == [(0, 0), (0, 48), (48, 48), (48, 48), (48, 48)]


def test_completions_of_one_prompt_compute_it_once(model: Model) -> None:
    prompt = [(29 * i + 1) % 140 for i in range(100)]
    with model.start(max_model_len=256) as llm:
        llm.generate([prompt], SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, n=8), use_tqdm=False)
        assert llm.engine.computed[0] <= 100 + 7 * 16
        assert llm.stats().prefix_cache_state_misses == 0


def test_a_state_that_another_row_took_is_missed(model: Model) -> None:
    """With one state, each text takes the one that the text before it left; its blocks stay."""
    first, second = ([(n * i + 3) % 140 for i in range(50)] for n in (11, 17))
    params = SamplingParams(temperature=0.0, max_tokens=1)
    found = []
    with model.start(num_state_lines=1) as llm:
        for text in (first, second, first):
            [output] = llm.generate([text], params, use_tqdm=False)
            found.append((output.num_cached_tokens, llm.stats().prefix_cache_state_misses))
    assert found == [(0, 0), (0, 0), (0, 48)]
