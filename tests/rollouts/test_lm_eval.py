"""lm-eval over this engine gives what its Hugging Face class gives."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval")
integration = pytest.importorskip("nanovllm.integrations.lm_eval")

DEMO = str(Path(__file__).resolve().parents[2] / "assets" / "demo-qwen3")
DOCS = [
    {"question": question, "choices": choices, "answer": answer}
    for question, choices, answer in (
        ("Once upon a time there was a", [" rabbit", " stone", " big big house", " of"], 0),
        ("The capital of France is", [" Paris.", " London.", " a cat"], 0),
        ("Lily and Tom went to the park. " * 12 + "They saw", [" a", " two dogs"], 1),
        ("7 + 5 =", [" 12", " 13", " 75"], 0),
    )
]
TASKS: dict[str, dict[str, Any]] = {
    "multiple_choice": {
        "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "target_delimiter": "", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "loglikelihood_rolling": {  # longer than the model's window
        "doc_to_text": "", "doc_to_target": "{{question * 5}}", "metric_list": [{"metric": "bits_per_byte"}],
    },
    "generate_until": {
        "doc_to_text": "{{question}}", "doc_to_target": "x", "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 20, "do_sample": False},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[Any, Any]]:
    from lm_eval.models.huggingface import HFLM

    # Theirs does not feed the last token of a window, so that a window of theirs has one more.
    ours = integration.NanoLM(DEMO, device="cpu", num_kvcache_blocks=128, max_model_len=257)
    yield ours, HFLM(DEMO, device="cpu", dtype="float32", batch_size=1, max_length=256)
    ours.llm.close()


def flat(value: Any) -> list[Any]:
    """Numbers and texts in an answer."""
    if isinstance(value, (list, tuple)):
        return [part for each in value for part in flat(each)]
    try:
        return [float(value)]
    except ValueError:
        return [str(value)]


@pytest.mark.parametrize("kind", TASKS)
def test_answers_are_those_of_the_hugging_face_class(kind: str, models: tuple[Any, Any], tmp_path: Path) -> None:
    file = tmp_path / "docs.jsonl"
    file.write_text("\n".join(json.dumps(doc) for doc in DOCS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    tasks = [{"task": "tiny", "output_type": kind, **data, **TASKS[kind]}]
    ours, theirs = (lm_eval.simple_evaluate(model, tasks=tasks, bootstrap_iters=0) for model in models)
    for mine, other in zip(ours["samples"]["tiny"], theirs["samples"]["tiny"], strict=True):
        assert mine["doc_id"] == other["doc_id"]
        found, expected = flat(mine["resps"]), flat(other["resps"])
        assert found and len(found) == len(expected)
        for one, two in zip(found, expected, strict=True):
            assert one == (pytest.approx(two, abs=1e-3, rel=1e-4) if isinstance(two, float) else two)
    if kind == "multiple_choice":
        assert ours["results"]["tiny"]["acc,none"] == theirs["results"]["tiny"]["acc,none"]


def test_a_question_is_computed_once(models: tuple[Any, Any]) -> None:
    model = models[0]
    context = model.tok_encode("Lily and Tom went to the park. " * 12)
    before = model.llm.engine.computed[0]
    model._loglikelihood_tokens([(None, [*context, number], [1, 2, 3]) for number in range(4)], disable_tqdm=True)
    assert model.llm.engine.computed[0] - before < len(context) + 4 * 20


def test_options_of_a_running_engine_are_refused(models: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        integration.NanoLM(models[0].llm, max_num_seqs=3)


def test_an_answer_that_leaves_no_room_for_its_question_is_refused(models: tuple[Any, Any]) -> None:
    request = SimpleNamespace(args=("Once upon a time", {"max_gen_toks": 257}))
    with pytest.raises(ValueError, match="max_gen_toks=257: must be below the engine's 257 tokens"):
        models[0].generate_until([request], disable_tqdm=True)
