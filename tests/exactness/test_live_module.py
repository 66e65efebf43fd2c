"""LLM.from_module: the engine computes with the parameters of a live module, whatever its owner does to them."""

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_cases import CASES, PROMPTS, Case, make_model

from nanovllm import LLM, SamplingParams
from nanovllm.layers.weights import CheckpointWeight, Shard, WeightedModule, parameter, whole
from nanovllm.models.live_module import LiveModule
from nanovllm.models.names import CheckpointNames

DEMO = Path(__file__).parents[2] / "assets" / "demo-qwen3"
NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "num_kvcache_blocks": 48}
MIXED = ("llama, three a group, tied, biased", "qwen3", "phi3", "olmo2", "starcoder2", "gemma2", "glm4", "cohere2",
         "qwen2_moe", "qwen3_moe", "gemma4, experts", "qwen3_5", "granite 4 without experts", "glm4_moe_lite")
"""Kinds of sharing: tied heads, biases, fused tensors and stacked experts as they are; norms of 1 + w and rows in pairs
are copied; buffers that are weights."""
AS_OTHERS = ("olmo2", "starcoder2", "glm4", "qwen2_moe")


def is_greedy(model: Any, prompts: list[list[int]], found: list[list[int]]) -> bool:
    """Whether transformers' model finds each token the likeliest after those before it."""
    with torch.no_grad():
        logits = [model(torch.tensor([[*prompt, *ids]])).logits[0] for prompt, ids in zip(prompts, found, strict=True)]
    best = [each[len(prompt) - 1 : -1].argmax(-1).tolist() for prompt, each in zip(prompts, logits, strict=True)]
    return best == found and all(len(ids) == NUM_TOKENS for ids in found)


def ours(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """One step on one text."""
    ids = torch.tensor([PROMPTS[2]])
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in AS_OTHERS)) for n in MIXED])
def test_a_step_of_the_optimizer_changes_what_it_changes_in_transformers(name: str) -> None:
    model = make_model(CASES[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer)  # the optimizer has state before the engine begins
    with LLM.from_module(model, **OPTIONS) as llm:
        before = ours(llm)
        assert is_greedy(model, PROMPTS, before)
        for _ in range(2):
            train(model, optimizer)
            after = ours(llm)
            assert is_greedy(model, PROMPTS, after)
        assert after != before
        assert llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].num_cached_tokens >= 16
    train(model, optimizer)  # it goes on without the engine


def sgd(model: Any) -> None:
    train(model, torch.optim.SGD(model.parameters(), lr=0.3))


def fused_adamw(model: Any) -> None:
    train(model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=True))


def one_by_one(model: Any) -> None:
    train(model, torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))


def load_another(model: Any) -> None:
    model.load_state_dict(make_model(CASES["gemma2"], seed=5).state_dict())


@pytest.mark.parametrize("change", [sgd, fused_adamw, one_by_one, load_another])
def test_every_change_in_place_is_noticed_and_cached_prefixes_are_forgotten(change: Callable[[Any], None]) -> None:
    model = make_model(CASES["gemma2"])
    with LLM.from_module(model, **OPTIONS) as llm:
        ours(llm)
        change(model)
        (output,) = llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == 0
        assert is_greedy(model, PROMPTS[2:], [output.outputs[0].token_ids])


def test_requests_of_the_callers_own_loop_see_a_change_too() -> None:
    model = make_model(CASES["llama"])
    with LLM.from_module(model, **OPTIONS) as llm:
        ours(llm)
        sgd(model)
        llm.add_request(PROMPTS[2], GREEDY)
        tokens = []
        while llm.has_unfinished_requests():
            tokens += [token for output in llm.step() for token in output.new_token_ids]
        assert is_greedy(model, PROMPTS[2:], [tokens])


def test_writes_that_torch_does_not_count_are_announced() -> None:
    model = make_model(CASES["gemma2"])
    with LLM.from_module(model, **OPTIONS) as llm:
        ours(llm)
        for parameter in model.parameters():
            parameter.data.mul_(0.7)
        llm.weights_changed()
        assert is_greedy(model, PROMPTS, ours(llm))


class Owner(torch.nn.Module):
    """The parameters of a mixer: queries beside their gates, keys, and a decay."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        for name, shape in (("q_proj", (8, 4)), ("k_proj", (2, 4)), ("decay", (4,))):
            self.model.register_parameter(name, torch.nn.Parameter(torch.randn(shape).bfloat16()))


class Mixer(WeightedModule):
    """A layer that keeps queries with keys, gates apart, and the decay in float32."""

    def __init__(self) -> None:
        super().__init__()
        made = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
        self.qk, self.gate = parameter(6, 4, **made), parameter(4, 4, **made)
        self.decay = parameter(4, dtype=torch.float32, device=made["device"])

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield CheckpointWeight(f"{prefix}.q_proj", (8, 4), (Shard(self.qk[:4], 0, 0), Shard(self.gate, 0, 4)))
        yield CheckpointWeight(f"{prefix}.k_proj", (2, 4), (Shard(self.qk[4:], 0, 0),))
        yield whole(f"{prefix}.decay", self.decay)


def test_what_lands_in_two_places_or_in_a_wider_type_is_copied() -> None:
    owner, mixer = Owner(), Mixer()
    live = LiveModule(owner, CheckpointNames())
    live.share(mixer, is_tied=False)
    for _ in range(2):
        q, k, decay = (owner.get_parameter(f"model.{name}") for name in ("q_proj", "k_proj", "decay"))
        assert torch.equal(mixer.qk, torch.cat([q[:4], k])) and torch.equal(mixer.gate, q[4:])
        assert torch.equal(mixer.decay, decay.float()) and mixer.decay.dtype == torch.float32
        with torch.no_grad():
            q.add_(1.0), k.mul_(2.0), decay.neg_()
        assert live.has_changed()
        live.refresh()


BREAKS: dict[str, Callable[[Any], Any]] = {
    "to another type": lambda model: model.to(torch.bfloat16),
    "assigned tensors": lambda model: model.load_state_dict(
        {name: value.clone() for name, value in model.state_dict().items()}, assign=True
    ),
    "one reassigned": lambda model: setattr(
        model.model.layers[1].self_attn.k_proj.weight, "data", model.model.layers[0].self_attn.k_proj.weight.data
    ),
    "a module replaced": lambda model: setattr(model, "lm_head", torch.nn.Linear(48, 211, bias=False)),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_module_that_got_other_tensors_is_named(how: str) -> None:
    model = make_model(CASES["llama"])
    with LLM.from_module(model, **OPTIONS) as llm:
        ours(llm)
        BREAKS[how](model)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"module: parameter '.*weight' .*make a new engine"):
                ours(llm)
        with pytest.raises(RuntimeError, match="make a new engine"):
            llm.add_request(PROMPTS[0], GREEDY)


def resident_bytes() -> int:
    """Resident bytes, without what the allocator keeps of freed memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_parameters_are_not_held_twice(tmp_path: Path) -> None:
    """Nor is what the module saves other than before."""
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "vocab_size": 16384,
             "num_hidden_layers": 2}  # fmt: skip
    model = make_model(Case("Qwen3", {**shape, "head_dim": 128, "num_key_value_heads": 4}))
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    state = {name: value.double().sum() for name, value in model.state_dict().items()}
    with LLM.from_module(make_model(CASES["qwen3"]), **OPTIONS) as llm:
        ours(llm)  # what the libraries need once
    before = resident_bytes()
    with LLM.from_module(model, skip_tokenizer_init=True, num_kvcache_blocks=4, max_num_batched_tokens=64) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        assert resident_bytes() - before < 0.05 * num_bytes
        info = llm.engine_info()
        assert info["copied_parameters"] == 0
        assert info["shared_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert {name: value.double().sum() for name, value in saved.items()} == state


def test_widths_that_are_padded_are_shared_but_for_the_one_across_rows() -> None:
    model = make_model(Case("Llama", {"num_hidden_layers": 2}))  # a width of 52
    with LLM.from_module(model, **OPTIONS) as llm:
        copied = sum(56 * 48 for _ in range(2))
        assert llm.engine_info()["copied_parameters"] == copied
        sgd(model)
        assert is_greedy(model, PROMPTS, ours(llm))


def test_text_goes_through_the_given_tokenizer() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model = make_model(Case("Llama", {"vocab_size": len(tokenizer)}))
    with LLM.from_module(model, tokenizer, num_kvcache_blocks=48) as llm:
        (output,) = llm.generate("one two", GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == tokenizer.encode("one two")
        assert is_greedy(model, [output.prompt_token_ids], [output.outputs[0].token_ids])


def test_what_cannot_be_served_is_named() -> None:
    model = make_model(CASES["llama"])
    for options, message in (
        ({}, "tokenizer=None: must be given"),
        ({**OPTIONS, "tensor_parallel_size": 2}, "tensor_parallel_size=2: must be 1, as the module has it"),
        ({**OPTIONS, "dtype": "bfloat16"}, "dtype='bfloat16': must be 'float32', as the module has it"),
        ({**OPTIONS, "device": "cuda"}, "device='cuda': must be 'cpu', as the module has it"),
        ({**OPTIONS, "load_format": "dummy"}, "load_format='dummy': must be 'auto'"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM.from_module(model, **options)
    with pytest.raises(ValueError, match="module='Linear': must be a transformers model"):
        LLM.from_module(torch.nn.Linear(2, 2), **OPTIONS)
    with pytest.raises(ValueError, match="module=str: must have parameters"):
        LLM.from_module("a/model", **OPTIONS)  # type: ignore[arg-type]
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=48, n_head=6))
    with pytest.raises(ValueError, match="architectures='GPT2LMHeadModel': must be one of"):
        LLM.from_module(other, **OPTIONS)
    model.lm_head.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"'lm_head.weight' is torch.bfloat16 on cpu: must be torch.float32"):
        LLM.from_module(model, **OPTIONS)
    sound = make_model(CASES["llama"])
    torchs = {"dtype": torch.float32, "device": torch.device("cpu"), "tensor_parallel_size": None}
    with LLM.from_module(sound, **OPTIONS, **torchs) as llm, pytest.raises(ValueError, match="load them there"):
        llm.load_weights(sound.state_dict().items())
