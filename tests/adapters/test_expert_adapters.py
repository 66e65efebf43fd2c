"""Adapters of experts against their definition in float32, in all forms of files."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.peft_files import save
from adapters.test_adapters import LORA, PROMPTS, generate, scores, scores_of_texts
from exactness import family_cases
from exactness.family_cases import CASES, make_model
from torch import nn

from nanovllm import LLM, LoRARequest

RANK, SCALE = 4, 6 / 4
Stacks = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""A [E, r, in] and B [E, out, r] by the name of a parameter of experts."""


def is_turned(model: nn.Module, name: str) -> bool:
    """Whether a parameter is [E, in, out]."""
    return bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False))


def random_stacks(model: nn.Module, seed: int, shared: bool = False) -> Stacks:
    """shared: all experts have one A of what takes the hidden state, and one B of what yields it."""
    rows, found = torch.Generator().manual_seed(seed), {}
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.dim() == 3:
            count, out, columns = parameter.shape
            out, columns = (columns, out) if is_turned(model, name) else (out, columns)
            a = torch.randn(count, RANK, columns, generator=rows) / math.sqrt(columns)
            b = torch.randn(count, out, RANK, generator=rows) * 0.5
            is_down = name.endswith("down_proj")
            found[name] = (a[:1] if shared and not is_down else a, b[:1] if shared and is_down else b)
    return found


@contextmanager
def with_stacks(model: nn.Module, stacks: Stacks) -> Iterator[None]:
    """Context in which the experts' weights are W + s B A."""
    before = {name: model.get_parameter(name).data for name in stacks}
    for name, (a, b) in stacks.items():
        delta = SCALE * torch.matmul(b, a)
        model.get_parameter(name).data = before[name] + (delta.mT if is_turned(model, name) else delta)
    yield
    for name, data in before.items():
        model.get_parameter(name).data = data


def wrapped(stacks: Stacks, is_old: bool = False) -> dict[str, torch.Tensor]:
    """Tensors as PEFT writes them for target_parameters."""
    found = {}
    for name, (a, b) in stacks.items():
        module, _, own = name.rpartition(".")
        module += "" if own == "down_proj" else ".base_layer"
        a, b = (b.mT, a.mT) if is_old else (a, b)
        found[f"base_model.model.{module}.lora_A.weight"] = a.flatten(0, 1)
        found[f"base_model.model.{module}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def of_each(stacks: Stacks, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Tensors of experts that are modules of their own. names: parts of their names that checkpoints spell otherwise.
    """
    found = {}
    for name, (a, b) in stacks.items():
        parent, _, own = name.rpartition(".")
        owns = ("gate_proj", "up_proj") if own == "gate_up_proj" else (own,)
        for number in range(len(a)):
            for part, half in zip(owns, b[number].chunk(len(owns)), strict=True):
                module = f"base_model.model.{parent}.{number}.{part}"
                module = ".".join(names.get(one, one) for one in module.split("."))
                found[f"{module}.lora_A.weight"], found[f"{module}.lora_B.weight"] = a[number].clone(), half.clone()
    return found


def as_given(stacks: Stacks) -> dict[str, torch.Tensor]:
    halves = zip(("lora_A", "lora_B"), zip(*stacks.values(), strict=True), strict=True)
    return {f"base_model.model.{name}.{half}.weight": tensor.clone()
            for half, tensors in halves for name, tensor in zip(stacks, tensors, strict=True)}  # fmt: skip


MIXTRAL = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
STACKED = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
FORMS: dict[str, Any] = {
    "wrapped": (wrapped, STACKED),
    "wrapped, before 0.19": (lambda stacks: wrapped(stacks, True), {**STACKED, "peft_version": "0.18.1"}),
    "each": (lambda stacks: of_each(stacks, {}), {"target_modules": r".*\.experts\..*"}),
    "each of mixtral": (lambda stacks: of_each(stacks, MIXTRAL), {"target_modules": ["w1", "w2", "w3"]}),
    "shared outer": (as_given, STACKED),
}
WRAPPED = [
    *((family, "wrapped", {}) for family in ("qwen2_moe", "gemma4, experts", "nemotron_h with latent experts")),
    *(pytest.param(family, "wrapped", {}, marks=pytest.mark.slow)
      for family in ("mixtral", "glm4_moe", "granitemoe", "gpt_oss", "minimax_m2")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "form", "options"),
    [
        *WRAPPED,
        ("qwen3_moe", "wrapped", {"tensor_parallel_size": 2}), ("gpt_oss", "wrapped", {"tensor_parallel_size": 2}),
        ("qwen3_moe", "wrapped, before 0.19", {}), ("qwen3_moe", "each", {}), ("mixtral", "each of mixtral", {}),
        ("qwen3_next", "wrapped", {"tensor_parallel_size": 2}), ("qwen3_moe", "shared outer", {}),
        ("qwen3_moe", "wrapped", {"exact_bits": "batch"}),
    ],
)  # fmt: skip
def test_experts_compute_by_their_rows_adapters(
    family: str, form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Two adapters and none, mixed, in chunks; rows without one keep their bits."""
    model = make_model(CASES[family])
    folder = family_cases.save(model, CASES[family], tmp_path / "model")
    write, changed = FORMS[form]
    stacks = [random_stacks(model, seed, form == "shared outer") for seed in range(2)]
    requests: list[LoRARequest | None] = [None]
    for number, one in enumerate(stacks):
        if not any(name.endswith("gate_up_proj") for name in one):
            changed = {**changed, "target_parameters": ["experts.up_proj", "experts.down_proj"]}
        path = save(tmp_path / str(number), write(one), **changed)
        requests.append(LoRARequest(f"a{number}", lora_path=str(path)))
    given = [(prompt, number) for prompt in PROMPTS for number in range(3)]
    options = {**LORA, "max_num_batched_tokens": 9, **options}
    alone: list[list[float]] | None = None
    if "exact_bits" in options:
        with LLM(str(folder), **{**options, "enable_lora": False}) as llm:
            alone = [scores(output) for output in generate(llm, [prompt for prompt, _ in given])]
    with LLM(str(folder), **options) as llm:
        outputs = generate(llm, [prompt for prompt, _ in given], [requests[number] for _, number in given])
    texts = [[*(output.prompt_token_ids or []), *output.outputs[0].token_ids] for output in outputs]
    expected = [scores_of_texts(model, texts)]
    for one in stacks:
        with with_stacks(model, one):
            expected.append(scores_of_texts(model, texts))
    for place, (output, (_, number)) in enumerate(zip(outputs, given, strict=True)):
        found = torch.tensor(scores(output))
        torch.testing.assert_close(found, expected[number][place], rtol=1e-4, atol=1e-3)
        assert number or alone is None or found.tolist() == alone[place]
        assert not number or (expected[number][place] - expected[0][place]).abs().max() > 0.05


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """By its name; also one form beside another."""
    model = make_model(CASES["qwen3_moe"])
    folder = family_cases.save(model, CASES["qwen3_moe"], tmp_path / "model")
    stacks = random_stacks(model, 0)
    name = next(iter(stacks))
    (a, b), each, whole = stacks[name], of_each(stacks, {}), wrapped(stacks)
    last = list(each)[-1].removesuffix(".lora_B.weight")
    forms = {"target_modules": r".*\.experts\..*", **{"target_parameters": STACKED["target_parameters"]}}
    gate = "base_model.model.model.layers.0.mlp.gate"
    router = {f"{gate}.lora_A.weight": torch.ones(4, 48), f"{gate}.lora_B.weight": torch.ones(6, 4)}
    lacking = {key: value for key, value in whole.items() if "layers.2" not in key}
    with LLM(str(folder), **LORA) as llm:
        for number, (tensors, changed, said) in enumerate([
            (lacking, STACKED, "target_parameters=.*layers.2"),
            (wrapped({**stacks, name: (a[:5], b[:5])}), STACKED, "of 5 experts"),
            (wrapped({**stacks, name: (a[..., :7], b)}), STACKED, "lora_A is"),
            ({key: value for key, value in each.items() if last not in key}, FORMS["each"][1], "has no lora_A"),
            (each | whole, forms, "has an adapter, and so has"),
            (each | router, FORMS["each"][1], "mlp.gate: this model has no linear layer"),
        ]):  # fmt: skip
            with pytest.raises(ValueError, match=said):
                llm.load_adapter("a", save(tmp_path / str(number), tensors, **changed))
        assert not llm.engine.state.adapters
