"""Experts of 4 bits, kept packed: the tokens of the wide checkpoint that a packed one stands for, in a crowd, in
chunks, preempted, from the cache and on several ranks."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import FILE, change_tensors, read_json, spoil, write_json
from comparing import Expected
from family_cases import CASES as OF_TRANSFORMERS
from family_cases import GREEDY, OPTIONS, PROMPTS, make_model, save
from int4_checkpoints import is_quantized, quantize_folder, quantized, save_packed
from safetensors.torch import load_file, save_file
from test_int4_weights import SHAPE
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from workload import BLOCK, LONGEST, ROOMY, assert_outputs, make_requests, run, tokens_alone

from nanovllm import LLM, SamplingParams

REQUESTS = make_requests(most_tokens=10)
CHUNKS = {"num_kvcache_blocks": LONGEST // BLOCK, "disable": ("lookahead",), "max_num_batched_tokens": BLOCK}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 5, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 5, "intermediate_size": 160},
    "Glm4Moe": {"n_routed_experts": 5, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "use_qk_norm": True},
    "NemotronH": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "num_hidden_layers": 4,
        "mamba_num_heads": 16, "mamba_head_dim": 16, "n_groups": 4, "ssm_state_size": 32, "n_routed_experts": 5,
        "moe_shared_expert_intermediate_size": 192, "moe_latent_size": 64,
    },
}
CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "compressed-tensors on two ranks": ("Qwen3Moe", "compressed-tensors", 32, {"tensor_parallel_size": 2}),
    "awq in chunks": ("Qwen3Moe", "awq", 64, CHUNKS),
    "gptq": ("Qwen3Moe", "gptq", 32, {}),
    "names of Mixtral": ("Mixtral", "awq", 32, {}),
    "shared experts": ("Glm4Moe", "compressed-tensors", 0, {"tensor_parallel_size": 2}),
    "latent rows and no gates": ("NemotronH", "gptq", 32, {"tensor_parallel_size": 2}),
}


def save_experts(family: str, folder: Path, **more: Any) -> Path:
    shape = {**SHAPE, "vocab_size": 301, "num_hidden_layers": 2, "moe_intermediate_size": 160, **FAMILIES[family]}
    shape |= {"num_experts_per_tok": 2, "max_position_embeddings": 512, "initializer_range": 0.15}
    shape |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**{**shape, **more})
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "gptq")) for n in CASES])
def test_int4_experts_give_the_widened_checkpoints_tokens(name: str, tmp_path: Path) -> None:
    family, layout, group, options = CASES[name]
    wide = save_experts(family, tmp_path / "wide")
    matrices = quantize_folder(wide, group)
    assert sum(".experts." in path for path in matrices) >= 5 * 3
    folder = save_packed(wide, tmp_path / "packed", matrices, layout)
    expected = tokens_alone(wide, REQUESTS[:5])
    with LLM(str(folder), **{**ROOMY, **options}) as llm:
        assert_outputs(run(llm, REQUESTS[:5]), REQUESTS[:5], expected, name)
        assert_outputs(run(llm, REQUESTS[4::-1]), REQUESTS[4::-1], expected[::-1], (name, "later, from the cache"))


@pytest.mark.parametrize(
    ("name", "layout"), [("gemma4", "awq"), ("qwen3_5", "compressed-tensors"),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gemma4", "gptq"), ("qwen3_5", "awq")))],
)  # fmt: skip
def test_heads_of_two_sizes_and_recurrent_layers_in_int4(name: str, layout: str, tmp_path: Path) -> None:
    case = OF_TRANSFORMERS[name]
    case = replace(case, entries={**case.entries, "hidden_size": 64, "intermediate_size": 128})
    wide = save(make_model(case), case, tmp_path / "wide")
    packed = save_packed(wide, tmp_path / "packed", quantize_folder(wide, 32), layout)
    found = []
    for folder in (wide, packed):
        with LLM(str(folder), **OPTIONS) as llm:
            found.append([one.token_ids for _ in range(2) for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
    assert found[0] == found[1]


def test_int4_experts_made_while_loading(tmp_path: Path) -> None:
    wide = save_experts("Qwen3Moe", tmp_path / "wide")
    matrices = {
        name.removesuffix(".weight"): quantized(value.numpy(), 128, symmetric=True)
        for name, value in load_file(wide / FILE).items() if is_quantized(name)
    }  # fmt: skip
    packed = save_packed(wide, tmp_path / "packed", matrices, "compressed-tensors", symmetric=True)
    with LLM(str(wide), quantization="int4", **{**ROOMY, "dtype": "float16"}) as llm:
        made = llm.checksum()
    with LLM(str(packed), **{**ROOMY, "dtype": "float16"}) as llm:
        assert llm.checksum() == made


GPT_OSS: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 301, "max_position_embeddings": 512,
}  # fmt: skip
"""A width of whole groups of 32, which ranks cut at blocks of 128."""
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of one checkpoint: wide, and as gpt-oss is published."""
    case = OF_TRANSFORMERS["gpt_oss"]
    case = replace(case, entries={**case.entries, **GPT_OSS})
    model, packed, folder = make_model(case), {}, tmp_path_factory.mktemp("mxfp4")
    for name, experts in ((name, m) for name, m in model.named_modules() if name.endswith("mlp.experts")):
        for projection, rows, columns in (("gate_up_proj", 2 * 352, 64), ("down_proj", 64, 352)):
            blocks = torch.randint(0, 256, (5, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 126, (5, rows, columns // 32), dtype=torch.uint8)
            wide = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
            getattr(experts, projection).data = wide.float()
            packed |= {f"{name}.{projection}_blocks": blocks, f"{name}.{projection}_scales": scales}
    save(model, case, folder / "wide")
    shutil.copytree(folder / "wide", folder / "packed")
    config = read_json(folder / "wide" / "config.json")
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": names}
    write_json(folder / "packed" / "config.json", {**config, "quantization_config": quantization})
    tensors = load_file(folder / "wide" / FILE)
    others = {name: value for name, value in tensors.items() if name + "_blocks" not in packed}
    save_file(others | packed, folder / "packed" / FILE)
    return folder / "wide", folder / "packed"


@pytest.fixture(scope="module")
def of_gpt_oss(gpt_oss: tuple[Path, Path]) -> list[Expected]:
    """Texts of the first five requests by the wide checkpoint."""
    return tokens_alone(gpt_oss[0], REQUESTS[:5])


FOUR = pytest.param(4, {}, marks=pytest.mark.slow)


@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (1, CHUNKS), (2, {}), FOUR])
def test_mxfp4_experts_give_the_widened_checkpoints_tokens(
    gpt_oss: tuple[Path, Path], of_gpt_oss: list[Expected], ranks: int, options: dict[str, Any]
) -> None:
    (_, packed), expected, requests = gpt_oss, of_gpt_oss, REQUESTS[:5]
    with LLM(str(packed), tensor_parallel_size=ranks, **{**ROOMY, **options}) as llm:
        assert_outputs(run(llm, requests), requests, expected, ranks)
        before = llm.checksum()
        llm.load_weights(packed)
        assert llm.checksum() == before
        assert_outputs(run(llm, requests[::-1]), requests[::-1], expected[::-1], (ranks, "loaded anew"))


def test_no_bit_of_mxfp4_experts_depends_on_steps(gpt_oss: tuple[Path, Path]) -> None:
    """Rows alone, in a crowd, in chunks and preempted."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=0)
    prompts = [[(37 * i + 11 * length) % 301 for i in range(length)] for length in (1, 5, 40, 23)]
    found = []
    options: dict[str, Any] = {**ROOMY, "exact_bits": "batch", "dtype": "bfloat16", "enable_prefix_caching": False}
    for at_once, more in ((1, {}), (4, {}), (4, {"max_num_batched_tokens": 16}), (4, CHUNKS)):
        with LLM(str(gpt_oss[1]), **{**options, **more}) as llm:
            parts = [prompts[start : start + at_once] for start in range(0, 4, at_once)]
            outputs = [output for part in parts for output in llm.generate(part, params, use_tqdm=False)]
        found.append([(output.prompt_logprobs, output.outputs[0].logprobs) for output in outputs])
    assert all(each == found[0] for each in found[1:])


def test_new_mxfp4_experts_packed_or_wide(gpt_oss: tuple[Path, Path], tmp_path: Path) -> None:
    """Wide ones that are numbers of MXFP4 are rounded to themselves, here and while a wide checkpoint is loaded."""
    wide, packed = gpt_oss
    tensors = load_file(packed / FILE)
    name = f"{EXPERTS}.down_proj"
    with LLM(str(packed), **ROOMY) as llm:
        experts = llm.engine.executor.runner.model.layers[0].mlp.down.matrix
        held, before = experts.for_kernel().widened(2).clone(), llm.checksum()
        llm.begin_update(partial=True)
        llm.update([(f"{name}_scales", tensors[f"{name}_scales"] + 1)])
        llm.finish_update()
        assert torch.equal(experts.for_kernel().widened(2), 2 * held) and llm.checksum() != before
        llm.load_weights(tensors.items())
        assert llm.checksum() == before
        llm.load_weights(load_file(wide / FILE).items())
        assert torch.equal(experts.for_kernel().widened(2), held)
        rounded = llm.checksum()
        for tensor, message in (
            (tensors[f"{name}_scales"].float(), rf"{name}_scales' has type torch.float32: must be torch.uint8"),
            (tensors[f"{name}_scales"][:, 1:], rf"{name}_scales' has shape .*, the configuration needs \(5, 64, 11\)"),
            (tensors[f"{name}_scales"] * 0 + 129, rf"{name}_scales' holds the exponent 129: must be at most 128"),
        ):
            llm.begin_update(partial=True)
            with pytest.raises(ValueError, match=message):
                llm.update([(f"{name}_scales", tensor)])
            llm.finish_update()
        assert llm.checksum() == rounded
    with LLM(str(wide), quantization="mxfp4", **ROOMY) as llm:
        assert llm.checksum() == rounded


SPOILT_MXFP4: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "no scale": ("down_proj_scales", lambda t: None, rf"1 missing weight: {EXPERTS}.down_proj_scales"),
    "scales as numbers": ("down_proj_scales", lambda t: t.float(), r"down_proj_scales' has type torch.float32: must"),
    "a group less": ("down_proj_blocks", lambda t: t[:, :, 1:], r"down_proj_blocks' has shape \(5, 64, 10, 16\), the"),
    "an expert less": ("gate_up_proj_scales", lambda t: t[1:], r"gate_up_proj_scales' has shape \(4, 704, 2\), the"),
    "a scale of NaN": ("gate_up_proj_scales", lambda t: t * 0 + 255, r"gate_up_proj_scales' holds the exponent 255"),
}


@pytest.mark.parametrize("case", list(SPOILT_MXFP4))
def test_spoilt_mxfp4_is_refused_by_the_tensors_name(gpt_oss: tuple[Path, Path], tmp_path: Path, case: str) -> None:
    name, change, message = SPOILT_MXFP4[case]
    folder = Path(shutil.copytree(gpt_oss[1], tmp_path / "spoilt"))
    spoil(folder, f"{EXPERTS}.{name}", change)
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), **ROOMY)


def test_mxfp4_layers_whose_experts_are_named_stay_wide(
    gpt_oss: tuple[Path, Path], of_gpt_oss: list[Expected], tmp_path: Path
) -> None:
    wide, packed = gpt_oss
    folder = Path(shutil.copytree(packed, tmp_path / "mixed"))
    config, of_wide = read_json(folder / "config.json"), load_file(wide / FILE)
    config["quantization_config"]["modules_to_not_convert"].append("model.layers.0.mlp.experts")
    write_json(folder / "config.json", config)

    def widen_first(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(EXPERTS) and not name.endswith("bias")]:
            tensors.pop(name)
        tensors.update({name: value for name, value in of_wide.items() if name.startswith(EXPERTS)})

    change_tensors(folder, widen_first)
    with LLM(str(folder), **ROOMY) as llm:
        assert_outputs(run(llm, REQUESTS[:4]), REQUESTS[:4], of_gpt_oss[:4])
