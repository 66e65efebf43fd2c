"""Option rows of a captured step: found behind its padding, with the logits that the step has left behind."""

from typing import Any

import pytest
from sampling_engines import Engines
from test_seeds import OPTIONS, run

from nanovllm.wire.shapes import LARGE_CHUNKS, MAX_PREFILL_ROWS, SMALL_CHUNKS, StepShape
from tests.padding import PaddedSteps


class AlwaysPadded(PaddedSteps):
    """Shapes that leave padding behind the decodes of every step."""

    def shape_for(self, decode_rows: int, prefill_rows: int, chunk_tokens: int) -> StepShape | None:
        if prefill_rows > MAX_PREFILL_ROWS:
            return None
        bucket = next(size for size in (0, *SMALL_CHUNKS, *LARGE_CHUNKS) if size >= chunk_tokens)
        return StepShape(decode_rows + 3 if prefill_rows else decode_rows + 2, bucket)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24}], ids=["whole", "chunked"])
def test_the_same_tokens_behind_padding(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    llm = engines.get(**options)
    everyone = list(range(len(OPTIONS)))
    exact = run(llm, everyone)
    llm.engine.scheduler.reset_prefix_cache()
    steps = AlwaysPadded(llm, monkeypatch)
    assert run(llm, everyone) == exact
    assert any(shape.chunk_tokens for shape in steps.used) and any(not shape.chunk_tokens for shape in steps.used)
