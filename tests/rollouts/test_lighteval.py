"""lighteval over this engine gives what its class over transformers gives."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lighteval")
integration = pytest.importorskip("nanovllm.integrations.lighteval")

DEMO = str(Path(__file__).resolve().parents[2] / "assets" / "demo-qwen3")
QUESTIONS = [
    ("Once upon a time there was a", [" rabbit", " stone", " big big house"]),
    ("The capital of France is", [" Paris.", " London."]),
    ("Lily and Tom went to the park. " * 12 + "They saw", [" a", " two dogs"]),
]
TASK = """
from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc

def prompt(line, task_name=None):
    choices = line["choices"]
    return Doc(task_name=task_name, query=line["question"], choices=choices, gold_index=0)

TASKS_TABLE = [
    LightevalTaskConfig(
        name="tiny", prompt_function=prompt, hf_repo={folder!r}, hf_subset="default", evaluation_splits=["test"],
        hf_avail_splits=["test"], metrics=[Metrics.loglikelihood_acc], generation_size=8, stop_sequence=["."],
    )
]
"""


@pytest.fixture(scope="module")
def ours() -> Iterator[Any]:
    model = integration.NanoModel.start(DEMO, device="cpu", num_kvcache_blocks=128, max_model_len=256)
    yield model
    model.cleanup()


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    with torch.no_grad():  # importing it turns gradients off, for later tests too
        from lighteval.models.transformers.transformers_model import TransformersModel, TransformersModelConfig

        config = TransformersModelConfig(model_name=DEMO, dtype="float32", batch_size=1, device="cpu", max_length=256)
        yield TransformersModel(config)


def documents(**more: Any) -> list[Any]:
    from lighteval.tasks.requests import Doc

    return [
        Doc(id=str(number), task_name="tiny", query=query, choices=choices, gold_index=0, **more)
        for number, (query, choices) in enumerate(QUESTIONS)
    ]


def test_choices(ours: Any, theirs: Any) -> None:
    found, expected = ours.loglikelihood(documents()), theirs._loglikelihood_tokens(documents())
    for mine, other in zip(found, expected, strict=True):
        assert mine.logprobs == pytest.approx([float(value) for value in other.logprobs], abs=1e-3)
        assert mine.argmax_logits_eq_gold == [bool(value) for value in other.argmax_logits_eq_gold]


def test_answers(ours: Any, theirs: Any) -> None:
    given = {"generation_size": 12, "stop_sequences": ["."]}
    found, expected = ours.greedy_until(documents(**given)), theirs._padded_greedy_until(documents(**given))
    assert [mine.text[0].split(".")[0] for mine in found] == [other.text[0].split(".")[0] for other in expected]


def test_rolling(ours: Any) -> None:
    """A text's score does not depend on how it is cut, but for what the first token of a window sees."""
    from lighteval.tasks.requests import Doc

    text = "Lily and Tom went to the park. " * 3
    short, long = (Doc(query=text * times, choices=[""], gold_index=0, task_name="tiny") for times in (1, 40))
    [one] = ours.loglikelihood_rolling([short])
    ids = [ours.tokenizer.eos_token_id, *ours.tokenizer.encode(ours._context(short), add_special_tokens=False)]
    [(total, _)] = ours._scores([ids], [len(ids) - 1])
    assert one.logprobs == [pytest.approx(total)]
    [many] = ours.loglikelihood_rolling([long])
    assert len(ours.tokenizer.encode(long.query)) > 3 * ours.max_length and many.logprobs[0] < one.logprobs[0]


def test_its_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of our own, with the class loaded from its file, as the command line does."""
    from lighteval.logging.evaluation_tracker import EvaluationTracker
    from lighteval.models.custom.custom_model import CustomModelConfig
    from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters

    for loads in ("_load_from_files", "_load_from_subdirs"):  # its own tasks, one of which begins with a download
        monkeypatch.setattr(f"lighteval.tasks.registry.Registry.{loads}", staticmethod(lambda *_: {}))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    lines = [json.dumps({"question": question, "choices": choices}) for question, choices in QUESTIONS]
    (data / "test.jsonl").write_text("\n".join(lines))
    (tmp_path / "tasks.py").write_text(TASK.format(folder=str(data)))
    parameters = PipelineParameters(
        launcher_type=ParallelismManager.CUSTOM, custom_tasks_directory=str(tmp_path / "tasks.py")
    )
    pipeline = Pipeline(
        tasks="tiny|0", pipeline_parameters=parameters, evaluation_tracker=EvaluationTracker(str(tmp_path)),
        model_config=CustomModelConfig(model_name=DEMO, model_definition_file_path=integration.__file__),
    )  # fmt: skip
    pipeline.evaluate()
    assert 0 <= pipeline.get_results()["results"]["all"]["acc"] <= 1


def test_options_of_a_running_engine_are_refused(ours: Any) -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        integration.NanoModel.start(ours.llm, max_num_seqs=3)
