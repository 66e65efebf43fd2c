"""Adapters on the project's Triton kernels, by Triton's interpreter on a CPU.

Run as a script, this file is the engine.
"""

import json
import sys
from pathlib import Path

import pytest
from adapters.peft_files import CONFIG, adapted, random_tensors, save
from adapters.test_adapters import OPTIONS, PROMPTS, SCORED, expected_scores, linears, scores
from exactness import family_cases
from exactness.family_cases import CASES, make_model
from programs import run_interpreted

from nanovllm import LLM, LoRARequest


def serve(folder: str, adapter: str) -> None:
    request = LoRARequest("a", lora_path=adapter)
    with LLM(folder, **OPTIONS, enable_lora=True, max_loras=2, attention_backend="triton") as llm:
        outputs = llm.generate(PROMPTS, SCORED, use_tqdm=False, lora_request=[request, None, request])
    print(json.dumps([[output.outputs[0].token_ids, scores(output)] for output in outputs]))


def test_equals_the_definition(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    model = make_model(CASES["qwen3, bfloat16 files"])
    folder = family_cases.save(model, CASES["qwen3, bfloat16 files"], tmp_path / "model")
    tensors = random_tensors(model, linears(model), CONFIG, 0)
    path = save(tmp_path / "adapter", tensors, target_modules="all-linear")
    found = json.loads(run_interpreted(__file__, (str(folder), str(path))).splitlines()[-1])
    for prompt, has_one, (token_ids, values) in zip(PROMPTS, (True, False, True), found, strict=True):
        with adapted(model, tensors if has_one else {}, CONFIG):
            expected = expected_scores(model, [*prompt, *token_ids]).tolist()
        assert values == pytest.approx(expected, abs=5e-4)


if __name__ == "__main__":
    serve(*sys.argv[1:])
