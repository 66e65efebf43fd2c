"""FP8 weights: logits against a float64 model, weights against transformers, and a request's tokens alone, in a crowd,
in chunks, from the cache, preempted and on two ranks."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from checkpoints import FILE, change_tensors, make_model, read_json, save, spoil, write_json
from comparing import Expected
from fp8_checkpoints import BLOCKS, CONFIGS, SHAPE, Definition, by_definition, compressed, quantize, quantized
from observing import LogitRecorder
from safetensors.torch import load_file, save_file
from workload import BLOCK, LONGEST, ROOMY, assert_outputs, make_requests, run, tokens_alone

from nanovllm import LLM, SamplingParams
from nanovllm.kernels import select_kernels
from nanovllm.layers.context import LayerContext
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.quantized import FP8Matrix
from nanovllm.model_config import Quantization
from nanovllm.models.registry import parse_config

REQUESTS = make_requests(most_tokens=10)[1::2]
FLIP = 0.02
"""Ranks add up in another order. That may round an activation to the next e4m3 number, which moves scores by about as
much as this, where it moves them by 1e-5 without FP8: closer choices are near ties."""
MODELS = ("blocks", "experts in blocks", "experts of other names", "while loading", "heads of two sizes")


def save_experts(family: str, folder: Path) -> None:
    shape = {**SHAPE, "vocab_size": 301, "num_hidden_layers": 2, "moe_intermediate_size": 160, "num_experts": 5}
    shape |= {"num_experts_per_tok": 2, "max_position_embeddings": 512, "initializer_range": 0.15}
    if family == "MiniMaxM2":
        shape |= {"intermediate_size": 160, "rotary_dim": 32, "num_local_experts": 5}
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**shape, bos_token_id=None, eos_token_id=None)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)


def save_gemma4(folder: Path) -> None:
    """Values are keys in the second layer."""
    shape = {**SHAPE, "vocab_size": 301, "num_hidden_layers": 2, "max_position_embeddings": 512, "global_head_dim": 128}
    shape |= {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0}
    shape |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512, "initializer_range": 0.15}
    torch.manual_seed(1)
    config = transformers.Gemma4TextConfig(**shape, bos_token_id=None, eos_token_id=None)
    transformers.Gemma4ForCausalLM(config).save_pretrained(folder)


def make_hybrid() -> Any:
    """A model with a gated delta net, whose gates stay wide, beside attention."""
    shape = {**SHAPE, "vocab_size": 301, "num_hidden_layers": 2, "max_position_embeddings": 512}
    shape |= {"layer_types": ["linear_attention", "full_attention"], "initializer_range": 0.15}
    shape |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
    torch.manual_seed(1)
    config = transformers.Qwen3_5TextConfig(**shape, linear_value_head_dim=64, bos_token_id=None, eos_token_id=None)
    return transformers.Qwen3_5ForCausalLM(config)


def make_glm() -> Any:
    """A model that rotates pairs of neighbours, and has gate and up as one."""
    shape = {**SHAPE, "vocab_size": 301, "num_hidden_layers": 2, "max_position_embeddings": 512}
    torch.manual_seed(1)
    config = transformers.GlmConfig(**shape, eos_token_id=7, pad_token_id=None, initializer_range=0.15)
    return transformers.GlmForCausalLM(config)


OF_GLM = CONFIGS["tensor, static"]


def checkpoint(kind: str, folder: Path) -> dict[str, Any]:
    """Options of an engine that serves one of MODELS or CONFIGS, make_hybrid() or make_glm()."""
    if kind == "glm":
        make_glm().save_pretrained(folder)
        return {"model": str(quantize(folder, OF_GLM))}
    if kind == "hybrid":
        make_hybrid().save_pretrained(folder)
        return {"model": str(folder), "quantization": "fp8"}
    if kind.startswith("experts"):
        save_experts("Qwen3Moe" if kind == "experts in blocks" else "MiniMaxM2", folder)
        return {"model": str(quantize(folder, BLOCKS))}
    if kind == "heads of two sizes":
        save_gemma4(folder)
        return {"model": str(quantize(folder, BLOCKS))}
    save(make_model(seed=3, **SHAPE), folder)
    if kind == "while loading":
        return {"model": str(folder), "quantization": "fp8"}
    return {"model": str(quantize(folder, CONFIGS[kind]))}


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in MODELS[3:]]


@pytest.fixture(scope="module", params=[*MODELS[:3], *SLOW])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return checkpoint(request.param, tmp_path_factory.mktemp("fp8"))


@pytest.fixture(scope="module")
def expected(model: dict[str, Any]) -> list[Expected]:
    return tokens_alone(requests=REQUESTS, **model)


def test_a_token_depends_on_its_request_alone(model: dict[str, Any], expected: list[Expected]) -> None:
    """Beside others, and again from the cache."""
    with LLM(**model, **ROOMY) as llm:
        assert_outputs(run(llm, REQUESTS), REQUESTS, expected)
        assert_outputs(run(llm, REQUESTS[::-1]), REQUESTS[::-1], expected[::-1])


def test_nor_on_chunks_preemption_and_ranks(model: dict[str, Any], expected: list[Expected]) -> None:
    tight = {"num_kvcache_blocks": LONGEST // BLOCK, "disable": ("lookahead",), "max_num_batched_tokens": BLOCK}
    surer = [replace(one, margins=[margin * 1e-3 / FLIP for margin in one.margins]) for one in expected]
    with LLM(**model, **{**ROOMY, **tight}, tensor_parallel_size=2) as llm:
        assert_outputs(run(llm, REQUESTS), REQUESTS, surer)


def error_of_logits(llm: LLM, wide: torch.nn.Module, *lengths: int) -> torch.Tensor:
    """Largest errors of an engine's logits for six tokens after prompts of these lengths, in deviations of `wide`'s."""
    recorder, params, errors = LogitRecorder(llm), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), []
    for length in lengths:
        prompt = [(7 * i + length) % 301 for i in range(length)]
        [output] = llm.generate([prompt], params, use_tqdm=False)
        with torch.no_grad():
            theirs = wide(torch.tensor([[*prompt, *output.token_ids]])).logits[0, length - 1 : -1]
        errors.append((recorder.of(output.request_id, length, 6) - theirs).abs().amax(1) / theirs.std(1))
    return torch.cat(errors)


@pytest.mark.parametrize("kind", [*CONFIGS, "while loading", "hybrid", "glm"])
def test_logits_are_those_of_the_definition_in_float64(kind: str, tmp_path: Path) -> None:
    """Up to roundings to e4m3 that go the other way, which are rare."""
    options = checkpoint(kind, tmp_path)
    model = {"hybrid": make_hybrid, "glm": make_glm}.get(kind, lambda: make_model(seed=3, **SHAPE))()
    wide = by_definition(model.double(), OF_GLM if kind == "glm" else CONFIGS.get(kind))
    with LLM(**options, **ROOMY) as llm:
        error = error_of_logits(llm, wide, 1, 15, 40)
    assert error.median() < 1e-4 and error.max() < 0.1, error


def test_a_head_in_fp8_is_that_of_the_definition(tmp_path: Path) -> None:
    """Beside wide layers; on two ranks, too, whose shares of the vocabulary cut a block."""
    options = {**SHAPE, "tie_word_embeddings": False, "vocab_size": 301}
    save(make_model(seed=3, **options), tmp_path)
    wide = make_model(seed=3, **options).double()
    wide.lm_head = Definition(wide.lm_head, None)
    with LLM(str(tmp_path), lm_head_dtype="fp8", **ROOMY) as llm:
        error, alone = error_of_logits(llm, wide, 15), run(llm, REQUESTS[:1])
        assert isinstance(llm.engine.executor.runner.model.lm_head.matrix, FP8Matrix)
    assert error.median() < 1e-4 and error.max() < 0.1, error
    with LLM(str(tmp_path), lm_head_dtype="fp8", tensor_parallel_size=2, **ROOMY) as llm:
        assert run(llm, REQUESTS[:1])[0].token_ids == alone[0].token_ids


def test_a_tied_head_is_not_quantised_by_itself(tmp_path: Path) -> None:
    save(make_model(seed=3, **SHAPE, tie_word_embeddings=True), tmp_path)
    with pytest.raises(ValueError, match=r"lm_head_dtype='fp8': must be 'auto' for Qwen3ForCausalLM"):
        LLM(str(tmp_path), lm_head_dtype="fp8", **ROOMY)


def test_new_weights_of_experts_may_come_wide_under_names_of_their_own(tmp_path: Path) -> None:
    """No scale is awaited then."""
    save_experts("MiniMaxM2", tmp_path)
    wide = load_file(tmp_path / FILE)
    with LLM(str(quantize(tmp_path, BLOCKS)), **ROOMY) as llm:
        before = run(llm, REQUESTS)
        llm.load_weights(wide.items())
        assert [output.token_ids for output in run(llm, REQUESTS)] == [output.token_ids for output in before]


@pytest.mark.parametrize(("family", "router"), [("MiniMaxM2", "block_sparse_moe.gate"), ("Qwen3Moe", "mlp.gate")])
def test_a_router_in_fp8_is_widened(family: str, router: str, tmp_path: Path) -> None:
    """Models have it in a wide type."""
    save_experts(family, tmp_path)
    names = [f"model.layers.{layer}.{router}.weight" for layer in (0, 1)]
    tensors = load_file(quantize(tmp_path, BLOCKS) / FILE)
    for name in names:
        tensors[name], tensors[f"{name}_scale_inv"] = quantized(tensors[name], BLOCKS)
    save_file(tensors, tmp_path / FILE)
    with LLM(str(tmp_path), **ROOMY) as llm:
        before = llm.checksum()
        for name in names:
            scales = tensors.pop(f"{name}_scale_inv").repeat_interleave(128, 1)[:, : tensors[name].shape[1]]
            tensors[name] = tensors[name].float() * scales
        llm.load_weights(tensors.items())
        assert llm.checksum() == before


def test_weights_are_those_that_transformers_loads(tmp_path: Path) -> None:
    """It widens them where there is no GPU. Its activations are wide then: logits are close, not equal."""
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    shape = {**SHAPE, "hidden_size": 256, "intermediate_size": 384}  # it asks for whole blocks
    folder = quantize(save(make_model(seed=3, **shape), tmp_path), BLOCKS)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with LLM(str(folder), **ROOMY) as llm:
        layer, reference = llm.engine.executor.runner.model.layers[1], theirs.model.layers[1]
        attention, mlp = reference.self_attn, reference.mlp
        pairs: list[tuple[FP8Matrix, list[Any]]] = [
            (layer.self_attn.qkv_proj.matrix, [attention.q_proj, attention.k_proj, attention.v_proj]),
            (layer.self_attn.o_proj.matrix, [attention.o_proj]),
            (layer.mlp.gate_up_proj.matrix, [mlp.gate_proj, mlp.up_proj]),
            (layer.mlp.down_proj.matrix, [mlp.down_proj]),
        ]
        for ours, modules in pairs:
            scale = ours.scale.repeat_interleave(ours.rows_each, 0).repeat_interleave(128, 1)
            assert torch.equal(ours.weight.float() * scale, torch.cat([module.weight for module in modules]))


# -- what a checkpoint must be --------------------------------------------------------------------------------------

NAME = "model.layers.1.mlp.down_proj.weight"
SCALE, SHOWN = f"{NAME}_scale_inv", f"{NAME}_scale"


def at_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda scale: torch.cat([torch.tensor([value]), scale.flatten()[1:]]).view(scale.shape)


SPOILT: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "missing": (SCALE, lambda scale: None, f"1 missing weight: {SHOWN}$"),
    "shape": (SCALE, lambda scale: scale[:1], rf"{SHOWN}' has shape \(1, 3\), .* needs \(2, 3\)"),
    "zero": (SCALE, at_first(0.0), f"{SHOWN}' holds 0.0: scales must be finite and > 0"),
    "nan": (SCALE, at_first(float("nan")), f"{SHOWN}' holds nan"),
    "negative": (SCALE, at_first(-1.0), f"{SHOWN}' holds -1.0"),
    "e5m2": (NAME, lambda weight: weight.to(torch.float8_e5m2), f"{NAME}' has type F8_E5M2"),
    "wide": (NAME, lambda weight: weight.float(), f"{NAME}' has type torch.float32.*must be of type .*e4m3"),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(save(make_model(seed=3, **SHAPE), tmp_path_factory.mktemp("intact")), BLOCKS)


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "copy"))


@pytest.mark.parametrize("kind", list(SPOILT))
def test_a_spoilt_checkpoint_is_refused_by_name(kind: str, folder: Path) -> None:
    name, change, message = SPOILT[kind]
    spoil(folder, name, change)
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), **ROOMY).close()


def test_fp8_weights_need_a_configuration_that_says_so(folder: Path) -> None:
    config = read_json(folder / "config.json")
    del config["quantization_config"]
    write_json(folder / "config.json", config)
    change_tensors(folder, lambda tensors: [tensors.pop(name) for name in [*tensors] if name.endswith("scale_inv")])
    with pytest.raises(ValueError, match=r"has type torch.float8_e4m3fn: a quantization_config that says so"):
        LLM(str(folder), **ROOMY).close()


def test_scales_of_keys_and_values_are_left_aside(tmp_path: Path) -> None:
    """Of every kind of checkpoint, under the names that tools have given them."""
    of_layer = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale", "k_proj.k_scale", "v_proj.output_scale")
    names = [f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in of_layer]
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    for kind in ("blocks", "channels", None):
        folder = save(make_model(seed=3, **SHAPE), tmp_path / f"{kind}")
        if kind is not None:
            quantize(folder, CONFIGS[kind])
            raw = read_json(folder / "config.json")
            quantization = {**raw["quantization_config"], "kv_cache_scheme": scheme}
            write_json(folder / "config.json", {**raw, "quantization_config": quantization})
        sums = []
        for scale in ({}, {name: torch.tensor(0.5) for name in names}):
            change_tensors(folder, lambda tensors, more=scale: tensors.update(more))
            with LLM(str(folder), **ROOMY) as llm:
                sums.append(llm.checksum())
        assert sums[0] == sums[1], kind


def test_a_configuration_under_its_older_name_is_read(intact: Path) -> None:
    raw = read_json(intact / "config.json")
    older = {**raw, "compression_config": compressed("channel"), "quantization_config": None}
    newer = {**raw, "quantization_config": compressed("channel")}
    assert parse_config(older) == parse_config(newer)


@pytest.mark.parametrize("size", [None, 128])
def test_a_group_of_modelopt_counts_where_there_are_groups(intact: Path, size: int | None) -> None:
    raw = read_json(intact / "config.json")
    plain = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    read = [parse_config({**raw, "quantization_config": one}) for one in (plain, {**plain, "group_size": size})]
    assert read[0] == read[1]


REFUSED = [
    ({**BLOCKS, "fmt": "e5m2"}, "fmt='e5m2': must be one of 'e4m3', 'float8_e4m3fn'"),
    ({**BLOCKS, "scale_fmt": "ue4m3"}, "scale_fmt='ue4m3'"),
    ({**BLOCKS, "weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
    ({**BLOCKS, "activation_scheme": "later"}, "activation_scheme='later'"),
    ({**BLOCKS, "modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]}, "q_proj'.*which are one matrix here"),
    ({"quant_method": "bitsandbytes"}, "quantization_config=.*must be absent, or with quant_method"),
    ({**compressed("channel"), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ({**compressed("channel"), "transform_config": {"config_groups": {"R4": {}}}}, "transform_config"),
    ({**compressed("channel"), "config_groups": {"g": {"output_activations": {"num_bits": 8}}}}, "output_activations"),
    ({"quant_method": ["fp8"]}, "quantization_config=.*must be absent, or with quant_method"),
    ({**compressed("channel"), "config_groups": {}}, "config_groups={}: must be groups, an object"),
    ({**compressed("channel"), "config_groups": {"FP8": ["Linear"]}}, r"config_groups={'FP8': .*: must be groups, an"),
    ({**compressed("channel"), "config_groups": {"FP8": {"weights": "e4m3"}}}, "weights='e4m3': must be an object"),
    ({**compressed("channel"), "ignore": ["re:("]}, r"\['re:\('\]: must be paths, or patterns"),
    (compressed("group"), "weights.strategy='group'"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    raw = make_model(**SHAPE).config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    with pytest.raises(ValueError, match=message):
        parse_config({**raw, "quantization_config": config})


def test_what_others_own_is_not_quantised(intact: Path) -> None:
    """A live module's parameters are shared, and transformers computes with its own."""
    with pytest.raises(ValueError, match="quantization='fp8': must be None for a live module"):
        LLM.from_module(make_model(**SHAPE), skip_tokenizer_init=True, quantization="fp8")
    with pytest.raises(ValueError, match="quantization='fp8': must be None where transformers"):
        LLM(str(intact), **ROOMY, quantization="fp8", model_impl="transformers")


def test_ranks_that_would_cut_a_group_of_columns_are_refused() -> None:
    """The output projection of heads of 64; a width is padded instead."""
    group: Any = SimpleNamespace(rank=1, size=4, width_multiple=1)
    context = LayerContext(group, select_kernels("cpu"), torch.float32, torch.device("cpu"))
    layer = (context, 256, 192)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=4: o: 64 of 256 inputs.* must be a multiple of 128"):
        RowParallelLinear(*layer, name="o", pads=False, precision=Quantization())
    padded = RowParallelLinear(*layer, precision=Quantization(scales="block", while_loading=True))
    assert padded.matrix.weight.shape == (192, 128)
    group.rank = 3  # has nothing of 200 or 256 inputs in shares of 128
    RowParallelLinear(context, 200, 192, precision=padded.matrix.quantization)
    [weight] = RowParallelLinear(*layer, precision=padded.matrix.quantization).checkpoint_weights("o")
    weight.load(torch.randn(192, 256))
    outputs = {"gate_proj": 256, "up_proj": 256}
    columns = MergedColumnParallelLinear(context, 64, outputs, precision=padded.matrix.quantization)
    for weight in columns.checkpoint_weights("m"):
        weight.load(torch.randn(256, 64))
    assert not columns.matrix.weight.float().any()


@pytest.mark.parametrize("kind", ["blocks", pytest.param("while loading", marks=pytest.mark.slow)])
def test_new_wide_weights_are_quantised_as_at_load(kind: str, tmp_path: Path) -> None:
    """The engine is then the one that starts with them, by its tokens and its checksums; on two ranks too."""
    old, new = checkpoint(kind, tmp_path / "old"), make_model(seed=8, **SHAPE)
    options = {**ROOMY, "num_kvcache_blocks": 16, "max_num_seqs": 4}
    fresh = {**old, "model": str(save(new, tmp_path / "new"))}
    wide = load_file(tmp_path / "new" / FILE)
    if kind == "blocks":
        quantize(tmp_path / "new", BLOCKS)
    greedy = SamplingParams(temperature=0, max_tokens=8), False
    with LLM(**fresh, **options) as llm:
        want, sums = llm.generate([[1, 2, 3]], *greedy), llm.checksum()
    with LLM(**old, **options, tensor_parallel_size=2) as llm:
        assert llm.checksum() != sums
        llm.load_weights(wide.items())
        assert llm.checksum() == sums
        assert llm.generate([[1, 2, 3]], *greedy)[0].token_ids == want[0].token_ids
        if kind == "blocks":
            name = "model.layers.0.mlp.up_proj.weight"
            values, scale = quantized(wide[name], BLOCKS)
            llm.load_weights([*({**wide, name: values}.items()), (f"{name}_scale_inv", scale)])
            assert llm.checksum() == sums
