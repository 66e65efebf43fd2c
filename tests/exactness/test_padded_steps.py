"""The padded step that a CUDA graph captures, run by the twins on a CPU, gives the tokens of the step's exact size."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.runner.device_io import RING
from tests.padding import PaddedSteps
from tests.processes.process_checks import write_tiny_config


@pytest.mark.parametrize("budget", [128, 16])
def test_padding_changes_no_token(budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_config(tmp_path, tie_word_embeddings=False)
    draw = random.Random(0)
    shared = [draw.randrange(300) for _ in range(16)]
    prompts = [shared[:1], shared, [*shared, 7], [*shared, *shared]]
    prompts += [[draw.randrange(300) for _ in range(length)] for length in (15, 35, 77, 11, 5, 28)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), max_tokens=12, seed=i, ignore_eos=True) for i in range(len(prompts))
    ]
    options: dict[str, Any] = {"max_num_seqs": 10, "num_kvcache_blocks": 24, "max_num_batched_tokens": budget}
    with LLM(model, load_format="dummy", skip_tokenizer_init=True, device="cpu", **options) as llm:
        exact = [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
        llm.engine.scheduler.reset_prefix_cache()
        steps = PaddedSteps(llm, monkeypatch)
        padded = [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
        llm.engine.scheduler.check_integrity()
        llm.engine.scheduler.reset_prefix_cache()
        alone = llm.generate([prompts[5]], params[5], use_tqdm=False)  # its first step has no decodes
    assert [*padded, alone[0].token_ids] == [*exact, exact[5]]
    assert {shape.decode_rows > 0 for shape in steps.used if shape.chunk_tokens} == {False, True}
    assert any(shape.chunk_tokens == 0 for shape in steps.used)


def test_steps_by_mailbox_by_copy_and_redrawn_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes that fetch their step, chunks that are copied, steps whose tokens filters draw again, and exact ones."""
    model = write_tiny_config(tmp_path, tie_word_embeddings=False)
    draw = random.Random(1)
    prompts = [[draw.randrange(300) for _ in range(draw.randrange(1, 30))] for _ in range(12)]
    params = [SamplingParams(temperature=0.8, max_tokens=5 + 3 * i, seed=i, ignore_eos=True) for i in range(12)]
    params[2:5] = [replace(each, top_p=0.7, max_tokens=6) for each in params[2:5]]
    params[7] = replace(params[7], prompt_logprobs=1)
    options: dict[str, Any] = {"max_num_seqs": 4, "num_kvcache_blocks": 24, "max_num_batched_tokens": 32}
    with LLM(model, load_format="dummy", skip_tokenizer_init=True, device="cpu", **options) as llm:
        exact = [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
        llm.engine.scheduler.reset_prefix_cache()
        PaddedSteps(llm, monkeypatch)
        io, ways = llm.engine.executor.runner.io, []

        def watch(name: str) -> None:
            method = getattr(io, name)

            def watched(*args: Any, posted: bool = False) -> Any:
                ways.append(("fetch;" if posted else "copy;") if name == "receive" else name)
                return method(*args, posted=posted) if name == "receive" else method(*args)

            monkeypatch.setattr(io, name, watched)

        for name in ("post", "upload", "receive"):
            watch(name)
        assert [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)] == exact
    steps = [tuple(step.split()) for step in " ".join(ways).split(";") if step]
    followed = set(pairwise(steps))
    posted, redrawn, copied = ("post", "fetch"), ("post", "copy"), ("upload", "copy")
    assert set(steps) == {posted, redrawn, copied}
    assert {(posted, posted), (posted, copied), (copied, posted), (copied, redrawn), (redrawn, redrawn)} <= followed
    assert steps.count(posted) > 2 * RING
