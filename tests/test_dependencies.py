"""The library runs with the packages that every installation has; what is in extras is not imported."""

import re
import tomllib

from programs import ROOT, run

MODULES = {"pyyaml": "yaml", "opentelemetry-sdk": "opentelemetry"}
"""Packages whose module has another name."""
PROGRAM = """
import sys

class OnlyDependencies:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {extras}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, OnlyDependencies())
from nanovllm import LLM, SamplingParams
with LLM("assets/demo-qwen3", device="cpu", num_kvcache_blocks=32) as llm:
    [answer] = llm.chat([{{"role": "user", "content": "What is the capital of Italy?"}}], SamplingParams(temperature=0))
print(answer.text)
"""


def package_names(entries: list[str]) -> set[str]:
    return {match[0].lower() for entry in entries if (match := re.match(r"[\w-]+", entry))}


def test_a_chat_needs_no_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = package_names([entry for entries in project["optional-dependencies"].values() for entry in entries])
    extras -= {*package_names(project["dependencies"]), "nanovllm", "triton"}  # CUDA builds of torch bring Triton
    assert {"httptools", "llguidance"} <= extras
    modules = {MODULES.get(name, name.replace("-", "_")) for name in extras}
    assert "Rome" in run("-c", PROGRAM.format(extras=modules), seconds=120)
