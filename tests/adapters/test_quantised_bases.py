"""Adapters of quantised models: what a row's adapter adds is computed of values that are not rounded."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters.peft_files import CONFIG, random_tensors, save
from adapters.test_adapters import LORA, PROMPTS, check_values, expected_scores, generate, linears, scores
from adapters.test_expert_adapters import FORMS, SCALE, random_stacks, with_stacks
from checkpoints import make_model
from checkpoints import save as save_model
from transformers import AutoModelForCausalLM

from nanovllm import LLM, LoRARequest
from nanovllm.kernels import select_kernels
from nanovllm.kernels.plan.plan import Planner
from nanovllm.layers.adapted import AdapterRoom
from nanovllm.layers.context import LayerContext
from nanovllm.layers.linear import MergedColumnParallelLinear
from nanovllm.layers.step import Call
from nanovllm.model_config import Quantization

sys.path.append(os.fspath(Path(__file__).parents[1] / "exactness"))
from int4_checkpoints import quantize_folder, save_packed
from packed_formats import save_as
from test_int4_weights import SHAPE
from test_packed_checkpoints import save_experts


@pytest.mark.parametrize(("form", "ranks"), [("nvfp4", 2), ("mxfp4", 1), ("int8", 2), ("int8 in groups", 1)])
def test_rows_compute_by_their_own_adapters(form: str, ranks: int, tmp_path: Path) -> None:
    """As the wide checkpoint that a packed one stands for."""
    made = save_model(make_model(seed=3, **SHAPE), tmp_path / "made")
    packed, wide = save_as(form, made, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    config = {**CONFIG, "target_modules": "all-linear"}
    tensors = random_tensors(model, linears(model), config, 0)
    request = LoRARequest("a", lora_path=str(save(tmp_path / "a", tensors, target_modules="all-linear")))
    numbers = [1, 0, 1, 0, 1, 0]
    with LLM(str(packed), **LORA, max_num_batched_tokens=16, tensor_parallel_size=ranks) as llm:
        outputs = generate(llm, [*PROMPTS, *PROMPTS], [request if number else None for number in numbers])
    check_values(model, [(None, tensors, config)], outputs, numbers)


def test_experts_in_4_bits_compute_by_their_rows_adapters(tmp_path: Path) -> None:
    wide = save_experts("Qwen3Moe", tmp_path / "wide")
    packed = save_packed(wide, tmp_path / "packed", quantize_folder(wide, 32), "compressed-tensors")
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    model.set_attn_implementation("eager")
    stacks, (write, changed) = random_stacks(model, 0), FORMS["wrapped"]
    request = LoRARequest("a", lora_path=str(save(tmp_path / "a", write(stacks), **changed)))
    assert CONFIG["lora_alpha"] / CONFIG["r"] == SCALE
    for ranks in (1, 2):
        with LLM(str(packed), **LORA, max_num_batched_tokens=9, tensor_parallel_size=ranks) as llm:
            outputs = generate(llm, [*PROMPTS, *PROMPTS], [request] * 3 + [None] * 3)
        for place, output in enumerate(outputs):
            ids = [*(output.prompt_token_ids or []), *output.outputs[0].token_ids]
            with with_stacks(model, stacks if place < 3 else {}):
                expected = expected_scores(model, ids)
            torch.testing.assert_close(torch.tensor(scores(output)), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scales", ["block", "channel", "tensor"])
def test_deltas_of_fp8_layers_are_of_rows_before_they_are_rounded(scales: Any) -> None:
    torch.manual_seed(0)
    group: Any = SimpleNamespace(rank=0, size=1, width_multiple=1, exact_bits=None)
    context = LayerContext(
        group, select_kernels("cpu"), torch.float32, torch.device("cpu"), planner=Planner(), adapters=AdapterRoom(2, 16)
    )
    made = Quantization("fp8", scales, while_loading=True)
    with torch.inference_mode():
        layer = MergedColumnParallelLinear(context, 256, {"gate_proj": 128, "up_proj": 128}, precision=made)
        for weight in layer.checkpoint_weights("mlp"):
            if not weight.is_scale:
                weight.load(torch.randn(weight.shape) / 16)
        a, b = layer.matrix.a, layer.matrix.b  # type: ignore[attr-defined]
        a.normal_(0, 1 / 16)
        b.normal_(0, 1 / 4)
        x, of_rows = torch.randn(5, 256), torch.tensor([0, -1, 1, 0, -1], dtype=torch.int32)
        step: Any = SimpleNamespace(adapters=of_rows)
        gained = layer(x, Call(step)) - layer(x, Call(None))
        parts = [x[row] @ a[slot].T for row, slot in enumerate(of_rows.tolist())]
        expected = torch.stack([
            torch.cat([part[:16] @ b[slot, :128].T, part[16:] @ b[slot, 128:].T]) * (slot >= 0)
            for part, slot in zip(parts, of_rows.tolist(), strict=True)
        ])  # fmt: skip
    torch.testing.assert_close(gained, expected, rtol=1e-4, atol=1e-4)
    assert not gained[1].any() and expected[0].abs().mean() > 0.1
