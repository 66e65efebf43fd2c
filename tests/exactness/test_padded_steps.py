"""The padded step that a CUDA graph captures, run by the twins on a CPU, gives the tokens of the step's exact size."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.worker.cuda_graphs import CHUNK_BUCKETS, StepShape, decode_buckets, mixed_decode_buckets

MAX_NUM_SEQS = 10
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def padded_shape(num_decode_rows: int, num_chunk_rows: int, num_chunk_tokens: int) -> StepShape:
    """As StepGraphs.shape_for, which needs a GPU to be made, where every shape is captured."""
    if num_chunk_rows == 0:
        return StepShape(min(size for size in decode_buckets(MAX_NUM_SEQS) if size >= num_decode_rows), 0)
    rows = min(size for size in mixed_decode_buckets(MAX_NUM_SEQS) if size >= num_decode_rows)
    return StepShape(rows, min(size for size in CHUNK_BUCKETS if size >= num_chunk_tokens))


def pad_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> set[StepShape]:
    """Makes the engine's only rank run every step padded; returns the shapes that it will have run."""
    runner, used = llm.engine.executor.runner, set()

    @torch.inference_mode()
    def launch(packed: np.ndarray) -> None:
        rows, decode_rows, sample_rows, tokens = packed[:4].tolist()
        shape = padded_shape(decode_rows, rows - decode_rows, tokens - decode_rows)
        used.add(shape)
        runner.io.step_buffer = torch.from_numpy(packed.copy())
        runner._run_padded(shape)
        first_chunk_row = shape.decode_rows if rows > decode_rows else decode_rows
        end = first_chunk_row + sample_rows - decode_rows
        runner.io.download(runner.buffers.tokens[:end], decode_rows, first_chunk_row)

    monkeypatch.setattr(runner, "launch", launch)
    return used


@pytest.mark.parametrize("budget", [128, 16])
def test_padding_changes_no_token(budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    draw = random.Random(0)
    shared = [draw.randrange(300) for _ in range(16)]
    prompts = [shared[:1], shared, [*shared, 7], [*shared, *shared]]
    prompts += [[draw.randrange(300) for _ in range(length)] for length in (15, 35, 77, 11, 5, 28)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), max_tokens=12, seed=i, ignore_eos=True) for i in range(len(prompts))
    ]
    options: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS, "num_kvcache_blocks": 24, "max_num_batched_tokens": budget}
    with LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, device="cpu", **options) as llm:
        exact = [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
        llm.engine.scheduler.block_manager.forget_cached()
        used = pad_steps(llm, monkeypatch)
        padded = [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
        llm.engine.scheduler.check_integrity()
    assert padded == exact
    assert {shape.decode_rows > 0 for shape in used if shape.chunk_tokens} == {False, True}
    assert any(shape.chunk_tokens == 0 for shape in used)
