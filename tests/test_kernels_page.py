"""docs/kernels.md is what `nanovllm kernels` prints. Run as a script, this file writes the page anew."""

import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from nanovllm.cli.main import main
from nanovllm.config import EngineConfig
from nanovllm.kernels.plan.plan import Rules
from nanovllm.layers.linear import Operation
from nanovllm.models.planned import one_of_each
from nanovllm.models.published import PUBLISHED_SHAPES
from nanovllm.models.registry import read_model_config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"
SECTION = re.compile(r"^    nanovllm (kernels [^\n]+)\n\n?(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def printed(command: str) -> str:
    out = StringIO()
    with redirect_stdout(out):
        assert main(shlex.split(command)) == 0
    return out.getvalue()


def test_the_page_shows_what_the_command_prints() -> None:
    found = SECTION.findall(PAGE.read_text(encoding="utf-8"))
    assert len(found) >= 5
    for command, shown in found:
        assert shown.strip() == printed(command).strip(), f"{command}: python tests/test_kernels_page.py writes it anew"


@pytest.mark.parametrize("device", ["H100", "B200", "A100", "L40S", "5090", "cpu"])
def test_every_published_model_has_a_plan_on_every_device(device: str) -> None:
    for name in PUBLISHED_SHAPES:
        text = printed(f"kernels {name} --device {device} --rows 1,3,16,100,20000")
        assert "output head" in text and text.count("layers:") >= 1
        if device == "cpu":
            assert set(re.findall(r"fma|tile|roles", text)) == set()


@pytest.mark.parametrize("name", PUBLISHED_SHAPES)
def test_each_product_of_a_layer_is_in_its_plan(name: str) -> None:
    config = read_model_config(EngineConfig(name, load_format="dummy"))
    for layer in one_of_each(config, Rules(), "bfloat16")[0].layers:
        assert {part.product for part in layer.modules() if isinstance(part, Operation)} == {*layer.operations}


def test_a_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "Qwen3-8B", "--device", "H2O0"]) == 2
    assert "device='H2O0': must be one of NVIDIA H200" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["kernels", "Qwen3-8B", "--rows", "1,x"])
    assert "must be positive integers" in capsys.readouterr().err


def test_it_shows_what_an_engine_of_the_options_runs() -> None:
    """A GPU computes wide checkpoints in bfloat16, and without fused kernels no kernel of ours."""
    command = "kernels Qwen3-8B --device H200 --rows 1,64"
    assert printed(f"""{command} --hf-overrides '{{"torch_dtype": "float32"}}'""") == printed(command)
    assert not re.search(r"fma|tile|roles", printed(f"{command} --disable fused_kernels"))


def test_nothing_is_allocated_and_no_gpu_is_asked() -> None:
    """235B on eight ranks, by a process without GPUs."""
    command = [sys.executable, "-m", "nanovllm", "kernels", "Qwen3-235B-A22B", "--device", "H200", "-tp", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0 and "94 layers" in done.stdout, done.stderr


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    text = SECTION.sub(lambda one: f"    nanovllm {one[1]}\n\n{printed(one[1])}\n", text)
    PAGE.write_text(text.rstrip() + "\n", encoding="utf-8")
