"""An engine holds its share of a GPU, in turn with others, side by side with them, and beside a trainer."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.runner.memory_probe import GIB

pytestmark = pytest.mark.gpu

SHARE = 0.15
CLOSE = 0.02
"""Part of a share that it may be missed by."""
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "gpu_memory_utilization": SHARE, "max_num_seqs": 64,
    "max_model_len": 4096,
}  # fmt: skip
PROGRAM = """
import json, sys
from nanovllm import LLM, SamplingParams
options = json.loads(sys.argv[1])
sys.stdin.readline()
with LLM("Qwen3-0.6B", **options) as llm:
    print(json.dumps(llm.engine_info()), flush=True)
    sys.stdin.readline()
    llm.generate([list(range(3000))] * 8, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    print("generated", flush=True)
    sys.stdin.readline()
"""


def free_and_total() -> tuple[int, int]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()


def check_share(info: dict[str, Any], total: int) -> None:
    """Asserts that what an engine says it has taken, and keeps free for steps, is its share."""
    kept = info["step_gib"] + info["filters_gib"] + max(0.0, info["graphs_gib"] - info["graphs_taken_gib"])
    share = SHARE * total / GIB
    assert abs(info["taken_gib"] + kept - share) <= CLOSE * share, info


def run_in_turn(times: int) -> None:
    for _ in range(times):
        free, total = free_and_total()
        with LLM("Qwen3-0.6B", **OPTIONS) as llm:
            llm.generate([list(range(3000))] * 8, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
            held = free - torch.cuda.mem_get_info()[0]
            check_share(llm.engine_info(), total)
            assert held <= (1 + CLOSE) * SHARE * total
        torch.rand(256 << 20, device="cuda")  # stays in torch's cache, as what a closed engine had may


def test_ten_engines_in_turn() -> None:
    run_in_turn(10)


def test_beside_a_trainer() -> None:
    """With memory of its own, and memory that only torch's cache holds."""
    own, cached = (torch.empty(10 * GIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    del cached
    run_in_turn(2)
    assert own.numel() == 10 * GIB


def test_four_programs_side_by_side() -> None:
    free, total = free_and_total()
    command = [sys.executable, "-c", PROGRAM, json.dumps(OPTIONS)]
    programs = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(4)
    ]

    def said_by_all() -> list[str]:
        for program in programs:
            assert program.stdin is not None
            program.stdin.write("\n")
        return [program.stdout.readline() for program in programs if program.stdout is not None]

    try:
        infos = [json.loads(line) for line in said_by_all()]
        held = free - torch.cuda.mem_get_info()[0]
        for info in infos:
            check_share(info, total)
        assert abs(held / GIB - sum(info["taken_gib"] for info in infos)) <= 4 * CLOSE * SHARE * total / GIB
        assert said_by_all() == ["generated\n"] * 4
        assert free - torch.cuda.mem_get_info()[0] <= 4 * (1 + CLOSE) * SHARE * total
    finally:
        for program in programs:
            program.kill()
            program.wait()
