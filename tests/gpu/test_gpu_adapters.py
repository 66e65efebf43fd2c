"""Adapters on a GPU: what rows compute is what the CPU's twins do in float32, and graphs do as eager steps."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.peft_files import CONFIG, random_tensors, save
from adapters.test_adapters import linears, scores
from safetensors.torch import load_file
from serve.serving import ANSWER, ASK, CHAT, ready_server
from small_models import make_checkpoint
from system import free_port
from transformers import AutoModelForCausalLM

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.models.adapter_files import Adapter
from nanovllm.runner.adapter_layout import names_of_experts
from nanovllm.transfer.buckets import Entry, described
from nanovllm.transfer.receiver import WeightSender
from nanovllm.transfer.shared import SharedBucket

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
PROMPTS = [[5 + (37 * i + 11 * number) % 900 for i in range(length)] for number, length in enumerate((40, 3, 150, 70))]
SCORED = SamplingParams(temperature=0, max_tokens=1, logprobs=0, prompt_logprobs=0)
ROUNDS = [[0, 1, 2, 1], [2, 0, 0, 1], [0, 0, 0, 0]]
"""Adapters of the prompts; 0: none."""


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    folder = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(EngineConfig("demo").model)
    paths = [save(folder / str(seed), random_tensors(model, linears(model), CONFIG, seed)) for seed in (1, 2)]
    return [None, *(LoRARequest(path.name, lora_path=str(path)) for path in paths)]


def scored(requests: list[LoRARequest | None], model: str = "demo", **options: Any) -> list[torch.Tensor]:
    """Log-probabilities of each prompt, in each round."""
    with LLM(model, enable_lora=True, max_loras=2, max_model_len=512, num_kvcache_blocks=64, **options) as llm:
        found = []
        for numbers in ROUNDS:
            llm.reset_prefix_cache()
            rows = llm.generate(PROMPTS, SCORED, use_tqdm=False, lora_request=[requests[number] for number in numbers])
            found += [torch.tensor(scores(row)[:-1]) for row in rows]
        return found


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_values_are_those_of_the_twins(quantization: str | None, requests: list[LoRARequest | None]) -> None:
    """Up to the noise of bfloat16 and e4m3, which is small beside what the adapters change."""
    options = {"quantization": quantization}
    expected = scored(requests, device="cpu", dtype="float32", **options)
    base = scored([None] * 3, device="cpu", dtype="float32", **options)
    found = scored(requests, device=DEVICE, dtype="bfloat16", **options)
    numbers = [number for each in ROUNDS for number in each]
    for number, ours, right, without in zip(numbers, found, expected, base, strict=True):
        noise, change = (ours - right).abs().mean().item(), (right - without).abs().mean().item()
        assert noise < 0.3 and (change > 1 if number else change == 0), (number, noise, change)


@pytest.mark.parametrize("eager", [False, True])
def test_tokens_do_not_go_by_the_step(eager: bool, requests: list[LoRARequest | None]) -> None:
    """Decoded beside others in graphs or eagerly, a row draws what it scores highest by itself."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    options: dict[str, Any] = {"max_model_len": 512, "num_kvcache_blocks": 64, "enforce_eager": eager}
    with LLM("demo", device=DEVICE, enable_lora=True, max_loras=2, **options) as llm:
        together = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=[requests[n] for n in ROUNDS[0]])
        for row, number in zip(together, ROUNDS[0], strict=True):
            one = row.outputs[0]
            ids = [*(row.prompt_token_ids or []), *one.token_ids]
            [again] = llm.generate([ids], SCORED, use_tqdm=False, lora_request=requests[number])
            drawn = [table[token].logprob for token, table in zip(one.token_ids, one.logprobs or [], strict=True)]
            known = torch.tensor(scores(again)[:-1])[-24:]
            assert (torch.tensor(drawn) - known).abs().max() < 0.2


def test_an_adapter_from_memory(requests: list[LoRARequest | None]) -> None:
    """It is the one of a folder with these tensors, and slots are given on."""
    model = AutoModelForCausalLM.from_pretrained(EngineConfig("demo").model)
    tensors = random_tensors(model, linears(model), CONFIG, 1)
    with LLM("demo", device=DEVICE, enable_lora=True, max_loras=1, max_model_len=512, num_kvcache_blocks=64) as llm:
        mine = llm.load_adapter("mine", tensors=tensors, config=CONFIG)
        [ours] = llm.generate(PROMPTS[:1], SCORED, use_tqdm=False, lora_request=mine)
        [other] = llm.generate(PROMPTS[:1], SCORED, use_tqdm=False, lora_request=requests[2])
        [theirs] = llm.generate(PROMPTS[:1], SCORED, use_tqdm=False, lora_request=requests[1])
    assert scores(ours) == scores(theirs) != scores(other)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2, "share_gpus": True, "enforce_eager": True}])
def test_a_gpu_arranges_tensors_as_the_host_would(options: dict[str, Any]) -> None:
    """Wherever they are, of each type, times the scale, and in pinned memory that another adapter had before."""
    model = AutoModelForCausalLM.from_pretrained(EngineConfig("demo").model)
    slots: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_model_len": 512, "num_kvcache_blocks": 64}
    with LLM("demo", device=DEVICE, **slots, **options) as llm:
        adapters = llm.engine.executor.runner.adapters  # type: ignore[attr-defined]
        for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
            for alpha in (6, 8):
                config = CONFIG | {"lora_alpha": alpha}
                made = random_tensors(model, linears(model), config, seed)
                tensors = {name: tensor.to(dtype) for name, tensor in made.items()}
                adapter = Adapter("", config, tensors)
                by_host = torch.empty((layout := adapters.layouts.of(adapter)).size, dtype=adapters._dtype)
                layout.fill(by_host, [*tensors.values()])
                for given in (tensors, {name: tensor.cuda() for name, tensor in tensors.items()}):
                    llm.load_adapter("a", tensors=given, config=config)
                    [held] = adapters._held.values()
                    for halves, expected in zip(held.values(), layout.halves(by_host).values(), strict=True):
                        assert all(half.is_pinned() for half in halves)
                        assert all(half.equal(other) for half, other in zip(halves, expected, strict=True))


def random_adapter(llm: LLM, seed: int, folder: Path) -> LoRARequest:
    """An adapter of all layers that take one, of each expert's too."""
    rows, adapters = torch.Generator().manual_seed(seed), llm.engine.executor.runner.adapters  # type: ignore[attr-defined]
    tensors: dict[str, torch.Tensor] = {}
    for path, module, part in adapters.layouts.all_parts:
        stack, (out, columns) = adapters._layers[path].stack, (part.b.shape[-2], part.a.shape[-1])
        for name in names_of_experts(module, part.path, *stack)[0] if stack else [module]:
            a, b = torch.randn(4, columns, generator=rows), torch.randn(out, 4, generator=rows)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a / math.sqrt(columns)
            tensors[f"base_model.model.{name}.lora_B.weight"] = b * 0.3
    return LoRARequest(folder.name, lora_path=str(save(folder, tensors, target_modules="all-linear")))


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "gpt_oss", "gemma4, experts", "qwen3_5", "qwen3_5_moe", "nemotron_h", "lfm2"]
)
def test_adapters_of_experts_and_recurrent_layers(kind: str, tmp_path: Path) -> None:
    """Values of prompts are those of the twins, and rows decoded in graphs, alone or beside others, draw what they
    score highest by themselves, up to the noise of bfloat16."""
    options: dict[str, Any] = {"skip_tokenizer_init": True, "model": make_checkpoint(kind, tmp_path / "model")}
    slots: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_model_len": 512, "num_kvcache_blocks": 64}
    with LLM(**options, **slots, device="cpu", dtype="float32") as llm:
        requests = [None, *(random_adapter(llm, seed, tmp_path / str(seed)) for seed in (1, 2))]
    expected = torch.cat(scored(requests, **options, device="cpu", dtype="float32"))
    base = torch.cat(scored([None] * 3, **options, device="cpu", dtype="float32"))
    parts = scored(requests, **options, device=DEVICE, dtype="bfloat16")
    found, numbers = torch.cat(parts), [number for each in ROUNDS for number in each]
    has_one = torch.cat([torch.full([len(part)], number > 0) for part, number in zip(parts, numbers, strict=True)])
    change, noise = (expected - base).abs(), (found - expected).abs()
    assert change[~has_one].max() < 1e-3 < 1 < change[has_one].mean()
    assert noise[has_one].mean() < 0.3 and noise[~has_one].mean() < 0.3
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    with LLM(**options, **slots, device=DEVICE) as llm:
        for count in (1, 4):
            given = [requests[number] for number in ROUNDS[1][:count]]
            rows = llm.generate(PROMPTS[:count], params, use_tqdm=False, lora_request=given)
            for row, request in zip(rows, given, strict=True):
                one = row.outputs[0]
                ids = [*(row.prompt_token_ids or []), *one.token_ids]
                [again] = llm.generate([ids], SCORED, use_tqdm=False, lora_request=request)
                drawn = [table[token].logprob for token, table in zip(one.token_ids, one.logprobs or [], strict=True)]
                apart = (torch.tensor(drawn) - torch.tensor(scores(again)[:-1])[-24:]).abs()
                assert apart.mean() < 0.25, count


@pytest.mark.parametrize("kind", ["bucket", "group"])
def test_a_trainer_sends_them_to_a_server(kind: str, requests: list[LoRARequest | None], tmp_path: Path) -> None:
    """From this process, on the engine's GPU by CUDA IPC, or on another one by NCCL: texts are those of the same from a
    folder."""
    if kind == "group" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    assert requests[1] is not None
    folder = Path(str(requests[1].lora_path))
    tensors = load_file(folder / "adapter_model.safetensors")
    options = ("--device", "cuda", "--enable-lora", "--max-loras", "1", "--admin-api-key", "admin")
    with ready_server(tmp_path, *options) as server, server.client("admin") as client, ThreadPoolExecutor() as pool:

        def post(path: str, **body: Any) -> Any:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def text(model: str) -> str:
            return str(post(CHAT, **ASK, model=model, max_tokens=20)["choices"][0]["message"]["content"])

        sent: Any
        if kind == "bucket":
            sent = SharedBucket(1 << 22, DEVICE)
            info = sent.fill([(name, tensor.to(DEVICE)) for name, tensor in tensors.items()])
            assert "ipc_handle" in info
        else:
            init_info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
            joined = pool.submit(post, "/init_weight_transfer_engine", init_info=init_info)
            sent = WeightSender(init_info, "cuda:1", timeout=60)
            joined.result(60)
            info = described([Entry.of(*pair) for pair in tensors.items()])
            sending = pool.submit(sent.send, tensors.items())
        config = json.loads((folder / "adapter_config.json").read_text())
        post("/v1/load_lora_adapter", lora_name="sent", lora_config=config, update_info=info)
        if kind == "group":
            sending.result(60)
        sent.close()
        post("/v1/load_lora_adapter", lora_name="read", lora_path=str(folder))
        assert text("sent") == text("read") != text("demo") == ANSWER
