"""lm-eval over this engine gives what its Hugging Face class gives."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval")
integration = pytest.importorskip("nanovllm.integrations.lm_eval")

DEMO = str(Path(__file__).resolve().parents[2] / "assets" / "demo-qwen3")
DOCS = [
    {
        "question": "Once upon a time there was a",
        "choices": [" rabbit", " stone", " big big house", " of"],
        "answer": 0,
    },
    {"question": "The capital of France is", "choices": [" Paris.", " London.", " a cat"], "answer": 0},
    {"question": "Lily and Tom went to the park. " * 12 + "They saw", "choices": [" a", " two dogs"], "answer": 1},
    {"question": "7 + 5 =", "choices": [" 12", " 13", " 75"], "answer": 0},
]


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[Any, Any]]:
    from lm_eval.models.huggingface import HFLM

    # Theirs does not feed the last token of a window, so that a window of theirs has one more.
    ours = integration.NanoLM(DEMO, device="cpu", num_kvcache_blocks=128, max_model_len=257)
    yield ours, HFLM(DEMO, device="cpu", dtype="float32", batch_size=1, max_length=256)
    ours.llm.close()


def evaluate(model: Any, folder: Path, **config: Any) -> dict[str, Any]:
    file = folder / "docs.jsonl"
    file.write_text("\n".join(json.dumps(doc) for doc in DOCS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    return lm_eval.simple_evaluate(model, tasks=[{"task": "tiny", **data, **config}], bootstrap_iters=0)


def answers(results: dict[str, Any]) -> list[Any]:
    return [sample["resps"] for sample in sorted(results["samples"]["tiny"], key=lambda sample: sample["doc_id"])]


def test_choices(models: tuple[Any, Any], tmp_path: Path) -> None:
    config = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    ours, theirs = (evaluate(model, tmp_path, **config) for model in models)
    assert ours["results"]["tiny"]["acc,none"] == theirs["results"]["tiny"]["acc,none"]
    for mine, other in zip(answers(ours), answers(theirs), strict=True):
        for ((value, greedy),), ((expected, expected_greedy),) in zip(mine, other, strict=True):
            assert float(value) == pytest.approx(float(expected), abs=1e-3)
            assert str(greedy) == str(expected_greedy)


def test_rolling(models: tuple[Any, Any], tmp_path: Path) -> None:
    """Also of a text that is longer than the model's window."""
    config = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question * 5}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    ours, theirs = (answers(evaluate(model, tmp_path, **config)) for model in models)
    for [[value]], [[expected]] in zip(ours, theirs, strict=True):
        assert float(value) == pytest.approx(float(expected), rel=1e-4)


def test_generation(models: tuple[Any, Any], tmp_path: Path) -> None:
    config = {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "x",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 20, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    ours, theirs = (answers(evaluate(model, tmp_path, **config)) for model in models)
    assert ours == theirs


def test_a_question_is_computed_once(models: tuple[Any, Any]) -> None:
    model = models[0]
    context = model.tok_encode("Lily and Tom went to the park. " * 12)
    before = model.llm.engine.computed[0]
    model._loglikelihood_tokens([(None, [*context, number], [1, 2, 3]) for number in range(4)], disable_tqdm=True)
    assert model.llm.engine.computed[0] - before < len(context) + 4 * 20


def test_options_of_a_running_engine_are_refused(models: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        integration.NanoLM(models[0].llm, max_num_seqs=3)
