"""A layer for multi-token prediction drafts what its published definition drafts, and texts stay the same."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.peft_files import CONFIG, random_tensors
from adapters.test_adapters import linears
from exactness.fp8_checkpoints import BLOCKS, quantize
from exactness.int4_checkpoints import quantize_folder, save_packed
from exactness.packed_formats import FORMATS, save_as
from mtp_layer import Layer, saved
from safetensors.torch import load_file, save_file
from test_eagle3 import K, Seen, watch
from test_speculation import draft_always, outputs, params

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.models.drafters import with_drafter
from nanovllm.models.registry import read_model_config

PROMPTS: list[list[int]] = [[(37 * i + 11) % 211 for i in range(50)], [5], [7, 3, 200, 9, 31, 77]]

@contextmanager
def engine(folder: Path, method: str | None, **options: Any) -> Iterator[LLM]:
    speculative = None if method is None else {"method": method, "num_speculative_tokens": K}
    sizes: dict[str, Any] = {"max_num_seqs": 8, "kvcache_block_size": 16, "max_model_len": 128}
    given = {"skip_tokenizer_init": True, "device": "cpu", "speculative_config": speculative, **sizes, **options}
    with LLM(str(folder), **given) as llm:
        yield llm


@torch.inference_mode()
def check(seen: list[Seen], texts: dict[int, list[int]], layer: Layer) -> None:
    num_full = 0
    streams = {seed: layer.target.model(torch.tensor([text])).last_hidden_state[0] for seed, text in texts.items()}
    for seed, length, last, drafts, taken in seen:
        text, hidden = texts[seed][: length + 1], streams[seed][:length]
        assert text[length:] == [last]
        count = K - drafts.count(-1)
        assert count >= min(K, -length % 16 + 1) and drafts[count:] == [-1] * (K - count), (seed, length)
        expected, row = layer.drafts(text[1:], hidden, K)
        torch.testing.assert_close(taken, row, rtol=1e-3, atol=1e-3)
        assert drafts[:count] == expected[:count], (seed, length)
        num_full += count == K
    assert num_full > len(seen) // 2


@pytest.mark.parametrize(
    ("family", "method", "options"),
    [
        ("glm4_moe", "glm4_moe_mtp", {"max_num_batched_tokens": 24}),
        pytest.param("glm4_moe", "mtp", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        ("glm4_moe_lite", "mtp", {"max_num_batched_tokens": 24}),
        ("deepseek_v3", "deepseek_mtp", {"tensor_parallel_size": 2}),
        pytest.param("qwen3_5", "mtp", {"max_num_batched_tokens": 24}, marks=pytest.mark.slow),
        ("qwen3_next", "qwen3_next_mtp", {"tensor_parallel_size": 2}),
        ("qwen3_5_moe", "qwen3_5_mtp", {"max_num_batched_tokens": 24}),
    ],
)  # fmt: skip
def test_drafts_are_those_of_the_definition_and_texts_those_without(
    family: str, method: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts in chunks, of rows that decode one ahead, and of hits."""
    draft_always(monkeypatch)
    layer, texts = saved(family, tmp_path), {}
    given = [params(temperature=0.0, seed=seed, max_tokens=12) for seed in range(3)]
    sampled = [params(temperature=0.8, seed=seed, max_tokens=20) for seed in range(3, 6)]
    with engine(tmp_path, None) as llm:
        expected = outputs(llm, PROMPTS * 2, [*given, *sampled], False)
    with engine(tmp_path, method, **options) as llm:
        seen = watch(llm)
        assert outputs(llm, PROMPTS, given, False) + outputs(llm, PROMPTS, sampled, False) == expected
        assert llm.stats().prefix_cache_hits > 30
    texts = {seed: PROMPTS[seed] + expected[seed][0] for seed in range(3)}
    check([one for one in seen if one[0] in texts and len(texts[one[0]]) > one[1]], texts, layer)


@pytest.mark.parametrize(
    ("family", "options"), [("glm4_moe", {"tensor_parallel_size": 2}), ("qwen3_5", {"max_num_batched_tokens": 24})]
)
def test_rows_with_adapters_keep_their_texts(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer drafts without them, and what is verified has them, in recurrent states too."""
    draft_always(monkeypatch)
    model, texts = saved(family, tmp_path).target, []
    made = [random_tensors(model, linears(model), CONFIG, seed) for seed in range(2)]
    given = [params(temperature=0.8, seed=seed, max_tokens=12) for seed in range(6)]
    for method in (None, "mtp"):
        with engine(tmp_path, method, enable_lora=True, max_loras=1, **options) as llm:
            loaded = [
                llm.load_adapter(str(n), tensors=tensors, config={**CONFIG, "target_modules": "all-linear"})
                for n, tensors in enumerate(made)
            ]
            found = llm.generate(PROMPTS * 2, given, use_tqdm=False, lora_request=[None, *loaded] * 2)
            texts.append([output.outputs[0].token_ids for output in found])
            assert method is None or llm.stats().spec_decode_num_draft_tokens > 0
    assert texts[0] == texts[1]


def drafts_of(folder: Path, **options: Any) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Texts of an engine, and what its layer drafts for them."""
    with engine(folder, "mtp", **options) as llm:
        seen = watch(llm)
        texts = outputs(llm, PROMPTS, [params(temperature=0.0, seed=seed) for seed in range(3)], False)
    return [one[0] for one in texts], sorted((*one[:3], tuple(one[3])) for one in seen)


OF_PACKING = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
"""Widths that groups of numbers divide."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "nvfp4")) for name in (*FORMATS, "awq", "gptq")]
)
def test_a_packed_layer_drafts_what_its_numbers_stand_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_always(monkeypatch)
    saved("glm4_moe", wide := tmp_path / "saved", **OF_PACKING)
    if name in FORMATS:
        packed, wide = save_as(name, wide, tmp_path)
    else:
        packed = save_packed(wide, tmp_path / "packed", quantize_folder(wide, 32), name)
    fc, file = "model.layers.4.eh_proj", packed / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(fc)}
    save_file({**tensors, f"{fc}.weight": load_file(wide / file.name)[f"{fc}.weight"]}, file)  # as published
    found, expected = drafts_of(packed), drafts_of(wide)
    assert found == expected and len(found[1]) > 20


def test_a_layer_over_latents_in_e4m3_drafts_as_with_their_projections_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_always(monkeypatch)
    saved("glm4_moe_lite", tmp_path / "saved", **OF_PACKING)
    packed = quantize(tmp_path / "saved", {**BLOCKS, "modules_to_not_convert": [".*eh_proj"]})
    found, file = drafts_of(packed), packed / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("kv_b_proj.weight")]:
        assert tensors[name].dtype == torch.float8_e4m3fn
        weight, scales = tensors[name].float(), tensors.pop(f"{name}_scale_inv").repeat_interleave(128, 0)
        tensors[name] = weight * scales[: len(weight)]  # of one block of columns
    save_file(tensors, file)
    assert drafts_of(packed) == found and len(found[1]) > 20


@pytest.mark.parametrize(("family", "quantization"), [("qwen3_5", "int4"), ("glm4_moe", "int4"), ("glm4_moe", "fp8")])
def test_a_layer_is_quantised_while_loading_as_those_of_the_model_are(
    family: str, quantization: str, tmp_path: Path
) -> None:
    """One with the tensors of the model's last layer with attention has its weights."""
    saved(family, tmp_path)
    tensors, file = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    number, prefix = (3, "model.layers.4.") if family == "glm4_moe" else (1, "mtp.layers.0.")
    of_model = {name: name.replace(prefix, f"model.layers.{number}.") for name in tensors if name.startswith(prefix)}
    same = {name: tensors[other].clone() for name, other in of_model.items() if other in tensors}
    save_file({**tensors, **same}, file)
    with engine(tmp_path, "mtp", quantization=quantization) as llm:
        runner: Any = llm.engine.executor.runner  # type: ignore[attr-defined]
        layers = runner.work.drafter.model.layer, runner.model.layers[number]
        ours, theirs = (each.state_dict() for each in layers)
    assert len(ours) > 6 and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_model_without_such_a_layer_is_refused_by_name(tmp_path: Path) -> None:
    def read(folder: str) -> None:
        config = EngineConfig(folder, speculative_config={"method": "mtp", "num_speculative_tokens": 1})
        with_drafter(config, read_model_config(config))

    with pytest.raises(ValueError, match="method='mtp': must be another for Qwen3ForCausalLM"):
        read("demo")
    saved("glm4_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "layers.4" not in name},
              tmp_path / "model.safetensors")  # fmt: skip
    with pytest.raises(ValueError, match="no tensor in the checkpoint is one of a layer that drafts"):
        read(str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 4
