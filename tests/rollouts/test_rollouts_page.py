"""The examples of docs/rollouts.md run as they stand; where they need another package, with it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "rollouts.md").read_text(), re.MULTILINE | re.DOTALL)
PACKAGES = ("trl", "lm_eval")
LOCAL_TASK: dict[str, Any] = {
    "task": "tiny", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
    "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": 0,
}  # fmt: skip


@pytest.mark.parametrize("source", BLOCKS, ids=[block.split("\n")[0] for block in BLOCKS])
def test_example(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES:
        if re.search(rf"\b{package}\b", source):
            pytest.importorskip(package)
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "The capital of France is", "choices": [" Paris.", " London."]}')
    task = {**LOCAL_TASK, "dataset_kwargs": {"data_files": {"test": str(data)}}}
    source = source.replace('"arc_easy"', repr(task))  # which would be downloaded
    source = source.replace('output_dir="out"', f"output_dir={str(tmp_path)!r}")
    if not torch.cuda.is_available():
        source = source.replace("max_steps=4,", "max_steps=4, use_cpu=True, bf16=False,")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        exec(compile(source, "docs/rollouts.md", "exec"), {"__name__": "example"})
    finally:
        if "install()" in source:
            from nanovllm.integrations.trl import uninstall

            uninstall()
