"""Rows with adapters against their published definition in float32, rows without them to the bit, and who has what
while adapters come and go."""

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.peft_files import CONFIG, adapted, random_tensors, save
from exactness import family_cases
from exactness.family_cases import CASES, make_model, with_layers
from padding import PaddedSteps
from torch import nn

from nanovllm import LLM, AsyncLLM, LoRARequest, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.executor.resolve import settle
from nanovllm.models.adapter_files import is_target
from nanovllm.models.registry import read_model_config
from nanovllm.outputs import RequestOutput
from nanovllm.runner.footprint import GPUS, footprint_of

PROMPTS = [[5], [7, 3, 200, 9, 31, 77], [(37 * i + 11) % 211 for i in range(28)]]
SCORED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "max_model_len": 256, "num_kvcache_blocks": 64}
LORA = {**OPTIONS, "enable_lora": True, "max_loras": 2}


def linears(model: nn.Module) -> list[str]:
    """Names of those that take adapters."""
    named = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    return [name for name in named if ".layers." in name and not name.endswith((".gate", "expert_gate", "kv_b_proj"))]


def make_adapters(model: nn.Module, folder: Path) -> list[tuple[Path, dict[str, torch.Tensor], dict[str, Any]]]:
    """Three kinds: all layers; ranks and scales of their own in some layers; an expression with rslora."""
    modules, made = linears(model), []
    ends = sorted({name.rpartition(".")[2] for name in modules})
    changes: list[dict[str, Any]] = [
        {"target_modules": "all-linear"},
        {"target_modules": ends[:2], "layers_to_transform": [1, 2], "r": 17, "rank_pattern": {ends[0]: 3},
         "alpha_pattern": {ends[1]: 9}},
        {"target_modules": rf".*\.layers\.[0-2]\..*\.({'|'.join(ends[1:])})", "use_rslora": True},
    ]  # fmt: skip
    for number, changed in enumerate(changes):
        config = CONFIG | changed
        tensors = random_tensors(model, [name for name in modules if is_target(config, name)], config, number)
        made.append((save(folder / f"adapter{number}", tensors, **changed), tensors, config))
    return made


def scores(output: RequestOutput) -> list[float]:
    """Log-probabilities of all tokens but the first; of the output's, where those of the prompt were not asked for."""
    ids = [*(output.prompt_token_ids or []), *output.outputs[0].token_ids]
    tables = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    pairs = zip(ids[-len(tables) :], tables, strict=True)
    return [table[token].logprob for token, table in pairs]  # type: ignore[index]


def expected_scores(model: nn.Module, ids: list[int]) -> torch.Tensor:
    return scores_of_texts(model, [ids])[0]


@torch.inference_mode()
def scores_of_texts(model: nn.Module, texts: Sequence[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities of all tokens but the first of each text, by one pass: no token sees the zeros behind it."""
    longest = max(map(len, texts))
    padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in texts])
    logprobs = model(padded).logits[:, :-1].float().log_softmax(-1)
    return [row[: len(ids) - 1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            for row, ids in zip(logprobs, texts, strict=True)]  # fmt: skip


def generate(
    llm: LLM, prompts: Sequence[list[int]], requests: Any = None, params: SamplingParams = SCORED
) -> list[RequestOutput]:
    return llm.generate(list(prompts), params, use_tqdm=False, lora_request=requests)


FAMILIES = [
    "qwen2", "phi3", "starcoder2", "granite", "gemma4", "gemma4, keys of other layers and inputs of each", "qwen3_next",
    "qwen3_5", "lfm2", "granite 4", "nemotron_h", "olmo_hybrid", "laguna", "hy_v3", "deepseek_v3", "deepseek_v2, lite",
]  # fmt: skip
OF_SUCH_LAYERS = ["llama", "qwen3", "glm4", "gemma2", "cohere", "olmo2", "nemotron"]


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in OF_SUCH_LAYERS)])
def test_rows_compute_by_their_own_adapters(family: str, tmp_path: Path) -> None:
    """Mixed, in chunks of 16 tokens, from the cache, and with fewer slots than adapters."""
    model = make_model(CASES[family])
    folder = family_cases.save(model, CASES[family], tmp_path / "model")
    made = make_adapters(model, tmp_path)
    requests = [None, *(LoRARequest(f"a{n}", lora_path=str(path)) for n, (path, _, _) in enumerate(made))]
    given = [(prompt, number) for prompt in PROMPTS for number in range(4)]
    with LLM(str(folder), **LORA, max_num_batched_tokens=16) as llm:
        for params in (SCORED, replace(SCORED, prompt_logprobs=None, max_tokens=3)):
            prompts, numbers = zip(*given, strict=True)
            outputs = generate(llm, prompts, [requests[number] for number in numbers], params)
            check_values(model, made, outputs, numbers)
        assert sum(output.num_cached_tokens or 0 for output in outputs) > 0


def check_values(model: nn.Module, made: Any, outputs: list[RequestOutput], numbers: Sequence[int]) -> None:
    """numbers: of each output's adapter, counted from 1; 0: none."""
    texts = [[*(output.prompt_token_ids or []), *output.outputs[0].token_ids] for output in outputs]
    base = scores_of_texts(model, texts)
    expected = [*base]
    for number in {*numbers} - {0}:
        places = [place for place, one in enumerate(numbers) if one == number]
        with adapted(model, *made[number - 1][1:]):
            for place, one in zip(places, scores_of_texts(model, [texts[place] for place in places]), strict=True):
                expected[place] = one
    changed = 0
    for output, of_base, one in zip(outputs, base, expected, strict=True):
        found = torch.tensor(scores(output))
        torch.testing.assert_close(found, one[-len(found) :], rtol=1e-4, atol=5e-4)
        changed += (one - of_base).abs().max().item() > 0.05
    assert changed == sum(number > 0 for number in numbers)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Any]:
    folder, case = tmp_path_factory.mktemp("qwen"), with_layers(CASES["qwen3"], 3)
    model = make_model(case)
    return model, family_cases.save(model, case, folder / "model"), make_adapters(model, folder)


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"quantization": "fp8"}, {"quantization": "int4"},
     {"quantization": "int4", "dtype": "bfloat16"}, {"exact_bits": "batch"}],
)  # fmt: skip
def test_rows_without_adapter_keep_their_bits(options: dict[str, Any], qwen: Any) -> None:
    """Also beside rows that have one."""
    _, folder, made = qwen
    request = LoRARequest("a", lora_path=str(made[0][0]))
    with LLM(str(folder), **OPTIONS, **options) as llm:
        expected = [scores(output) for output in generate(llm, PROMPTS)]
        among = [scores(output) for output in generate(llm, [*PROMPTS, *PROMPTS])][:3]
    with LLM(str(folder), **LORA, **options) as llm:
        assert [scores(output) for output in generate(llm, PROMPTS)] == expected
        llm.reset_prefix_cache()
        mixed = [scores(output) for output in generate(llm, [*PROMPTS, *PROMPTS], [None] * 3 + [request] * 3)]
    assert mixed[:3] == among and all(a != b for a, b in zip(mixed[3:], among, strict=True))


def test_a_row_with_an_adapter_is_what_it_is_alone(qwen: Any) -> None:
    """Among others, with more slots, in chunks and preempted, to the bit."""
    _, folder, made = qwen
    requests = [LoRARequest(f"a{n}", lora_path=str(path)) for n, (path, _, _) in enumerate(made)]
    exact, longer = {"exact_bits": "batch"}, replace(SCORED, max_tokens=10)
    with LLM(str(folder), **{**LORA, **exact, "max_loras": 1}) as llm:
        alone = [scores(generate(llm, [prompt], request, longer)[0]) for prompt in PROMPTS for request in requests]
    given = [(prompt, request) for prompt in PROMPTS for request in requests]
    tight = {"num_kvcache_blocks": 5, "max_num_batched_tokens": 9, "disable": ("async_scheduling", "lookahead")}
    for options in ({"max_loras": 3}, {"max_loras": 3, **tight}, tight):
        with LLM(str(folder), **{**LORA, **exact, **options}) as llm:
            found = generate(llm, *zip(*given, strict=True), longer)
            assert llm.stats().num_preemptions > 0 or options == {"max_loras": 3}
            assert [scores(output) for output in found] == alone
            llm.engine.scheduler.check_integrity()  # type: ignore[attr-defined]


def test_padded_steps_compute_the_same(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As graphs hold them: with adapters where a row of the step has one, and without."""
    model, folder, made = qwen
    request, numbers = LoRARequest("a", lora_path=str(made[0][0])), [1, 0, 1, 0, 0]
    with LLM(str(folder), **LORA) as llm:
        padded = PaddedSteps(llm, monkeypatch)
        prompts = [PROMPTS[number % 3] for number in range(5)]
        params = replace(SCORED, prompt_logprobs=None)
        outputs = generate(llm, prompts, [request if number else None for number in numbers], params)
        check_values(model, made, outputs, numbers)
        generate(llm, PROMPTS, None, params)
    assert {shape.has_adapters for shape in padded.used} == {False, True}


def test_the_same_on_two_ranks(qwen: Any, tmp_path: Path) -> None:
    model, folder, made = qwen
    numbers = [0, 1, 2, 3, 1, 0]
    requests = [None, *(LoRARequest(f"a{n}", lora_path=str(path)) for n, (path, _, _) in enumerate(made))]
    with LLM(str(folder), **LORA, tensor_parallel_size=2) as llm:
        outputs = generate(llm, [*PROMPTS, *PROMPTS], [requests[number] for number in numbers])
        with pytest.raises(ValueError, match="max_lora_rank=32"):
            llm.load_adapter("b", save(tmp_path / "wide", {
                name: torch.ones(40, t.shape[1]) if "lora_A" in name else torch.ones(t.shape[0], 40)
                for name, t in made[0][1].items()}, r=40, target_modules="all-linear"))  # fmt: skip
        again = generate(llm, PROMPTS[:1], requests[1])
    check_values(model, made, outputs, numbers)
    assert scores(again[0]) == pytest.approx(expected_of(model, made[0], again[0]), abs=5e-4)


def expected_of(model: nn.Module, adapter: Any, output: RequestOutput) -> list[float]:
    with adapted(model, *adapter[1:]):
        return expected_scores(model, [*(output.prompt_token_ids or []), *output.outputs[0].token_ids]).tolist()


def test_of_a_young_adapter_most_survives_in_bfloat16(tmp_path: Path) -> None:
    """Added to a result that is rounded already, half of a change of 1e-3 would be lost."""
    from types import SimpleNamespace

    from nanovllm.kernels import select_kernels
    from nanovllm.kernels.plan.plan import Planner
    from nanovllm.layers.adapted import AdapterRoom
    from nanovllm.layers.context import LayerContext
    from nanovllm.layers.linear import MergedColumnParallelLinear
    from nanovllm.layers.step import Call

    torch.manual_seed(0)
    group: Any = SimpleNamespace(rank=0, size=1, width_multiple=1, exact_bits=None)
    context = LayerContext(
        group, select_kernels("cpu"), torch.bfloat16, torch.device("cpu"), planner=Planner(),
        adapters=AdapterRoom(1, 16),
    )  # fmt: skip
    with torch.inference_mode():
        layer = MergedColumnParallelLinear(context, 1024, {"up_proj": 512})
        layer.weight.normal_(0, 1024**-0.5)
        layer.matrix.a.normal_(0, 1024**-0.5)  # type: ignore[attr-defined]
        layer.matrix.b.normal_(0, 1e-3 * 16**-0.5)  # type: ignore[attr-defined]
        x = torch.randn(64, 1024).bfloat16()
        step: Any = SimpleNamespace(adapters=torch.zeros(64, dtype=torch.int32))
        a, b = layer.matrix.a[0].double(), layer.matrix.b[0].double()  # type: ignore[attr-defined]
        delta = x.double() @ a.T @ b.T
        gained = layer(x, Call(step)).double() - layer(x, Call(None)).double()
    assert (gained * delta).sum() / delta.square().sum() > 0.95


def test_prefixes_are_keyed_by_the_adapters_bytes(qwen: Any, tmp_path: Path) -> None:
    """A reload with other bytes from one path under one name hits nothing old; equal bytes by another name do."""
    _, folder, made = qwen
    path = shutil.copytree(made[0][0], tmp_path / "adapter")
    prompt = PROMPTS[2] * 2
    plain = SamplingParams(temperature=0, max_tokens=2)
    with LLM(str(folder), **LORA) as llm:

        def cached(request: LoRARequest | None) -> int:
            return generate(llm, [prompt], request, plain)[0].num_cached_tokens or 0

        first = LoRARequest("a", lora_path=str(path))
        assert cached(None) == 0 and cached(None) > 0
        assert cached(first) == 0 and cached(first) > 0
        shutil.copytree(path, tmp_path / "copy")
        assert cached(LoRARequest("same bytes", lora_path=str(tmp_path / "copy"))) > 0
        shutil.copytree(made[1][0], path, dirs_exist_ok=True)
        assert cached(first) > 0  # it is loaded, and stays what it is
        assert cached(LoRARequest("a", lora_path=str(path), load_inplace=True)) == 0
        assert cached(LoRARequest("a")) > 0
        with pytest.raises(ValueError, match="another adapter is already loaded"):
            cached(LoRARequest("a", lora_path=str(tmp_path / "copy")))


def test_rows_in_flight_end_under_theirs(qwen: Any) -> None:
    model, folder, made = qwen
    with LLM(str(folder), **LORA) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)  # steps go on while others are read
        ids: dict[int, int] = {}
        gained: dict[int, list[int]] = {}

        def step() -> None:
            for output in llm.step():
                gained[output.request_id] += output.new_token_ids

        for number, (_, tensors, config) in enumerate(made):
            request = llm.load_adapter("policy", tensors=tensors, config=config)
            request_id = llm.add_request(PROMPTS[1], params, lora_request=request)
            ids[request_id], gained[request_id] = number, []
            if number == 0:
                step()
        step()
        stats = llm.stats()
        assert len(stats.running_adapters) == 2 and stats.waiting_adapters == ("policy",)
        assert all(len(digest) == 64 for digest in stats.running_adapters), "they have no name any more"
        llm.remove_adapter("policy")
        with pytest.raises(ValueError, match="policy"):
            llm.add_request(PROMPTS[1], params, lora_request=LoRARequest("policy"))
        while llm.has_unfinished_requests():
            step()
        held = llm.engine.executor.runner.adapters._held  # type: ignore[attr-defined]
        assert len(held) == 3
        llm.load_adapter("other", made[0][0])
        assert len(held) == 1
        with pytest.raises(ValueError, match="policy"):
            llm.remove_adapter("policy")
    for request_id, number in ids.items():
        with adapted(model, *made[number][1:]), torch.inference_mode():
            text = [*PROMPTS[1]]
            for _ in range(60):
                text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        assert gained[request_id] == text[6:]


def test_a_footprint_counts_the_slots(qwen: Any) -> None:
    """As an engine allocates them."""
    _, folder, _ = qwen
    model = read_model_config(EngineConfig(str(folder)))
    sizes = []
    for options in ({}, {"enable_lora": True, "max_loras": 3, "max_lora_rank": 17}):
        config = settle(EngineConfig(str(folder), device="cuda", **options), model, (9, 0))
        sizes.append(footprint_of(config, model, GPUS["H200"]))
    with LLM(str(folder), **{**LORA, "max_loras": 3, "max_lora_rank": 17}) as llm:
        layers = llm.engine.executor.runner.adapters._layers  # type: ignore[attr-defined]
        held = sum(part.a.numel() + part.b.numel() for part in layers.values())
    assert sizes[1].adapters == held * 2 and sizes[0].adapters == 0  # in bfloat16
    assert sizes[1].parts["adapters"] == sizes[1].adapters and sizes[1].blocks < sizes[0].blocks


def test_replicas_have_every_adapter(qwen: Any) -> None:
    """One that is restarted loads those that have a name by then, also from memory."""
    model, folder, made = qwen
    numbers = [1, 0, 2, 1, 2, 0]
    for count in (2, 1):
        with LLM(str(folder), **LORA, data_parallel_size=count, data_parallel_backend="local") as llm:
            requests = [None, LoRARequest("a", lora_path=str(made[0][0]))]
            requests.append(llm.load_adapter("b", tensors=made[1][1], config=made[1][2]))
            given = PROMPTS * 2, [requests[number] for number in numbers]
            check_values(model, made, generate(llm, *given), numbers)
            if count == 1:
                os.kill(llm.engine.engines.all[0].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
                check_values(model, made, generate(llm, *given), numbers)
                assert llm.engine_info()["num_restarts"] == 1
            llm.remove_adapter("b")
            with pytest.raises(ValueError, match="no adapter of this name"):
                generate(llm, *given)


def test_requests_that_wait_for_a_replica_end_under_theirs(qwen: Any) -> None:
    """While others get its name, which nobody has at last; then it is dropped."""
    _, folder, made = qwen
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(str(folder), **LORA, data_parallel_size=2, max_num_seqs=1) as llm:
        request = llm.load_adapter("a", made[0][0])
        [expected] = generate(llm, [PROMPTS[1]], request, params)
        gained: dict[int, list[int]] = {}
        for _ in range(8):
            gained[llm.add_request(PROMPTS[1], params, lora_request=request)] = []
        llm.load_adapter("a", made[1][0])
        llm.remove_adapter("a")
        while llm.has_unfinished_requests():
            for output in llm.step():
                gained[output.request_id] += output.new_token_ids
        assert [*gained.values()] == [expected.token_ids] * 8
        llm.load_adapter("b", made[1][0])
        assert not llm.engine.fleet._states[0].kept_adapters  # type: ignore[attr-defined]


def test_asyncio_takes_adapters(qwen: Any) -> None:
    _, folder, made = qwen
    request = LoRARequest("a", lora_path=str(made[0][0]))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    async def text(llm: AsyncLLM, given: LoRARequest | None) -> list[int]:
        return [token async for delta in llm.generate(PROMPTS[1], params, given) for token in delta.token_ids]

    async def run() -> list[list[int]]:
        async with await AsyncLLM.start(str(folder), **LORA) as llm:
            return list(await asyncio.gather(text(llm, request), text(llm, None)))

    found = asyncio.run(run())
    with LLM(str(folder), **LORA) as llm:
        expected = [output.token_ids for output in generate(llm, [PROMPTS[1]] * 2, [request, None], params)]
    assert found == expected and found[0] != found[1]
