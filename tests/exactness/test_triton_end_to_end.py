"""The engine on the project's Triton kernels, by Triton's interpreter on a CPU, against the engine on plain PyTorch.

Run as a script, this file is the engine: the interpreter has to be chosen before triton is imported.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comparing import Expected, assert_mostly_sure, assert_same
from observing import LogitRecorder, StepWitness, margins
from programs import run_interpreted

from nanovllm import LLM, SamplingParams
from nanovllm.runner import model_runner

BLOCK = 16
SHARED = [(7 * i) % 150 for i in range(BLOCK)]
CALLS: list[list[tuple[list[int], int]]] = [
    # (prompt, tokens to generate): chunks of a budget of 24, and four blocks that the two cannot both have
    [([*SHARED, *range(20, 34)], 6), ([*range(40, 58)], 8)],
    [([*SHARED, 3, 4], 3)],  # begins with a block of the first
]
OPTIONS: dict[str, Any] = {
    "num_kvcache_blocks": 4, "max_num_batched_tokens": 24, "max_num_seqs": 4, "max_model_len": 64,
    "skip_tokenizer_init": True, "device": "cpu",
}  # fmt: skip


COMPLETE = {"qwen3": 2, "qwen3_moe": 4, "lfm2": 1}
"""Layers that keep a complete residual stream, with few rows: those with attention, where nothing else is between
their products."""
WINDOWED = ("gemma4, experts", "gpt_oss")
"""Kinds whose layers share two tables of blocks, of which a preempted request finds none again."""
MORE: dict[str, dict[str, Any]] = {
    "gpt_oss": {"quantization": "mxfp4", "dtype": "float16"}, "qwen3_5_moe": {"dtype": "float16"}
}  # fmt: skip
"""Options of a kind: packed experts take 16 bits, and so do kernels that compute a shared expert beside the others."""


def serve(folder: str, backend: str, fused_kernels: bool, **more: Any) -> dict[str, Any]:
    """All calls on one engine: texts, margins, and what the scheduler had to do for them."""
    disable = ("lookahead",) if fused_kernels else ("lookahead", "fused_kernels")
    with LLM(folder, attention_backend=backend, disable=disable, **OPTIONS | more) as llm:
        recorder, witness = LogitRecorder(llm), StepWitness().watch(llm)
        texts, leads, cached, ids = [], [], 0, []
        for number, call in enumerate(CALLS):
            params = [
                SamplingParams(temperature=0.7 * (number + i == 1), max_tokens=count, seed=i, ignore_eos=True)
                for i, (_, count) in enumerate(call)
            ]
            outputs = llm.generate([prompt for prompt, _ in call], params, use_tqdm=False)
            llm.engine.scheduler.check_integrity()
            for output, param, (prompt, count) in zip(outputs, params, call, strict=True):
                assert param.seed is not None
                logits = recorder.of(output.request_id, len(prompt), count)
                texts.append(output.token_ids)
                leads.append(margins(logits, len(prompt), param.temperature, param.seed))
                cached += output.num_cached_tokens
                ids.append(output.request_id)
        model = llm.engine.executor.runner.model
        return {
            "texts": texts,
            "margins": leads,
            "cached": cached,
            "chunks": witness.num_partial_chunks,
            "preempted": witness.num_rows_after_preemption,
            "backend": llm.engine_info()["attention_backend"],
            "fused": llm.engine.executor.runner.kernels.fused,
            "complete": [sum(plan.is_complete for plan in model.plans(n)) for n in (1, 2, 4, 8)],
        }


def checkpoint(kind: str, where: Path) -> str:
    """The folder of a new model."""
    import family_cases  # here: the script needs no transformers, which is slow to import
    from checkpoints import make_model, save

    if kind != "qwen3":
        case = family_cases.CASES[kind]
        return str(family_cases.save(family_cases.make_model(case, seed=4), case, where))
    shape = {"hidden_size": 32, "intermediate_size": 20, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 150}
    return str(save(make_model(seed=4, weight_std=0.25, **shape), where))


@pytest.mark.parametrize(
    ("kind", "fused_kernels", "gemms"),
    [
        pytest.param("qwen3", True, "ours", marks=pytest.mark.slow),
        *(pytest.param(kind, True, "ours", marks=pytest.mark.slow)
          for kind in ("qwen3_moe", "qwen3_5_moe", "nemotron_h", "lfm2", "gemma4, experts", "gpt_oss")),
        ("qwen3", False, "library"),
    ],
)
def test_triton_backend_through_a_chunk_a_hit_and_a_preemption(
    kind: str, fused_kernels: bool, gemms: str, tmp_path: Path
) -> None:
    """With the GEMMs and the kernels around attention in Triton too, and with attention alone in it."""
    pytest.importorskip("triton")
    folder = checkpoint(kind, tmp_path)
    more = ({"num_kvcache_blocks": 8} if kind in WINDOWED else {}) | MORE.get(kind, {})
    plain = serve(folder, "torch", fused_kernels, **more)
    args = (folder, str(int(fused_kernels)), gemms, json.dumps(more))
    triton = json.loads(run_interpreted(__file__, args).splitlines()[-1])
    assert (triton["backend"], triton["fused"]) == ("triton", fused_kernels)
    assert triton["complete"] == ([COMPLETE.get(kind, 0)] * 3 + [0] if gemms == "ours" else [0] * 4)
    assert plain["backend"] == "torch"
    for seen in (plain, triton):
        assert seen["chunks"] > 0
        assert seen["preempted"] > 0
        assert seen["cached"] >= BLOCK or kind in WINDOWED
    expected = [Expected(*pair) for pair in zip(plain["texts"], plain["margins"], strict=True)]
    assert_mostly_sure(expected)
    for text, one in zip(triton["texts"], expected, strict=True):
        assert_same(text, one)


if __name__ == "__main__":
    if sys.argv[3] == "ours":
        rules_of = model_runner.rules_of  # a CPU's engine leaves GEMMs to the library
        model_runner.rules_of = lambda *args: replace(rules_of(*args), own_kernels=True)
    print(json.dumps(serve(sys.argv[1], "triton", fused_kernels=sys.argv[2] == "1", **json.loads(sys.argv[4]))))
