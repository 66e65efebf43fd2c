"""Adapters from memory: what a rank holds of their tensors, version after version, and how they come from a trainer."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.peft_files import CONFIG, random_tensors
from adapters.test_adapters import LORA, PROMPTS, check_values, generate, linears, make_adapters, scores
from exactness import family_cases
from exactness.family_cases import CASES, make_model
from rollouts.trainer import init_info

import nanovllm.adapters
from nanovllm import LLM
from nanovllm.runner.adapter_layout import AdapterLayouts
from nanovllm.transfer.buckets import Entry, described
from nanovllm.transfer.receiver import WeightReceiver, WeightSender
from nanovllm.transfer.shared import SharedBucket


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Any]:
    folder = tmp_path_factory.mktemp("qwen")
    model = make_model(CASES["qwen3"])
    return model, family_cases.save(model, CASES["qwen3"], folder / "model"), make_adapters(model, folder)


def held(llm: LLM) -> dict[str, Any]:
    """Halves of each layer of the one adapter that rank 0 holds."""
    [one] = llm.engine.executor.runner.adapters._held.values()  # type: ignore[attr-defined]
    return one


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_holds_what_the_tensors_say(dtype: str, qwen: Any) -> None:
    """Of each type, times the scale, rounded once, and zeros up to the rank of a slot; views of others' memory too."""
    model, folder, _ = qwen
    wanted, name = getattr(torch, dtype), "layers.1.mlp.down_proj"
    with LLM(str(folder), **LORA, dtype=dtype) as llm:
        for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            for alpha in (4, 6, 8, 3):
                config = CONFIG | {"lora_alpha": alpha}
                made = random_tensors(model, linears(model), config, alpha)
                tensors = {key: tensor.to(kind).t().contiguous().t().requires_grad_() for key, tensor in made.items()}
                llm.load_adapter("a", tensors=tensors, config=config)
                a, b = (tensors[f"base_model.model.model.{name}.lora_{half}.weight"] for half in "AB")
                [(found_a, found_b)] = [halves for path, halves in held(llm).items() if path.startswith(name)]
                assert found_a[:4, : a.shape[1]].equal(a.to(wanted)) and not found_a[4:].any()
                assert found_b[:, :4].equal((b.float() * (alpha / 4)).to(wanted)) and not found_b[:, 4:].any()


def test_a_later_version_is_laid_out_as_the_first(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are looked at all the same; another kind is laid out anew, and no file is written."""
    model, folder, made = qwen
    calls, make = [], AdapterLayouts._make
    monkeypatch.setattr(AdapterLayouts, "_make", lambda *args: [calls.append(args), make(*args)][1])
    monkeypatch.setattr(nanovllm.adapters, "TemporaryDirectory", None)
    modules, config = linears(model), CONFIG | {"target_modules": "all-linear"}
    versions = [random_tensors(model, modules, config, seed) for seed in range(3)]
    spoilt = dict(versions[1])
    spoilt[f"base_model.model.{modules[3]}.lora_B.weight"] = torch.full_like(
        spoilt[f"base_model.model.{modules[3]}.lora_B.weight"], torch.inf
    )
    with LLM(str(folder), **LORA) as llm:
        for number in (0, 1):
            own = config | {"lora_dropout": number / 10}  # which changes nothing
            request = llm.load_adapter("policy", tensors=versions[number], config=own)
            outputs = generate(llm, PROMPTS, request)
            check_values(model, [(None, versions[number], config)], outputs, [1] * 3)
        with pytest.raises(ValueError, match=f"{modules[3]}: lora_B holds NaN or infinity"):
            llm.load_adapter("policy", tensors=spoilt, config=config)
        with pytest.raises(ValueError, match="use_dora"):
            llm.load_adapter("policy", tensors=versions[1], config=config | {"use_dora": True})
        again = generate(llm, PROMPTS, request)
        assert [scores(one) for one in again] == [scores(one) for one in outputs]
        request = llm.load_adapter("policy", tensors=versions[2], config=config)
        check_values(model, [(None, versions[2], config)], generate(llm, PROMPTS, request), [1] * 3)
        assert len(calls) == 2, "that with use_dora is one"
        request = llm.load_adapter("policy", tensors=made[1][1], config=made[1][2])
        check_values(model, made, generate(llm, PROMPTS, request), [2] * 3)
        assert len(calls) == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_from_memory_as_from_a_folder(ranks: int, qwen: Any) -> None:
    model, folder, made = qwen
    with LLM(str(folder), **LORA, tensor_parallel_size=ranks) as llm:
        for path, tensors, config in made:
            there = generate(llm, PROMPTS, llm.load_adapter("there", path))
            here = generate(llm, PROMPTS, llm.load_adapter("here", tensors=tensors, config=config))
            assert [scores(one) for one in here] == [scores(one) for one in there]
        _, tensors, config = made[0]
        for given, said in (({}, "has no tensors"), (tensors | {"x": torch.ones(2)}, "tensor 'x'")):
            with pytest.raises(ValueError, match=said):
                llm.load_adapter("a", tensors=given, config=config)
        check_values(model, made, generate(llm, PROMPTS, nanovllm.LoRARequest("here")), [3] * 3)


@pytest.mark.parametrize("kind", ["group", "bucket"])
def test_a_trainer_sends_an_adapter(kind: str, qwen: Any) -> None:
    model, folder, made = qwen
    _, tensors, config = made[0]
    with LLM(str(folder), **LORA) as llm, ThreadPoolExecutor() as pool:
        receiver, info = WeightReceiver(llm, "cpu", timeout=60), init_info(packed=True)
        if kind == "group":
            sender = pool.submit(WeightSender, info, "cpu", timeout=60)
            receiver.init(info)
            sent = pool.submit(sender.result(60).send, tensors.items())
            found = dict(receiver.tensors(described([Entry.of(*pair) for pair in tensors.items()])))
            sent.result(60)
        else:
            bucket = SharedBucket(sum(tensor.nbytes for tensor in tensors.values()), "cpu")
            found = dict(receiver.tensors(bucket.fill([*tensors.items()])))
        request = llm.load_adapter("policy", tensors=found, config=config)
        receiver.close()
        check_values(model, made, generate(llm, PROMPTS, request), [1] * 3)
