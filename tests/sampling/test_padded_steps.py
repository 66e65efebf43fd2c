"""The padded step that a CUDA graph captures, run by the twins on a CPU, gives the tokens of the step's exact size."""

import random
from dataclasses import replace
from typing import Any

import pytest
from padding import PaddedSteps
from sampling_engines import Engines
from test_seeds import OPTIONS, run

from nanovllm import SamplingParams
from nanovllm.wire.shapes import LARGE_CHUNKS, MAX_PREFILL_ROWS, SMALL_CHUNKS, StepShape


class AlwaysPadded(PaddedSteps):
    """Shapes that leave padding behind the decodes of every step."""

    def shape_for(
        self, decode_rows: int, prefill_rows: int, chunk_tokens: int, has_adapters: bool = False
    ) -> StepShape | None:
        if prefill_rows > MAX_PREFILL_ROWS:
            return None
        bucket = next(size for size in (0, *SMALL_CHUNKS, *LARGE_CHUNKS) if size >= chunk_tokens)
        return StepShape(decode_rows + 3 if prefill_rows else decode_rows + 2, bucket, has_adapters)


CHUNKED = {"max_num_batched_tokens": 24}


@pytest.mark.parametrize(
    ("padded", "options"), [(PaddedSteps, CHUNKED), (AlwaysPadded, {}),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in ((PaddedSteps, {}), (AlwaysPadded, CHUNKED)))],
)  # fmt: skip
def test_padding_changes_no_token(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], padded: type[PaddedSteps]
) -> None:
    """Option rows are found behind it, with the logits that the step has left behind."""
    llm, everyone = engines.get(**options), list(range(len(OPTIONS)))
    exact = run(llm, everyone)
    llm.engine.scheduler.reset_prefix_cache()
    steps = padded(llm, monkeypatch)
    assert run(llm, everyone) == exact
    llm.engine.scheduler.reset_prefix_cache()
    assert run(llm, [5]) == [exact[5]], "its first step has no decodes"
    assert any(not shape.chunk_tokens for shape in steps.used)
    assert {shape.decode_rows > 0 for shape in steps.used if shape.chunk_tokens} == {padded is AlwaysPadded, True}


def test_chunks_decodes_redrawn_and_exact_steps_follow_each_other(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(1)
    prompts = [[draw.randrange(300) for _ in range(draw.randrange(1, 30))] for _ in range(12)]
    params = [SamplingParams(temperature=0.8, max_tokens=5 + 3 * i, seed=i, ignore_eos=True) for i in range(12)]
    params[2:5] = [replace(each, top_p=0.7, max_tokens=6) for each in params[2:5]]
    params[7] = replace(params[7], prompt_logprobs=1)
    llm = engines.get(max_num_seqs=4, num_kvcache_blocks=24, max_num_batched_tokens=32, max_model_len=128)
    exact = [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    llm.engine.scheduler.reset_prefix_cache()
    steps = PaddedSteps(llm, monkeypatch)
    assert [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)] == exact
    assert len(steps.used) > 2
