"""Experts in one tensor and in one each: whichever a checkpoint has, layers get the same."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FILE, read_json, write_json
from family_cases import CASES, make_model, save
from int4_checkpoints import config_of, quantized, tensors_of
from packed_formats import FORMATS
from safetensors.torch import load_file, save_file
from test_wrapped_models import make_wrapped
from workload import ROOMY, assert_outputs, make_requests, run, tokens_alone

from nanovllm import LLM
from nanovllm.cli.main import main

Tensors = dict[str, torch.Tensor]
WIDE = {"hidden_size": 64, "moe_intermediate_size": 160, "vocab_size": 301, "max_position_embeddings": 512}
"""Widths of whole groups of 32 and 16."""


def stacked(tensors: Tensors) -> Tensors:
    """Tensors of transformers' modules, which have a matrix of all experts in one."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for path in {name.partition(".experts.")[0] for name in tensors.keys() - found.keys()}:
        count = sum(name.startswith(f"{path}.experts.") for name in tensors) // 3
        gates, ups, downs = (
            torch.stack([tensors[f"{path}.experts.{number}.{part}_proj.weight"] for number in range(count)])
            for part in ("gate", "up", "down")
        )
        for name, tensor in (("gate_up_proj", torch.cat([gates, ups], 1)), ("down_proj", downs)):
            found[f"{path}.experts.{name}"] = tensor
    return found


def apart(tensors: Tensors) -> Tensors:
    """Matrices of each expert in their place."""
    found = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        path, _, last = name.rpartition(".")
        members = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        for number, matrix in enumerate(found.pop(name)):
            for member, part in zip(members, matrix.chunk(len(members)), strict=True):
                found[f"{path}.{number}.{member}.weight"] = part
    return found


def test_a_stack_is_the_matrices_of_each(tmp_path: Path) -> None:
    """On several ranks, rounded while loading, in an update and by `nanovllm plan`."""
    case = CASES["qwen3_5_moe"]
    kinds = case.entries["layer_types"][:2]
    case = replace(case, entries={**case.entries, "num_hidden_layers": 2, "layer_types": kinds})
    one_each = save(make_model(case), case, tmp_path / "each")
    tensors = load_file(one_each / FILE)
    folder = Path(shutil.copytree(one_each, tmp_path / "stacked"))
    save_file(stacked(tensors), folder / FILE)
    modes: tuple[dict[str, Any], ...] = ({}, {"tensor_parallel_size": 2}, {"quantization": "int4"},
                                         {"quantization": "fp8"}, {"quantization": "mxfp4"})  # fmt: skip
    for options in modes:
        with LLM(str(one_each), **ROOMY, **options) as llm:
            expected = llm.checksum()
            if "tensor_parallel_size" not in options:
                llm.load_weights((name, tensor + 1) for name, tensor in stacked(tensors).items())
                assert llm.checksum() != expected
                llm.load_weights(stacked(tensors).items())
                assert llm.checksum() == expected
        with LLM(str(folder), **ROOMY, **options) as llm:
            assert llm.checksum() == expected
    assert main(["plan", str(folder), "-tp", "1"]) == 0
    short = stacked(tensors)
    name = next(name for name in short if name.endswith("experts.gate_up_proj"))
    save_file({**short, name: short[name][:, 2:].contiguous()}, folder / FILE)
    with pytest.raises(ValueError, match=r"experts.\d+.gate_proj.weight' has shape \(19, 48\), the configuration"):
        LLM(str(folder), **ROOMY)


@pytest.mark.parametrize(
    ("family", "form"), [("gemma4, experts", "int4"), ("Qwen3VLMoe", "nvfp4"),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gemma4, experts", "nvfp4"), ("Qwen3VLMoe", "int4")))],
)  # fmt: skip
def test_tools_write_experts_of_their_own_where_wide_ones_are_stacked(family: str, form: str, tmp_path: Path) -> None:
    """Tools quantise modules, so they take stacks apart."""
    if family == "Qwen3VLMoe":
        make_wrapped(family, **WIDE).save_pretrained(tmp_path / "wide")
    else:
        case = replace(CASES[family], entries={**CASES[family].entries, **WIDE})
        save(make_model(case), case, tmp_path / "wide")
    wide, packed = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in apart(load_file(tmp_path / "wide" / FILE)).items():
        if ".experts." not in name:
            wide[name] = packed[name] = tensor
            continue
        path, matrix = name.removesuffix(".weight"), tensor.double().numpy()
        if form == "int4":
            made = quantized(matrix, 32)
            written, held = tensors_of(path, made, "compressed-tensors"), made.widened()
        else:
            written = FORMATS[form].write(path, matrix)
            held = FORMATS[form].read(path, written)
        packed |= written
        wide[name] = torch.from_numpy(held).float()
    entry = config_of("compressed-tensors", 32) if form == "int4" else dict(FORMATS[form].config)
    entry["ignore"] = ["lm_head", "re:.*self_attn", r"re:.*\.mlp\.(gate|up|down)_proj", "re:.*visual"]
    folder = Path(shutil.copytree(tmp_path / "wide", tmp_path / "packed"))
    save_file(stacked(wide), tmp_path / "wide" / FILE)
    save_file({name: tensor.contiguous() for name, tensor in packed.items()}, folder / FILE)
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "quantization_config": entry})
    requests = make_requests(most_tokens=8)[:4]
    expected = tokens_alone(tmp_path / "wide", requests)
    assert main(["plan", str(folder), "-tp", "1", "--dtype", "float32"]) == 0
    for ranks in (1, 2):
        with LLM(str(folder), tensor_parallel_size=ranks, **ROOMY) as llm:
            assert llm.engine.model_config.layers[0].precision("experts") is not None
            assert_outputs(run(llm, requests), requests, expected, (family, form, ranks))


@pytest.mark.parametrize("layout", ["gptq", "awq", "compressed-tensors", "symmetric"])
def test_a_packed_router_is_widened(layout: str, tmp_path: Path) -> None:
    """Tools quantise all linear modules that they are not told to leave, and some a head."""
    sizes = {**WIDE, "num_experts": 8, "intermediate_size": 96, "vocab_size": 304}
    case = replace(CASES["qwen3_moe"], entries={**CASES["qwen3_moe"].entries, **sizes})
    folder = save(make_model(case), case, tmp_path / "wide")
    layout, symmetric = layout.replace("symmetric", "compressed-tensors"), layout == "symmetric"
    wide, packed = load_file(folder / FILE), dict[str, torch.Tensor]()
    for name in [name for name in wide if name.endswith(("proj.weight", ".gate.weight", "lm_head.weight"))]:
        matrix = quantized(wide[name].numpy(), 32, symmetric)
        packed |= tensors_of(name.removesuffix(".weight"), matrix, layout, symmetric)
        wide[name] = torch.from_numpy(matrix.widened())
    others = {name: tensor for name, tensor in wide.items() if not name.endswith(("proj.weight", ".gate.weight"))}
    del others["lm_head.weight"]
    packed |= {**others, "model.layers.0.mlp.gate.bias": torch.zeros(8)}
    save_file(wide, folder / FILE)
    made = Path(shutil.copytree(folder, tmp_path / "packed"))
    save_file({name: tensor.contiguous() for name, tensor in packed.items()}, made / FILE)
    quantization = {**config_of(layout, 32, symmetric), "lm_head": True, "ignore": []}
    write_json(made / "config.json", {**read_json(made / "config.json"), "quantization_config": quantization})
    requests = make_requests(most_tokens=8)[:4]
    expected = tokens_alone(folder, requests)
    assert main(["plan", str(made), "-tp", "1", "--dtype", "float32"]) == 0
    with LLM(str(made), **ROOMY) as llm:
        assert_outputs(run(llm, requests), requests, expected, layout)
        before = llm.checksum()
        llm.load_weights(packed.items())
        assert llm.checksum() == before
    scales = next(name for name in packed if name.startswith("model.layers.0.mlp.gate.") and "scale" in name)
    save_file({**load_file(made / FILE), scales: packed[scales][:1].contiguous()}, made / FILE)
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.gate.weight' comes packed: must be 8 x 64, with scales"):
        LLM(str(made), **ROOMY)
