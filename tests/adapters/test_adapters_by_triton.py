"""Adapters on the project's Triton kernels, by Triton's interpreter on a CPU.

Run as a script, this file is the engine.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from adapters.peft_files import CONFIG, adapted, random_tensors, save
from adapters.test_adapters import OPTIONS, PROMPTS, SCORED, expected_scores, linears, scores
from adapters.test_expert_adapters import FORMS, random_stacks, with_stacks
from exactness import family_cases
from exactness.family_cases import CASES, make_model, with_layers
from programs import run_interpreted

from nanovllm import LLM, LoRARequest


def serve(folder: str, adapter: str) -> None:
    request = LoRARequest("a", lora_path=adapter)
    with LLM(folder, **OPTIONS, enable_lora=True, max_loras=2, attention_backend="triton") as llm:
        params = replace(SCORED, max_tokens=3)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=[request, None, request])
    print(json.dumps([[output.outputs[0].token_ids, scores(output)] for output in outputs]))


@pytest.mark.parametrize(("family", "layers"), [("qwen3, bfloat16 files", 1), ("qwen3_moe", 2)])
def test_equals_the_definition(family: str, layers: int, tmp_path: Path) -> None:
    """Of linear layers, and of experts."""
    pytest.importorskip("triton")
    case = with_layers(CASES[family], layers)
    model = make_model(case)
    folder = family_cases.save(model, case, tmp_path / "model")
    tensors, changed = random_tensors(model, linears(model), CONFIG, 0), {"target_modules": "all-linear"}
    stacks = random_stacks(model, 0)
    if stacks:
        write, changed = FORMS["wrapped"]
        tensors = write(stacks)
    path = save(tmp_path / "adapter", tensors, **changed)
    found = json.loads(run_interpreted(__file__, (str(folder), str(path))).splitlines()[-1])
    for prompt, has_one, (token_ids, values) in zip(PROMPTS, (True, False, True), found, strict=True):
        of_linears = tensors if has_one and not stacks else {}
        with with_stacks(model, stacks if has_one else {}), adapted(model, of_linears, CONFIG):
            expected = expected_scores(model, [*prompt, *token_ids]).tolist()
        assert values == pytest.approx(expected, abs=5e-4)


if __name__ == "__main__":
    serve(*sys.argv[1:])
