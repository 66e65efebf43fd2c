"""The library runs with the packages that every installation has; what is in extras is not imported."""

import argparse
import ast
import inspect
import re
import tomllib

import pytest
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


# -- what other packages call private -------------------------------------------------------------------------------

DOCUMENTED = {"_replace", "_asdict", "_fields", "_exit"}


def homes_of_private_names() -> dict[str, object]:
    """Places where this package looks for names of others that may move without a word."""
    import torch
    import torch.distributed as dist
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from triton.experimental.gluon.language import shared_memory_descriptor

    options = dist.ProcessGroupGloo._Options()
    homes: dict[str, object] = {
        "_ActionsContainer": argparse, "_AppendAction": argparse, "_format_action_invocation": argparse.HelpFormatter,
        "_format_usage": argparse.HelpFormatter, "_C": torch, "_dynamo": torch, "_scaled_mm": torch,
        "_parameters": torch.nn.Module(), "_non_persistent_buffers_set": torch.nn.Module(),
        "_version": torch.zeros(1), "_cdata": torch.zeros(1).untyped_storage(),
        "_Options": dist.ProcessGroupGloo, "_devices": options, "_timeout": options,
        "_allgather_base": dist.ProcessGroup, "_global_mapping": ALL_ATTENTION_FUNCTIONS,
        "_reinterpret": shared_memory_descriptor,
    }  # fmt: skip
    homes |= dict.fromkeys(("_foreach_copy_", "_foreach_mul", "_foreach_mul_", "_foreach_zero_"), torch)
    for dtype in ("bf16", "fp16"):
        homes[f"_get_cublas_allow_{dtype}_reduced_precision_reduction"] = torch._C
    return homes


def test_private_names_of_other_packages_are_known_and_still_there() -> None:
    used, own = set(), set()
    for path in (ROOT / "nanovllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute):
                is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                (own if is_own else used).add(node.attr)
            elif isinstance(node, ast.FunctionDef):
                own.add(node.name)
    pytest.importorskip("triton")
    homes = homes_of_private_names()
    private = {name for name in used - own - DOCUMENTED if re.match("_[^_]", name)}
    assert private - homes.keys() == set(), "say here where they live"
    assert [name for name, home in homes.items() if not hasattr(home, name)] == []


def test_what_flash_attention_keeps_below_its_public_function_is_there() -> None:
    flash = pytest.importorskip("flash_attn.cute.interface")
    assert "out" in inspect.signature(flash._flash_attn_fwd).parameters
