"""NVFP4, MXFP4 and integers of 8 bits, in dense layers and experts: a packed checkpoint gives the tokens of the wide
one that it stands for, alone or in a crowd, in chunks, preempted, from the cache and on two ranks."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FILE, change_tensors, make_model, read_json, save, spoil, write_json
from packed_formats import FORMATS, save_as
from safetensors.torch import load_file
from test_int4_weights import SHAPE
from test_packed_checkpoints import CHUNKS, save_experts
from workload import ROOMY, assert_outputs, make_requests, run, tokens_alone

from nanovllm import LLM
from nanovllm.cli.main import main
from nanovllm.errors import WeightsIncomplete
from nanovllm.runner.footprint import weight_bytes

REQUESTS = make_requests(most_tokens=10)
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "max_num_batched_tokens": 64}
DENSE: dict[str, dict[str, Any]] = {
    "modelopt": TWO_RANKS, "nvfp4": CHUNKS, "mxfp4": TWO_RANKS, "int8": CHUNKS, "int8 packed": {},
    "int8 in groups": TWO_RANKS,
}  # fmt: skip
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "modelopt": ("Qwen3Moe", CHUNKS), "nvfp4": ("Glm4Moe", TWO_RANKS), "mxfp4": ("Mixtral", TWO_RANKS),
    "int8": ("Qwen3Moe", TWO_RANKS), "int8 in groups": ("Qwen3Moe", {}), "modelopt, no gates": ("NemotronH", TWO_RANKS),
}  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Folders of a format, packed and wide."""
    folder = tmp_path_factory.mktemp("formats")
    save(make_model(seed=3, **SHAPE), folder / "made")

    def make(name: str) -> tuple[Path, Path]:
        target = folder / name
        return (target / "packed", target / "wide") if target.is_dir() else save_as(name, folder / "made", target)

    return make


@pytest.mark.parametrize("name", FORMATS)
def test_dense_layers_give_the_wide_checkpoints_tokens(dense: Callable[[str], tuple[Path, Path]], name: str) -> None:
    packed, wide = dense(name)
    expected = tokens_alone(wide, REQUESTS[:6])
    with LLM(str(packed), **{**ROOMY, **DENSE[name]}) as llm:
        assert_outputs(run(llm, REQUESTS[:6]), REQUESTS[:6], expected, name)
        assert_outputs(run(llm, REQUESTS[5::-1]), REQUESTS[5::-1], expected[::-1], (name, "later, from the cache"))
        before = llm.checksum()
        llm.load_weights(packed)
        llm.load_weights(load_file(packed / FILE).items())
        assert llm.checksum() == before


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "int8")) for n in EXPERTS])
def test_experts_give_the_wide_checkpoints_tokens(name: str, tmp_path: Path) -> None:
    family, options = EXPERTS[name]
    packed, wide = save_as(name.partition(",")[0], save_experts(family, tmp_path / "made"), tmp_path)
    expected = tokens_alone(wide, REQUESTS[:5])
    with LLM(str(packed), **{**ROOMY, **options}) as llm:
        assert_outputs(run(llm, REQUESTS[:5]), REQUESTS[:5], expected, name)
        assert_outputs(run(llm, REQUESTS[4::-1]), REQUESTS[4::-1], expected[::-1], (name, "later, from the cache"))


@pytest.mark.parametrize("name", FORMATS)
def test_plan_counts_what_ranks_hold_and_the_log_says_what_is_unused(
    dense: Callable[[str], tuple[Path, Path]], name: str, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    packed, _ = dense(name)
    assert main(["plan", str(packed), "--dtype", "float32", "--json"]) == 0
    ranks = DENSE[name].get("tensor_parallel_size", 1)
    counted = {one["tensor_parallel_size"]: one["weights"] for one in json.loads(capsys.readouterr().out)["plans"]}
    caplog.clear()
    with caplog.at_level(logging.WARNING), LLM(str(packed), tensor_parallel_size=ranks, **ROOMY) as llm:
        assert weight_bytes(llm.engine.executor.runner.weights.all) == counted[ranks]
    said = " ".join(record.message for record in caplog.records)
    assert ("weights alone are quantised here" in said) == (name in ("modelopt", "nvfp4", "int8"))
    assert ("scales of FP8 keys and values are unused" in said) == (name in ("modelopt", "nvfp4"))


def test_what_ignore_lists_name_by_patterns_stays_wide(
    dense: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """In the file that ModelOpt writes beside a config.json without an entry."""
    packed, wide = dense("modelopt")
    folder, kept = Path(shutil.copytree(packed, tmp_path / "copy")), "model.layers.0.self_attn"
    of_wide = {name: value for name, value in load_file(wide / FILE).items() if name.startswith(kept)}

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(kept)]:
            tensors.pop(name)
        tensors.update(of_wide)

    change_tensors(folder, widen)
    config = read_json(folder / "config.json")
    config.pop("quantization_config")
    write_json(folder / "config.json", config)
    found = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    quantization = {**found, "exclude_modules": ["lm_head", "model.layers.0.self_att*"]}
    write_json(folder / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": quantization})
    with LLM(str(folder), **ROOMY) as llm:
        held = [layer.precision(part) for layer in llm.engine.model_config.layers for part in ("qkv", "o", "down")]
        assert [one is None for one in held] == [True, True, False, False, False, False]
        assert_outputs(run(llm, REQUESTS[:3]), REQUESTS[:3], tokens_alone(wide, REQUESTS[:3]))


def test_modelopts_algorithm_of_weights_alone(
    dense: Callable[[str], tuple[Path, Path]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which has no scales of inputs, so that nothing is said of them."""
    packed, _ = dense("modelopt")
    change_tensors(packed, lambda all_of: [all_of.pop(name) for name in [*all_of] if "input_scale" in name], tmp_path)
    config = read_json(packed / "config.json")
    config["quantization_config"] |= {"quant_algo": "W4A16_NVFP4", "kv_cache_scheme": None}
    write_json(tmp_path / "config.json", config)
    with LLM(str(packed), **ROOMY) as llm:
        expected = llm.checksum()
    caplog.clear()
    with caplog.at_level(logging.WARNING), LLM(str(tmp_path), **ROOMY) as llm:
        assert llm.checksum() == expected
    assert "quantised here" not in caplog.text


def test_experts_rounded_to_mxfp4_while_loading(tmp_path: Path) -> None:
    """Those alone; as if they had been written so, for what is MXFP4 is rounded to itself."""
    packed, wide = save_as("mxfp4", save_experts("Qwen3Moe", tmp_path / "made"), tmp_path)
    others = {name: value for name, value in load_file(wide / FILE).items() if ".self_attn." in name}

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".self_attn." in name and "norm" not in name]:
            tensors.pop(name)
        tensors.update(others)

    change_tensors(packed, widen)
    config = read_json(packed / "config.json")
    config["quantization_config"]["ignore"].append("re:.*self_attn")
    write_json(packed / "config.json", config)

    def weights(llm: LLM) -> list[torch.Tensor]:
        experts = [layer.mlp for layer in llm.engine.executor.runner.model.layers]
        matrices = [matrix for one in experts for matrix in (one.gate_up.matrix, one.down.matrix)]
        return [matrix.for_kernel().widened(2) for matrix in matrices]

    with LLM(str(packed), **ROOMY) as llm:
        expected = weights(llm)
        llm.load_weights(wide)
        assert all(map(torch.equal, weights(llm), expected))
    with LLM(str(wide), quantization="mxfp4", **ROOMY) as llm:
        assert all(map(torch.equal, weights(llm), expected))


UP = "model.layers.0.mlp.up_proj"
SPOILT: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "no scale": ("modelopt", "weight_scale", lambda t: None, rf"1 missing weight: {UP}.weight_scale"),
    "no scale of the tensor": ("nvfp4", "weight_global_scale", lambda t: None, rf"{UP}.weight_global_scale"),
    "scales of 16 bits": ("modelopt", "weight_scale", lambda t: t.half(), "weight_scale' has type torch.float16: must"),
    "exponents as floats": ("mxfp4", "weight_scale", lambda t: t.float(), "weight_scale' has type torch.float32: must"),
    "integers as scales": ("int8", "weight_scale", lambda t: t.int(), "weight_scale' has type torch.int32: must"),
    "a scale of 16 bits": ("nvfp4", "weight_global_scale", lambda t: t.half(), "global_scale' has type torch.float16"),
    "negative": ("nvfp4", "weight_scale", lambda t: (-t.float()).to(t.dtype), r"scale' holds -.*: scales must be"),
    "no number": ("modelopt", "weight_scale_2", lambda t: t * torch.nan, r"weight_scale_2' holds nan: scales must be"),
    "a group less": ("modelopt", "weight_scale", lambda t: t[:, 1:], r"weight_scale' has shape \(320, 11\), the conf"),
    "a byte less": ("mxfp4", "weight_packed", lambda t: t[:, 1:], r"weight_packed' has shape \(320, 95\), the config"),
    "a row less": ("int8 packed", "weight_packed", lambda t: t[1:], r"weight_packed' has shape \(319, 48\), the conf"),
    "a wide one": ("modelopt", "weight", lambda t: t.float(), r"up_proj.weight' has type torch.float32: must be"),
    "scales by row": ("nvfp4", "weight_global_scale", lambda t: t.repeat(320), r"scale' has shape \(320,\), the conf"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(SPOILT))
def test_spoilt_checkpoints_are_refused_by_the_tensors_name(
    dense: Callable[[str], tuple[Path, Path]], tmp_path: Path, case: str
) -> None:
    name, kind, change, message = SPOILT[case]
    spoil(dense(name)[0], f"{UP}.{kind}", change, to=tmp_path)
    write_json(tmp_path / "config.json", read_json(dense(name)[0] / "config.json"))
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), **ROOMY)


def test_ranks_that_groups_do_not_divide_are_refused_with_a_number_that_would(tmp_path: Path) -> None:
    """Heads of 64: two ranks would have 192 columns of the output projection each."""
    made = save(make_model(seed=3, **{**SHAPE, "num_attention_heads": 6}), tmp_path / "made")
    packed, _ = save_as("nvfp4", made, tmp_path)
    message = r"192 of 384 inputs for each rank: must be a multiple of 128 in nvfp4, as with tensor_parallel_size=1"
    with pytest.raises(ValueError, match=message):
        LLM(str(packed), tensor_parallel_size=2, **ROOMY)


WEIGHTS = ("config_groups", "group_0", "weights")
BAD: dict[str, tuple[str, tuple[str, ...], dict[str, Any], str]] = {
    "algorithm": ("modelopt", (), {"quant_algo": "NVFP4_AWQ"}, r"quant_algo='NVFP4_AWQ': must be one of NVFP4, W4A16_"),
    "cache": ("modelopt", (), {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, r"kv_cache_scheme=.*8-bit floats"),
    "groups": ("mxfp4", WEIGHTS, {"group_size": 64}, r"weights.group_size=64: must be 32"),
    "form": ("nvfp4", WEIGHTS[:2], {"format": "packed"}, r"format='packed': must be one of 'nvfp4-pack-quantized', "),
    "zeros": ("int8", WEIGHTS, {"symmetric": False}, r"weights.symmetric=False: must be True"),
    "groups of 32": ("int8 in groups", WEIGHTS, {"group_size": 32}, r"weights.group_size=32: must be 128"),
    "FP4 activations alone": (
        "int8", WEIGHTS[:2], {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 4}},
        r"input_activations.num_bits=4: must be 8"),
    **{method: ("nvfp4", (), {"quant_method": method}, "take the checkpoint that it was made of")
       for method in ("bitsandbytes", "aqlm", "gguf", "quark")},
}  # fmt: skip


@pytest.mark.parametrize("case", list(BAD))
def test_what_is_not_served_is_refused_by_name(
    dense: Callable[[str], tuple[Path, Path]], tmp_path: Path, case: str
) -> None:
    name, path, change, message = BAD[case]
    config = read_json(dense(name)[0] / "config.json")
    entry = config["quantization_config"]
    for part in path:
        entry = entry[part]
    entry.update(change)
    write_json(tmp_path / "config.json", config)
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), load_format="dummy", **ROOMY)


@pytest.mark.parametrize("name", FORMATS)
def test_exact_bits_are_refused(dense: Callable[[str], tuple[Path, Path]], name: str) -> None:
    with pytest.raises(ValueError, match="must be a checkpoint that is not quantised with exact_bits='batch'"):
        LLM(str(dense(name)[0]), exact_bits="batch", **ROOMY)


def test_dense_models_are_not_rounded_to_mxfp4(dense: Callable[[str], tuple[Path, Path]]) -> None:
    with pytest.raises(ValueError, match=r"quantization='mxfp4': must be of a model with experts"):
        LLM(str(dense("mxfp4")[1]), quantization="mxfp4", **ROOMY)


@pytest.mark.parametrize("name", ["modelopt", "int8 in groups"])
def test_dummy_weights_are_numbers(name: str, tmp_path: Path) -> None:
    packed, _ = save_as(name, save_experts("Qwen3Moe", tmp_path / "made"), tmp_path)
    with LLM(str(packed), load_format="dummy", **ROOMY) as llm:
        layer = llm.engine.executor.runner.model.layers[0]
        of_experts, of_o = layer.mlp.down.matrix.for_kernel(), layer.self_attn.o_proj.matrix.for_kernel()
        for weight in (of_experts.widened(1), of_o.widened()):
            assert 0.001 < weight.std() < 1 and weight.isfinite().all()


@pytest.mark.parametrize("options", [{}, TWO_RANKS])
def test_a_folder_with_a_wrong_value_leaves_an_engine_that_takes_another(
    dense: Callable[[str], tuple[Path, Path]], options: dict[str, Any], tmp_path: Path
) -> None:
    """Values are read when other weights are written already."""
    packed, _ = dense("nvfp4")
    name = "model.layers.1.mlp.down_proj.weight_scale"
    spoil(packed, name, lambda scales: (-scales.float()).to(scales.dtype), to=tmp_path)
    with LLM(str(packed), **{**ROOMY, **options}) as llm:
        before = llm.checksum()
        with pytest.raises(ValueError, match=f"{name}.*must be finite"):
            llm.load_weights(tmp_path)
        with pytest.raises(WeightsIncomplete):
            run(llm, REQUESTS[:1])
        llm.load_weights(packed)
        assert llm.checksum() == before
        assert run(llm, REQUESTS[:1])
