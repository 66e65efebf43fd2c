"""The programs of examples/: each is short, and runs as its first lines say, on the demo model."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import ROOT, run

SAYS = {
    "batch_with_resume": "20 answered",
    "chat_streaming": "second: enough",
    "custom_model": "tokens: [",
    "fastapi_server": "temperature=-1",
    "grpo_adapter": "policy@2: reward",
    "grpo_trl": "[-",
    "logprobs": "per token",
    "notebook": "num_running=0",
    "pydantic_extraction": "Person(name=",
    "tool_agent": "tool: {",
    "two_replicas": "queued: 7",
    "weight_updates": "weights are version 3",
}
"""A part of what each prints."""
NEEDS = {
    "pydantic_extraction": ("pydantic",), "fastapi_server": ("fastapi", "httpx"), "grpo_adapter": ("peft",),
    "grpo_trl": ("trl", "datasets"),
}  # fmt: skip


def source(name: str) -> str:
    """Source of a program; a notebook's cells one after the other, as a kernel that shows values runs them."""
    if (path := ROOT / "examples" / f"{name}.py").exists():
        return path.read_text()
    cells = json.loads(path.with_suffix(".ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return "\n".join(text.replace("llm.stats()", "print(llm.stats())") for text in code)


def run_example(name: str, *arguments: str) -> str:
    if missing := [package for package in NEEDS.get(name, ()) if find_spec(package) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    path = ROOT / "examples" / f"{name}.py"
    return run(*([path] if path.exists() else ["-c", source(name)]), *arguments, forks=True)


def test_all_are_here() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.*")} == {*SAYS}


@pytest.mark.parametrize("name", [name for name in SAYS if name != "batch_with_resume"])
def test_it_runs(name: str) -> None:
    assert len(source(name).splitlines()) <= 60
    assert SAYS[name] in run_example(name)


def test_a_batch_goes_on(tmp_path: Path) -> None:
    """After it was ended in the midst, with the same texts; and does nothing the third time."""
    file = tmp_path / "answers.jsonl"
    assert SAYS["batch_with_resume"] in run_example("batch_with_resume", str(file))
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:15]))
    assert "15 of 20 already done\n5 answered" in run_example("batch_with_resume", str(file))
    texts = [json.loads(line) for line in lines]
    assert [json.loads(line) for line in file.read_text().splitlines()] == texts
    assert run_example("batch_with_resume", str(file)) == "20 of 20 already done\n"
