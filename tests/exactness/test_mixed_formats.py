"""Checkpoints with several formats, and stacks of quantised experts: they give the tokens of the checkpoint in which
all, or all but the FP8 layers, are widened."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import FILE, read_json, write_json
from fp8_checkpoints import compressed
from int4_checkpoints import config_of, quantized, tensors_of
from packed_formats import FORMATS, Tensors
from safetensors.torch import load_file, save_file
from test_int4_weights import SHAPE
from test_packed_checkpoints import save_experts
from workload import ROOMY, assert_outputs, make_requests, run, tokens_alone

from nanovllm import LLM
from nanovllm.cli.main import main
from nanovllm.kernels.fp8.reference import quantize_channels
from nanovllm.models.registry import parse_config

REQUESTS = make_requests(most_tokens=10)[:5]
TWO_RANKS = {"tensor_parallel_size": 2}
Written = tuple[Tensors, Tensors]
"""A matrix's tensors in a format, and what stands for them in the twin."""


def fp8(path: str, weight: torch.Tensor) -> Written:
    """ModelOpt's: a scale for the tensor, and one for its inputs. It is itself in the twin."""
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    found = {f"{path}.weight": values, f"{path}.weight_scale": scale, f"{path}.input_scale": torch.tensor(0.02)}
    return found, found


def packed(name: str) -> Callable[[str, torch.Tensor], Written]:
    def write(path: str, weight: torch.Tensor) -> Written:
        found = FORMATS[name].write(path, weight.double().numpy())
        return found, {f"{path}.weight": torch.from_numpy(FORMATS[name].read(path, found)).float()}

    return write


def int4(path: str, weight: torch.Tensor) -> Written:
    matrix = quantized(weight.numpy(), 32)
    return tensors_of(path, matrix, "compressed-tensors"), {f"{path}.weight": torch.from_numpy(matrix.widened())}


def save_mixed(
    made: Path, target: Path, writer: Callable[[str], Callable[[str, torch.Tensor], Written] | None],
    quantization: dict[str, Any], of_twin: dict[str, Any] | None,
) -> tuple[Path, Path]:  # fmt: skip
    """Folders of a checkpoint and its twin; writer: of a module's matrix, None where it stays as it is."""
    mixed, twin = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, value in load_file(made / FILE).items():
        path = name.removesuffix(".weight")
        write = writer(path) if name.endswith(".weight") else None
        for held, one in zip((mixed, twin), ({name: value},) * 2 if write is None else write(path, value), strict=True):
            held.update(one)
    config = read_json(made / "config.json")
    for kind, tensors, entry in (("mixed", mixed, quantization), ("twin", twin, of_twin)):
        (target / kind).mkdir(parents=True)
        save_file({name: value.clone().contiguous() for name, value in tensors.items()}, target / kind / FILE)
        write_json(target / kind / "config.json", {**config, **({"quantization_config": entry} if entry else {})})
    return target / "mixed", target / "twin"


def expect_tokens_of(twin: Path, mixed: Path, **options: Any) -> None:
    expected = tokens_alone(twin, REQUESTS)
    assert main(["plan", str(mixed), "--dtype", "float32"]) == 0
    with LLM(str(mixed), **{**ROOMY, **options}) as llm:
        assert_outputs(run(llm, REQUESTS), REQUESTS, expected)
        before = llm.checksum()
        llm.load_weights(mixed)
        llm.load_weights(load_file(mixed / FILE).items())
        assert llm.checksum() == before


ALL_BUT_ATTENTION = {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["mlp", "lm_head"]}


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), TWO_RANKS])
def test_modelopts_mixed_precision(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Attention in FP8, experts in NVFP4, named as one module, and a head, which is widened."""
    layers = [f"model.layers.{index}" for index in range(2)]
    by_module: dict[str, Any] = {
        f"{layer}.self_attn.{name}_proj": {"quant_algo": "FP8"} for layer in layers for name in "qkvo"
    }
    by_module |= {f"{layer}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for layer in layers}
    by_module["lm_head"] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    found = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "exclude_modules": ["mtp*"]}
    quantization = {"quant_method": "modelopt", "quantization": {**found, "quantized_layers": by_module}}

    def writer(path: str) -> Any:
        return packed("modelopt") if ".experts." in path or path == "lm_head" else fp8 if "_proj" in path else None

    made = save_experts("Qwen3Moe", tmp_path / "made")
    mixed, twin = save_mixed(made, tmp_path, writer, quantization, ALL_BUT_ATTENTION)
    expect_tokens_of(twin, mixed, **options)
    assert "scales of experts" not in caplog.text


def test_nemotrons_mixed_precision(tmp_path: Path) -> None:
    """As Nemotron 3 Super is published: Mamba and shared experts in FP8, the others in NVFP4, the rest wide."""
    of_fp8 = [f"backbone.layers.0.mixer.{name}_proj" for name in ("in", "out")]
    of_fp8 += [
        f"backbone.layers.{index}.mixer.shared_experts.{name}_proj" for index in (1, 3) for name in ("up", "down")
    ]
    experts = [f"backbone.layers.{index}.mixer.experts.{i}.{name}_proj"
               for index in (1, 3) for i in range(5) for name in ("up", "down")]  # fmt: skip
    by_module = {name: {"quant_algo": "FP8"} for name in of_fp8}
    by_module |= {name: {"quant_algo": "NVFP4", "group_size": 16} for name in experts}
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": by_module}
    wide = ["experts", *(f"{name}_proj" for name in ("fc1_latent", "fc2_latent", *"qkvo"))]
    of_twin = {**ALL_BUT_ATTENTION, "modules_to_not_convert": wide}

    def writer(path: str) -> Any:
        return packed("modelopt") if path in experts else fp8 if path in of_fp8 else None

    made = save_experts("NemotronH", tmp_path / "made")
    mixed, twin = save_mixed(made, tmp_path, writer, quantization, of_twin)
    expect_tokens_of(twin, mixed, **TWO_RANKS)


def test_config_groups_by_expressions_and_of_all_others(tmp_path: Path) -> None:
    """Attention in integers of 8 bits, experts of 4."""
    of_int4 = config_of("compressed-tensors", 32)
    groups = {
        "group_0": {**of_int4["config_groups"]["group_0"], "format": "pack-quantized"},
        "group_1": {**FORMATS["int8"].config["config_groups"]["group_0"], "targets": [r"re:.*self_attn\.[qkvo]_proj$"]},
    }  # fmt: skip
    quantization = {
        **of_int4,
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ["lm_head", "re:.*gate$"],
    }

    def writer(path: str) -> Any:
        return int4 if ".experts." in path else packed("int8") if "_proj" in path else None

    made = save_experts("Qwen3Moe", tmp_path / "made")
    mixed, twin = save_mixed(made, tmp_path, writer, quantization, None)
    expect_tokens_of(twin, mixed, **TWO_RANKS)


def test_experts_have_no_static_scales_of_activations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """ModelOpt writes some; they are measured, as where a checkpoint asks for that."""
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "exclude_modules": ["lm_head", "*mlp.gate", "*self_attn*"],
    }
    dynamic = {
        **ALL_BUT_ATTENTION,
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head", "gate", "self_attn"],
    }
    made = save_experts("Qwen3Moe", tmp_path / "made")
    mixed, twin = save_mixed(made, tmp_path, lambda path: fp8 if ".experts." in path else None, quantization, dynamic)
    expect_tokens_of(twin, mixed)
    assert "scales of experts' activations are unused" in caplog.text


STACK: dict[str, Any] = {
    **SHAPE, "vocab_size": 301, "num_hidden_layers": 2, "num_local_experts": 5, "num_experts_per_tok": 2,
    "intermediate_size": 160, "shared_intermediate_size": 192, "max_position_embeddings": 512, "logits_scaling": 0.5,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
    "initializer_range": 0.15,
}  # fmt: skip
GRANITES: dict[str, dict[str, Any]] = {
    "GraniteMoe": {}, "GraniteMoeHybrid": {
        "layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 24, "mamba_d_head": 16,
        "mamba_d_state": 16,
    },
}  # fmt: skip


def stacked(write: Callable[[str, torch.Tensor], Written]) -> Callable[[str, torch.Tensor], Written]:
    """Experts as one matrix of all their rows, whose tensors are cut between them, as llm-compressor does."""

    def write_all(path: str, weight: torch.Tensor) -> Written:
        count = len(weight)
        parts = write(path, weight.flatten(0, -2))
        return tuple({
            name: value if name.endswith("_shape") or value.dim() == 0 or weight.dim() == 2
            else value.unflatten(0, (count, -1)) for name, value in part.items()
        } for part in parts)  # type: ignore[return-value]  # fmt: skip

    return write_all


def rows_in_fp8(path: str, weight: torch.Tensor) -> Written:
    values, scales = quantize_channels(weight)
    return {f"{path}.weight": values, f"{path}.weight_scale": scales}, {f"{path}.weight": weight}


@pytest.mark.parametrize(
    ("name", "options"), [("GraniteMoe", {}), ("GraniteMoeHybrid", TWO_RANKS),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (("GraniteMoe", TWO_RANKS), ("GraniteMoeHybrid", {})))],
)  # fmt: skip
def test_granites_stacks_of_quantised_experts(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """By the name of the stack."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**STACK, **GRANITES[name])
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "made")
    ignored = ["lm_head", "re:.*router", "re:.*mamba", "model.layers.1.block_sparse_moe.input_linear",
               "model.layers.1.block_sparse_moe.output_linear"]  # fmt: skip
    quantization = {**config_of("compressed-tensors", 32), "ignore": ignored}

    def writer(path: str) -> Any:
        is_matrix = path.endswith(("_proj", "_linear")) and ".mamba." not in path
        return stacked(int4) if is_matrix and path not in ignored else None

    mixed, twin = save_mixed(tmp_path / "made", tmp_path, writer, quantization, None)
    expect_tokens_of(twin, mixed, **options)


def test_granites_stacks_in_fp8_are_those_made_while_loading(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = transformers.GraniteMoeConfig(**STACK)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "made")
    quantization = {**compressed("channel"), "ignore": ["lm_head", "re:.*router"]}

    def writer(path: str) -> Any:
        return stacked(rows_in_fp8) if path.endswith(("_proj", "_linear")) else None

    mixed, twin = save_mixed(tmp_path / "made", tmp_path, writer, quantization, None)
    with LLM(str(mixed), **ROOMY) as llm, LLM(str(twin), quantization="fp8", **ROOMY) as made:
        assert llm.checksum() == made.checksum()
        assert run(llm, REQUESTS[:1])


@pytest.mark.parametrize("method", ["int4", "mxfp4"])
def test_granites_stacks_are_rounded_while_loading(method: str, tmp_path: Path) -> None:
    """Again when new weights come wide; a rank of two has the numbers that one has."""
    torch.manual_seed(3)
    config = transformers.GraniteMoeConfig(**STACK)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    expected = tokens_alone(tmp_path, REQUESTS[:3], quantization=method)
    with LLM(str(tmp_path), quantization=method, **TWO_RANKS, **ROOMY) as llm:
        before = llm.checksum()
        llm.load_weights(tmp_path)
        assert llm.checksum() == before
        assert_outputs(run(llm, REQUESTS[:3]), REQUESTS[:3], expected)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "queries and keys": (
        {"q_proj": {"quant_algo": "FP8"}, "k_proj": {"quant_algo": "NVFP4"}, "v_proj": {"quant_algo": "FP8"}},
        r"='model.layers.0.self_attn.k_proj': must be held as all of model.layers.0.self_attn.k_proj, model.layers"),
    "queries alone": ({"q_proj": {"quant_algo": "FP8"}}, "='model.layers.0.self_attn.k_proj': must be held as all"),
    "a head": ({"lm_head": {"quant_algo": "FP8"}}, "quantized_layers: lm_head='FP8': must be NVFP4, or absent"),
    "another algorithm": ({"mlp": {"quant_algo": "W4A8_AWQ"}}, "quant_algo='W4A8_AWQ': must be one of NVFP4, "),
    "none": ({}, "quantized_layers={}: must be an object of objects"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_served_is_refused_by_name(case: str) -> None:
    by_module, message = BAD[case]
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": by_module}
    raw = transformers.Qwen3Config(**SHAPE, num_hidden_layers=2).to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    with pytest.raises(ValueError, match=message):
        parse_config({**raw, "quantization_config": quantization})


def test_two_groups_of_all_layers_are_refused() -> None:
    [group] = FORMATS["int8"].config["config_groups"].values()
    quantization = {**FORMATS["int8"].config, "config_groups": {"a": group, "b": {**group, "targets": ["x", "Linear"]}}}
    raw = transformers.Qwen3Config(**SHAPE, num_hidden_layers=2).to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    with pytest.raises(
        ValueError, match=r"config_groups=\['a', 'b'\]: must be groups of which one at most has the tar"
    ):
        parse_config({**raw, "quantization_config": quantization})
