"""`nanovllm plan` says what engines take: the same layers without memory, and the same arithmetic."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import block_head
import eagle_head
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.cli.main import main
from nanovllm.config import EngineConfig
from nanovllm.executor.resolve import settle
from nanovllm.kernels.plan.device import Device
from nanovllm.models.published import PUBLISHED_SHAPES
from nanovllm.models.registry import read_model_config
from nanovllm.runner.footprint import GPUS, Footprint, Gpu, check_room, footprint_of, weight_bytes
from nanovllm.runner.model_runner import ModelRunner

sys.path.append(os.fspath(Path(__file__).parents[1] / "exactness"))
from family_cases import CASES, OPTIONS, make_model, save


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


MODES: dict[str, dict[str, Any]] = {"wide": {}, "fp8": {"quantization": "fp8"}, "int4": {"quantization": "int4"}}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_moe"])
def test_weights_and_kv_are_those_of_an_engine(
    name: str, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(save(make_model(CASES[name]), CASES[name], tmp_path))
    options = [word for key, value in MODES[mode].items() for word in (f"--{key}", value)]
    [found] = plan(capsys, folder, "-tp", "1", "--dtype", "float32", *options)["plans"]
    with LLM(folder, **OPTIONS, **MODES[mode]) as llm:
        runner = llm.engine.executor.runner
        held = weight_bytes(runner.weights.all)
        per_token = sum(pages.token_bytes(torch.float32) for layer in runner.model.mixers() for pages in layer.memory)
    assert found["weights"] == held
    assert sum(group["token_bytes"] for group in found["kv_cache"]) == per_token


@pytest.mark.parametrize(("method", "quantization"), [("eagle3", None), ("eagle3", "fp8"), ("dspark", None)])
def test_a_model_that_drafts_counts(
    method: str, quantization: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights, the keys of its layers, and what it reads."""
    folder = eagle_head.save(tmp_path) if method == "eagle3" else block_head.save(tmp_path, method)
    config = {"method": method, "model": str(folder), "num_speculative_tokens": 3, "quantization": quantization}
    words = (EngineConfig("demo").model, "-tp", "1", "--dtype", "float32")
    [alone] = plan(capsys, *words)["plans"]
    [found] = plan(capsys, *words, "--speculative-config", json.dumps(config))["plans"]
    with LLM("demo", device="cpu", max_num_seqs=8, speculative_config=config) as llm:
        runner = llm.engine.executor.runner
        assert found["weights"] - alone["weights"] == weight_bytes(runner.drafter.checkpoint_weights())
        layers = runner.drafter.attention_layers()
        own = sum(pages.token_bytes(torch.float32) for layer in layers for pages in layer.memory)
        assert runner.state_memory.block_bytes == 16 * sum(group["token_bytes"] for group in found["kv_cache"])
    assert sum(group["token_bytes"] for group in found["kv_cache"]) == own + alone["kv_cache"][0]["token_bytes"]
    assert found["libraries"] > alone["libraries"]


def test_ranks_share_weights_and_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save(make_model(CASES["qwen2_moe"]), CASES["qwen2_moe"], tmp_path))
    found = plan(capsys, folder, "--dtype", "float32")
    by_ranks = {one["tensor_parallel_size"]: one["weights"] for one in found["plans"]}
    with LLM(folder, **OPTIONS, tensor_parallel_size=2) as llm:
        assert weight_bytes(llm.engine.executor.runner.weights.all) == by_ranks[2] < by_ranks[1]
    assert found["refused"].keys() == {"4", "8"}
    assert found["refused"]["4"] == "tensor_parallel_size=4: must be a divisor of num_attention_heads=6"


def test_a_shape_that_is_known_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "Qwen3-8B", "--gpu", "H200", "--length", "4k"]) == 0
    text = capsys.readouterr().out
    assert "36 layers that see all keys" in text and "144.0 KiB a token" in text and "users of 4,000" in text
    small, large = (plan(capsys, "Qwen3-8B", "-tp", "1", "--gpu", gpu)["plans"][0] for gpu in ("40", "H200"))
    assert small["weights"] == large["weights"] and small["tokens"] < large["tokens"] / 5
    asked = plan(capsys, "Qwen3-8B", "-tp", "1", "--num-kvcache-blocks", "320")["plans"][0]
    assert (asked["num_kvcache_blocks"], asked["users"]["40960"]) == (320, 1)
    eager = plan(capsys, "Qwen3-8B", "-tp", "1", "--enforce-eager")["plans"][0]
    assert eager["graphs"] == 0 < large["graphs"] and eager["tokens"] > large["tokens"]
    eight_bits = plan(capsys, "Qwen3-8B", "-tp", "1", "--kv-cache-dtype", "fp8")["plans"][0]
    assert eight_bits["tokens"] == pytest.approx(1.97 * large["tokens"], rel=0.01)
    for length, users in large["users"].items():
        assert users == large["num_kvcache_blocks"] // (int(length) // 128)


def test_values_by_vllms_names(capsys: pytest.CaptureFixture[str]) -> None:
    """As `serve` takes them."""
    ours = ["--dtype", "float16", "--kv-cache-dtype", "fp8"]
    theirs = ["--dtype", "half", "--kv-cache-dtype", "fp8_e4m3"]
    assert plan(capsys, "Qwen3-8B", "-tp", "1", *theirs) == plan(capsys, "Qwen3-8B", "-tp", "1", *ours)
    printed = []
    for dtype in ("float16", "half"):
        assert main(["kernels", "Qwen3-8B", "--device", "H200", "--rows", "1", "--dtype", dtype]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_windows_are_a_group_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    groups = plan(capsys, "gpt-oss-20b", "-tp", "2")["plans"][0]["kv_cache"]
    assert [(one["window"], one["layers"], one["kv_heads"]) for one in groups] == [(128, 12, 4), (None, 12, 4)]


def test_it_refuses_with_the_engines_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["Qwen3-32B", "--gpu", "24", "-tp", "1"], "gpu_memory_utilization=0.9: leaves -4"),
        (["Qwen3-8B", "--max-model-len", "50000"], "max_model_len=50000: must be at most max_position_embeddings"),
        (["Qwen3-8B", "-tp", "3"], "tensor_parallel_size=3: must be a divisor of num_attention_heads=32"),
        (["Qwen3-8B", "--quantization", "mxfp4"], "quantization='mxfp4': must be of a model with experts"),
        (["Qwen3-8B", "--gpu", "H900"], "--gpu='H900': must be a size in GiB, or one of A100-40, "),
        (["Qwen3-8B", "--gpu", "1e400"], "--gpu='1e400': must be a size in GiB, or one of A100-40, "),
        (["Qwen3-8B", "--gpu=-80"], "--gpu='-80': must be a size in GiB, or one of A100-40, "),
        (["Qwen3-8B", "--length", "0"], "--length=0: must be in 1..40960, the longest context"),
        (["Qwen3-8B", "--length", "4k", "64k"], "--length=64000: must be in 1..40960, the longest context"),
        (["Qwen3-8B", "--num-kvcache-blocks", "9999", "-tp", "1"], "num_kvcache_blocks=9999: must be at most the 6"),
        (["no-such-folder"], "model='no-such-folder': no such folder"),
        (["Qwen3-30B-A3B", "--quantization", "fp8", "--gpu", "A100-80"], "FP8 experts need a GPU of "),
        (["Qwen3-8B", "--kv-cache-dtype", "fp8", "--gpu", "A100-80"], "compute capability 8.0; FP8 needs 8.9"),
        (["Qwen3-8B", "--exact-bits", "batch", "--gpu", "RTX-5090"], "device='compute capability 12.0': must be 9.0"),
    ):
        assert main(["plan", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("name", "gpu"), [("Qwen3-32B", "RTX-5090"), ("Qwen3-8B", "10")])
def test_the_start_refuses_by_it(
    name: str, gpu: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are loaded, in the same sentence; and never for what is an estimate alone."""
    config = EngineConfig(name, load_format="dummy", skip_tokenizer_init=True, device="cuda")
    model, device = read_model_config(config), GPUS.get(gpu, GPUS["H200"]).device
    total = GPUS[gpu].total if gpu in GPUS else int(gpu) << 30
    monkeypatch.setattr(Device, "of", lambda _: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total, total))
    config = settle(config, model, device.capability)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=0\.9: leaves -.* \(one block\)") as refused:
        check_room(config, model, torch.device("cuda"))
    assert main(["plan", name, "--gpu", gpu, "-tp", "1"]) == 2
    assert str(refused.value) in capsys.readouterr().err
    footprint = footprint_of(config, model, GPUS["H200"])
    sure = footprint.weights + footprint.buffers + footprint.reserved["filters"]
    total = int((sure + footprint.block_bytes) / 0.9) + 2
    check_room(config, model, torch.device("cuda"))


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_states_of_recurrent_layers_leave_room_to_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one state would fit beside the largest step, those that an engine chooses do: before it measures a step, it
    leaves what is predicted for it."""
    folder, device = str(save(make_model(CASES[name]), CASES[name], tmp_path)), Device.named("H100")
    monkeypatch.setattr(Device, "of", lambda _: device)

    def chosen(total: int, **options: Any) -> Footprint:
        config = EngineConfig(folder, device="cpu", dtype="float32", max_num_seqs=4096, **options)
        model = read_model_config(config)
        config = settle(config, model, device.capability)
        footprint = footprint_of(config, model, Gpu(device, total))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total, total))
        memory = Mock(slot_bytes=footprint.line_bytes, choose_lines=Mock(side_effect=KeyError))
        probe, where = Mock(kv_budget=lambda _: total), torch.device("cuda")
        with pytest.raises(KeyError):
            ModelRunner._num_blocks(
                Mock(config=config, model_config=model, device=where, state_memory=memory, memory=probe)
            )
        memory.choose_lines.assert_called_once_with(total - sum(footprint.reserved.values()))
        return footprint

    one = chosen(1 << 40, num_state_lines=1)
    least = one.used + sum(one.reserved.values()) + 8 * one.block_bytes
    for more in (0, one.line_bytes, 8 * one.line_bytes, 1 << 20, 1 << 30):
        total = int((least + more) / 0.9) + 2
        found = chosen(total)
        assert found.blocks >= one.layout.num_tables and found.slots == (found.num_lines + 1) * found.line_bytes
        assert found.num_lines >= min(more // found.line_bytes // 5, 6144 * 9 // 10)


@pytest.mark.parametrize("on_hub", [False, True])
def test_headers_are_held_against_the_configuration(
    on_hub: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder, and of a repository, of which nothing but config.json and headers is fetched."""
    folder = save(make_model(CASES["llama"]), CASES["llama"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    kinds = {torch.float32: "F32"}

    def metadata(_: str, revision: str | None) -> Any:
        infos = {name: SimpleNamespace(dtype=kinds[one.dtype], shape=list(one.shape)) for name, one in tensors.items()}
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=infos)}, weight_map={})

    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", metadata)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    model = "owner/name" if on_hub else str(folder)
    assert plan(capsys, model, "-tp", "1")["plans"]
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors")
    assert main(["plan", model]) == 2
    assert "weight 'model.norm.weight' has shape (7,), the configuration needs (48,)" in capsys.readouterr().err
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert main(["plan", model]) == 2
    assert "checkpoint: 1 missing weight: model.norm.weight" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    if not on_hub:
        assert main(["plan", model]) == 0
        assert "no weights there: from config.json alone" in capsys.readouterr().out


def test_every_gpu_is_a_device_of_today() -> None:
    assert all(20 << 30 < gpu.total < 300 << 30 and 50 <= gpu.device.processors <= 200 for gpu in GPUS.values())


def test_the_page_says_how_many_users_fit_as_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/troubleshooting.md; the 70B of its last row is no shape that is known by name."""
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    lines = page[page.index("| model | RTX-4090") :].split("\n\n")[0].splitlines()
    heading, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert len(rows) == 5
    for model, *cells in rows[:4]:
        for gpu, cell in zip(heading[1:], cells, strict=True):
            said = []
            for mode in MODES.values():
                options = [word for key, value in mode.items() for word in (f"--{key}", value)]
                fits = main(["plan", model, "--gpu", gpu, "-tp", "1", "--length", "8000", "--json", *options]) == 0
                printed = capsys.readouterr().out
                said.append(str(json.loads(printed)["plans"][0]["users"]["8000"]) if fits else "–")
            assert ", ".join(said) == cell, (model, gpu)


def test_the_recipes_say_how_many_users_fit_as_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/recipes.md; some of its models are no shapes that are known by name."""
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = page[page.index("| model | in 16 bits, H200") :].split("\n\n")[0].splitlines()[2:]
    wrong, count = [], 0
    for row in rows:
        names, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        model = names.partition(",")[0].replace(" ", "-")
        for gpu, cell in zip(("H200", "H100"), cells, strict=True):
            said = re.search(r"(\d) GPUs?\b.*: (\d+), (\d+)$", cell)
            if said is None or model not in PUBLISHED_SHAPES:
                continue
            is_fp8 = "in FP8" in cell or (gpu == "H100" and not re.search("16 bits|MXFP4", cell))
            options = ["--gpu", gpu, "-tp", said[1], *(("--quantization", "fp8") if is_fp8 else ())]
            [found] = plan(capsys, model, *options, "--length", "8000", "32000")["plans"]
            users = [str(found["users"][length]) for length in ("8000", "32000")]
            count += 1
            if users != [said[2], said[3]]:
                wrong.append((model, gpu, users))
    assert count >= 18 and not wrong
