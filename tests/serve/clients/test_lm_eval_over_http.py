"""lm-eval's clients of OpenAI's API, on tasks made here. Needs the extra "clients"."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from serving import DEMO, Server

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # else its imports ask the network
lm_eval = pytest.importorskip("lm_eval")
tasks = pytest.importorskip("lm_eval.tasks")
pytest.importorskip("tenacity")  # of lm-eval's own extra "api"

CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
ANSWERS = {
    "output_type": "generate_until",
    "doc_to_target": "{{text}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 20, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}
DOCS = [
    {"question": "The capital of France is", "choices": [" Paris.", " London.", " a cat"], "answer": 0},
    {"question": "Once upon a time there was a", "choices": [" stone", " rabbit", " of"], "answer": 1},
    {"question": "7 + 5 =", "choices": [" 75", " 13", " 12"], "answer": 2},
]
CHATS = [{"question": f"What is the capital of {place}?", "text": text} for place, text in (
    ("France", "The capital of France is Paris."), ("Italy", "The capital of Italy is Rome."),
)]  # fmt: skip


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))


def evaluate(kind: str, server: Server, folder: Path, docs: list[dict[str, Any]], **config: Any) -> dict[str, Any]:
    file = folder / "docs.jsonl"
    file.write_text("\n".join(map(json.dumps, docs)))
    path = "chat/completions" if "chat" in kind else "completions"
    arguments = {"model": "demo", "base_url": f"{server.url}/v1/{path}", "num_concurrent": 3, "max_length": 512}
    if path == "completions":
        arguments |= {"tokenizer": str(DEMO)}
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    task = {"task": "tiny", "doc_to_text": "{{question}}", **data, **config}
    options: dict[str, Any] = {"tasks": [task], "bootstrap_iters": 0, "apply_chat_template": "chat" in kind}
    options["task_manager"] = tasks.TaskManager(include_defaults=False)  # does not read all of its own
    results = lm_eval.simple_evaluate(kind, model_args=arguments, **options)
    return dict(results["results"]["tiny"])


def test_log_likelihoods(server: Server, tmp_path: Path) -> None:
    assert evaluate("local-completions", server, tmp_path, DOCS, **CHOICES)["acc,none"] == 1.0


def test_generated_text(server: Server, tmp_path: Path) -> None:
    docs = [{"question": "Monday, Tuesday,", "text": " Wednesday, Thursday, Friday, Saturday, Sunday."}]
    assert evaluate("local-completions", server, tmp_path, docs, **ANSWERS)["exact_match,none"] == 1.0


def test_chats(server: Server, tmp_path: Path) -> None:
    assert evaluate("local-chat-completions", server, tmp_path, CHATS, **ANSWERS)["exact_match,none"] == 1.0
