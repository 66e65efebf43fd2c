"""Ray Data's way to the engine."""

from typing import Any

import numpy as np
import pytest
from replica_workload import DEMO, OPTIONS

from nanovllm import SamplingParams
from nanovllm.ray import Predictor

SAMPLED = SamplingParams(max_tokens=12)
TEXTS = ["1 2 3", "The capital of France is", "Once upon a time", "3 + 4 ="]


def rows(batch: dict[str, Any]) -> dict[str, str]:
    return dict(zip(batch["prompt"], batch["generated_text"], strict=True))


def test_what_a_row_gains_does_not_depend_on_its_batch() -> None:
    predict = Predictor(DEMO, SAMPLED, **OPTIONS)
    together = predict({"prompt": np.array(TEXTS, dtype=object), "number": np.arange(4)})
    assert list(together["number"]) == [0, 1, 2, 3] and set(together["generated_finish_reason"]) <= {"stop", "length"}
    alone = [rows(predict({"prompt": np.array([text], dtype=object)})) for text in reversed(TEXTS)]
    assert rows(together) == {name: text for found in alone for name, text in found.items()}
    chats = np.empty(1, dtype=object)
    chats[0] = np.array([{"role": "user", "content": "What is the capital of Italy?"}], dtype=object)
    assert predict({"prompt": chats})["generated_text"][0]
    with pytest.raises(ValueError, match="column='prompt': must be one of 'text'"):
        predict({"text": np.array(TEXTS)})


@pytest.mark.slow
def test_map_batches_over_two_actors() -> None:
    ray = pytest.importorskip("ray")
    data = pytest.importorskip("ray.data")
    ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
    try:
        found = data.from_items([{"prompt": text} for text in TEXTS * 3]).map_batches(
            Predictor,
            fn_constructor_kwargs={"model": DEMO, "sampling_params": SAMPLED, **OPTIONS},
            compute=data.ActorPoolStrategy(size=2),
            batch_size=2,
        )
        texts = {row["prompt"]: row["generated_text"] for row in found.take_all()}
    finally:
        ray.shutdown()
    assert texts == rows(Predictor(DEMO, SAMPLED, **OPTIONS)({"prompt": np.array(TEXTS, dtype=object)}))
