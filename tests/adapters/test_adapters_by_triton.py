"""Adapters on the project's Triton kernels, by Triton's interpreter on a CPU.

Run as a script, this file is the engine.
"""

import json
import sys
from pathlib import Path

import pytest
from adapters.peft_files import CONFIG, adapted, random_tensors, save
from adapters.test_adapters import OPTIONS, PROMPTS, SCORED, expected_scores, linears, scores
from adapters.test_expert_adapters import FORMS, random_stacks, with_stacks
from exactness import family_cases
from exactness.family_cases import CASES, make_model
from programs import run_interpreted

from nanovllm import LLM, LoRARequest


def serve(folder: str, adapter: str) -> None:
    request = LoRARequest("a", lora_path=adapter)
    with LLM(folder, **OPTIONS, enable_lora=True, max_loras=2, attention_backend="triton") as llm:
        outputs = llm.generate(PROMPTS, SCORED, use_tqdm=False, lora_request=[request, None, request])
    print(json.dumps([[output.outputs[0].token_ids, scores(output)] for output in outputs]))


@pytest.mark.parametrize("family", ["qwen3, bfloat16 files", "qwen3_moe"])
def test_equals_the_definition(family: str, tmp_path: Path) -> None:
    """Of linear layers, and of experts."""
    pytest.importorskip("triton")
    model = make_model(CASES[family])
    folder = family_cases.save(model, CASES[family], tmp_path / "model")
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
