"""Layers with memory of fixed size (recurrent_model.py): tokens of the torch twin, whole, in chunks, after preemptions,
in a crowd that takes its slots in turn, and on two ranks."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import recurrent_model
import torch
from comparing import Expected, assert_same
from observing import StepWitness
from recurrent_model import TINY
from twins import COUNT, Twin, check, save_random

from nanovllm import LLM, SamplingParams
from nanovllm.cli.main import main
from nanovllm.config import EngineConfig
from nanovllm.executor.resolve import resolve
from nanovllm.models.registry import read_model_config, resolve_model_folder
from nanovllm.runner.memory_plan import GPUS, plan_rank

SHARED = [(11 * i) % 140 for i in range(35)]
PROMPTS = [[5], [*SHARED, 9, 8, 7], [*SHARED, 30], [*range(20, 45)], [(3 * i) % 140 for i in range(60)], [7, 7], SHARED]
OPTIONS: dict[str, Any] = {
    "plugins": (recurrent_model.__file__,), "device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 8,
    "max_model_len": 128, "num_kvcache_blocks": 64,
}  # fmt: skip


class RecurrentTwin(Twin):
    """The model in plain torch, over a whole text at once; float64."""

    def logits(self, ids: list[int]) -> torch.Tensor:
        get = self.tensors.__getitem__
        x = get("model.embed_tokens.weight")[ids]
        for layer, mixer in enumerate(self.config["mixers"]):
            at = f"model.layers.{layer}"
            y = self.norm(x, f"{at}.input_layernorm")
            x = x + (self.recurrence(y, at) if mixer == "recurrence" else self.attention(y, f"{at}.self_attn"))
            y = self.norm(x, f"{at}.post_attention_layernorm")
            gate, up = (y @ get(f"{at}.mlp.{name}_proj.weight").T for name in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ get(f"{at}.mlp.down_proj.weight").T
        return self.norm(x, "model.norm") @ get("lm_head.weight").T

    def recurrence(self, y: torch.Tensor, at: str) -> torch.Tensor:
        a, v, z, o = (self.tensors[f"{at}.self_attn.{name}_proj.weight"] for name in "avzo")
        kept, values = (y @ a.T).sigmoid(), y @ v.T
        values_before = torch.cat([torch.zeros_like(values[:1]), values[:-1]])
        state, states = torch.zeros_like(values[0]), []
        for keep, value, before in zip(kept, values, values_before, strict=True):
            state = keep * state + (1 - keep) * (value + before / 2)
            states.append(state)
        return (torch.stack(states) * (y @ z.T).sigmoid()) @ o.T


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of what mixers and MLPs hold."""
    hidden, width, dim = (config[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = (config[f"num_{kind}_heads"] * dim for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, mixer in enumerate(config["mixers"]):
        at = f"model.layers.{layer}"
        rows = dict.fromkeys("avz", hidden) if mixer == "recurrence" else {"q": heads, "k": kv_heads, "v": kv_heads}
        inner = hidden if mixer == "recurrence" else heads
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (count, hidden) for name, count in rows.items()}
        shapes |= {f"{at}.self_attn.o_proj.weight": (hidden, inner), f"{at}.mlp.down_proj.weight": (hidden, width)}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
    return shapes


Model = tuple[str, list[Expected]]


@pytest.fixture(scope="module", params=["hybrid", "recurrent"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The folder, and what the twin says."""
    folder = tmp_path_factory.mktemp(request.param)
    mixers = TINY["mixers"] if request.param == "hybrid" else ["recurrence"] * 3
    config = {**TINY, "mixers": mixers}
    twin = RecurrentTwin(config, save_random(folder, config, weight_shapes(config)))
    return str(folder), twin.expected(PROMPTS)


def test_whole_and_again(model: Model) -> None:
    """Nothing is found in a cache: the state after a prefix is not kept."""
    with LLM(model[0], **OPTIONS) as llm:
        for _ in range(2):
            assert all(output.num_cached_tokens == 0 for output in check(llm, PROMPTS, model[1]))
        info = llm.engine_info()
        recurrent = 2 if info["kv_cache_groups"][0]["layers"] else 3
        assert info["slot_bytes"] == recurrent * 2 * 256  # 32 numbers each, begun at multiples of 256 bytes


SETTINGS: dict[str, tuple[dict[str, Any], Callable[[StepWitness], bool]]] = {
    "chunks": ({"max_num_batched_tokens": 11}, lambda seen: seen.num_partial_chunks > 0),
    "two slots for seven requests": ({"max_num_seqs": 2}, lambda seen: seen.most_rows == 2),
    "preemptions": (
        {"num_kvcache_blocks": 9, "disable": ("lookahead",)}, lambda seen: seen.num_rows_after_preemption > 0),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_begin_with_zeros_and_go_on_with_what_they_left(model: Model, name: str) -> None:
    """Whatever the row before left in the slot."""
    options, is_seen = SETTINGS[name]
    with LLM(model[0], **{**OPTIONS, **options}) as llm:
        witness = StepWitness().watch(llm)
        check(llm, PROMPTS, model[1])
        assert is_seen(witness)


def test_on_two_ranks(model: Model) -> None:
    with LLM(model[0], **OPTIONS, tensor_parallel_size=2, max_num_batched_tokens=24) as llm:
        check(llm, PROMPTS, model[1])
        assert llm.engine_info()["slot_bytes"] % 256 == 0


def test_exact_bits_are_not_promised(model: Model) -> None:
    """Nobody knows whether a part from outside the package adds up in one order."""
    with pytest.raises(ValueError, match=r"^model=.*: must be without mixers .*exact_bits='batch'"):
        LLM(model[0], **OPTIONS, exact_bits="batch")


def test_memory_is_counted(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU the blocks have what the slots leave."""
    own = {name: value for name, value in OPTIONS.items() if name != "num_kvcache_blocks"}
    with LLM(model[0], **own, cpu_kvcache_gib=0.001) as llm:
        info = llm.engine_info()
        block_bytes = info["kv_cache_groups"][0]["block_bytes"]
        assert info["num_kvcache_blocks"] == (
            (int(0.001 * (1 << 30)) - 9 * info["slot_bytes"]) // block_bytes if block_bytes else 8 * 8
        )
    options = ["--plugins", OPTIONS["plugins"][0], "-tp", "1", "--max-num-seqs", "8"]
    assert main(["plan", model[0], *options, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["plans"]
    assert found["slots"] == 9 * info["slot_bytes"] and found["graphs"] == 0  # the recurrence cannot be captured
    assert main(["plan", model[0], *options]) == 0
    assert "MiB a request" in capsys.readouterr().out


def test_slots_that_do_not_fit_are_refused(model: Model) -> None:
    """Nine slots, the last for padding, of which the message has the bytes."""
    own = {name: value for name, value in OPTIONS.items() if name != "num_kvcache_blocks"}
    with LLM(model[0], **own, cpu_kvcache_gib=0.001) as llm:
        slots = 9 * llm.engine_info()["slot_bytes"]
    has, needs = f"leaves {slots // 2} bytes for the KV cache", rf"{slots} bytes in slots of max_num_seqs requests"
    with pytest.raises(ValueError, match=rf"^cpu_kvcache_gib=.*: {has}, must leave at least .*\({needs}"):
        LLM(model[0], **own, cpu_kvcache_gib=slots / 2 / (1 << 30))


def test_the_plan_refuses_slots_that_do_not_fit(model: Model) -> None:
    own = {name: OPTIONS[name] for name in ("plugins", "device", "skip_tokenizer_init")}
    config = resolve_model_folder(EngineConfig.from_options(model[0], **own))
    family = read_model_config(config)
    few, many = (resolve(replace(config, max_num_seqs=rows), family) for rows in (8, 1 << 24))
    assert plan_rank(few, family, GPUS["L4"]).blocks > 0
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=.* GiB in slots of max_num_seqs requests"):
        plan_rank(many, family, GPUS["L4"]).blocks  # noqa: B018 (raises)


def test_rows_that_have_begun_sleep(model: Model) -> None:
    """Their slots are lost with the cache: they begin anew, from zeros."""
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    with LLM(model[0], **OPTIONS, enable_sleep=True) as llm:
        ids = [llm.add_request(prompt, params) for prompt in PROMPTS]
        gained: dict[int, list[int]] = {number: [] for number in ids}

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
        for number, one in zip(ids, model[1], strict=True):
            assert_same(gained[number], one)
