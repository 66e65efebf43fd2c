"""The reader of adapters: what a module gets, and what is refused by its name."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.peft_files import CONFIG, save

from nanovllm.models.adapter_files import LoRAPair, check_finite, check_targets, is_target, modules_of, read_adapter

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.down_proj"


def pair(module: str, rank: int = 4, out: int = 6, columns: int = 8) -> dict[str, torch.Tensor]:
    name = f"base_model.model.{module}"
    return {f"{name}.lora_A.weight": torch.ones(rank, columns), f"{name}.lora_B.weight": torch.ones(out, rank)}


def modules_in(folder: Path, max_rank: int = 16) -> dict[str, LoRAPair]:
    return modules_of(read_adapter(folder), max_rank)


@pytest.mark.parametrize(
    ("changed", "rank", "scale"),
    [
        ({}, 4, 6 / 4),
        ({"use_rslora": True}, 4, 6 / 2),
        ({"rank_pattern": {"q_proj": 2}}, 2, 6 / 2),
        ({"rank_pattern": {"model.layers.0.self_attn.q_proj": 9, "q_proj": 2}, "use_rslora": True}, 9, 6 / 3),
        ({"alpha_pattern": {r"layers\.[0-3]\.self_attn\.q_proj": 20}}, 4, 20 / 4),
        ({"alpha_pattern": {"proj": 20, "_proj": 30}}, 4, 6 / 4),  # a name ends at a dot
    ],
)
def test_ranks_and_scales_are_each_modules_own(
    changed: dict[str, Any], rank: int, scale: float, tmp_path: Path
) -> None:
    a, b, own_scale = modules_in(save(tmp_path, pair(Q, rank), **changed))[Q]
    assert a.shape == (rank, 8) and torch.equal(own_scale * b, torch.full((6, rank), scale))


def test_a_digest_is_of_all_bytes(tmp_path: Path) -> None:
    made = [
        read_adapter(save(tmp_path / str(n), tensors, **changed)).digest
        for n, (tensors, changed) in enumerate(
            [(pair(Q), {}), (pair(Q), {}), (pair(DOWN), {}), (pair(Q), {"lora_alpha": 7})]
        )
    ]
    assert made[0] == made[1] and len({*made}) == 3


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"target_parameters": "experts.gate_up_proj"}, "target_parameters"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"something_of_tomorrow": 3}, "something_of_tomorrow"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 0}, "r=0"),
        ({"r": True}, "r=True"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"rank_pattern": {"q_proj": "two"}}, "r='two'"),
        ({"rank_pattern": [2]}, "rank_pattern"),
        ({"target_modules": 3}, "target_modules"),
        ({"target_modules": "(q_proj"}, "(q_proj"),
        ({"layers_to_transform": "0"}, "layers_to_transform"),
        ({"r": 8}, "rank 8"),
    ],
)
def test_a_field_that_is_not_served_is_refused_by_its_name(changed: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=name.replace("(", r"\(")):
        modules_in(save(tmp_path, pair(Q), **changed))


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ({f"base_model.model.{Q}.lora_B.weight": torch.ones(6, 3)}, r"\[6, 3\]"),
        ({f"base_model.model.{Q}.lora_B.weight": torch.ones(6, 4, dtype=torch.int8)}, "lora_B"),
        ({f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(6)}, "lora_magnitude_vector"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 8)}, "embed_tokens"),
        ({f"base_model.model.{DOWN}.lora_A.weight": torch.ones(4, 8)}, "has no lora_B"),
    ],
)
def test_tensors_that_are_no_adapter_are_refused_by_their_names(
    spoilt: dict[str, torch.Tensor], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        modules_in(save(tmp_path, pair(Q) | spoilt))


@pytest.mark.parametrize(
    ("half", "value", "said"), [("A", torch.nan, "NaN"), ("B", torch.inf, "infinity"), ("B", 60_000.0, "float16")]
)
def test_modules_with_other_than_numbers_are_named(half: str, value: float, said: str, tmp_path: Path) -> None:
    """60,000 times its scale is none in float16."""
    tensors = pair(Q) | pair(DOWN)
    tensors[f"base_model.model.{DOWN}.lora_{half}.weight"].view(-1)[3] = value
    check_finite(modules_in(save(tmp_path / "good", pair(Q))), torch.float16)
    with pytest.raises(ValueError, match=f"{DOWN}: lora_{half} .*{said}"):
        check_finite(modules_in(save(tmp_path, tensors)), torch.float16)


@pytest.mark.parametrize("padding", [0, 3])  # older writers did not pad the header
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_those_of_the_file(dtype: torch.dtype, padding: int, tmp_path: Path) -> None:
    tensors = {name: torch.randn(tensor.shape).to(dtype) for name, tensor in (pair(Q) | pair(DOWN)).items()}
    file = save(tmp_path, tensors) / "adapter_model.safetensors"
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:end] + b" " * padding
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])
    for module, (a, b, _) in modules_in(tmp_path).items():
        for half, found in (("A", a), ("B", b)):
            expected = tensors[f"base_model.model.{module}.lora_{half}.weight"]
            assert found.dtype == dtype and torch.equal(found, expected)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        read_adapter(tmp_path)
    save(tmp_path, pair(Q))
    with pytest.raises(ValueError, match="max_lora_rank=3"):
        modules_in(tmp_path, 3)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="corrupt"):
        read_adapter(tmp_path)
    save(tmp_path, pair(Q))
    os.truncate(tmp_path / "adapter_model.safetensors", (tmp_path / "adapter_model.safetensors").stat().st_size - 40)
    with pytest.raises(ValueError, match="corrupt"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"short")
    (tmp_path / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(ValueError, match="corrupt"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("config", "of_q", "of_down"),
    [
        ({"target_modules": ["q_proj"]}, True, False),
        ({"target_modules": ["proj", "mlp.down_proj"]}, False, True),
        ({"target_modules": r".*\.self_attn\.(q|k)_proj"}, True, False),
        ({"target_modules": "self_attn.q_proj"}, False, False),  # an expression is of the whole name
        ({"target_modules": None, "target_parameters": ["experts.down_proj"]}, False, False),
        ({"target_modules": "all-linear"}, True, True),
        ({"target_modules": "all-linear", "layers_to_transform": [11]}, False, True),
        ({"target_modules": ["q_proj", "down_proj"], "layers_to_transform": []}, True, True),
        ({"target_modules": [Q, "down_proj"], "layers_to_transform": [11]}, True, True),  # whole names count anyway
        ({"target_modules": "all-linear", "exclude_modules": ["down_proj"]}, True, False),
        ({"target_modules": ["q_proj", "down_proj"], "exclude_modules": r".*layers\.0\..*"}, False, True),
        ({"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 11}, False, True),
        ({"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0, 1]}, True, False),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"}, True, False),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["h"]}, False, False),
    ],
)
def test_targets_are_those_of_peft(config: dict[str, Any], of_q: bool, of_down: bool) -> None:
    assert [is_target(CONFIG | config, module) for module in (Q, DOWN)] == [of_q, of_down]


def test_an_adapter_has_the_modules_that_its_configuration_names() -> None:
    config = CONFIG | {"target_modules": ["q_proj"]}
    check_targets(config, [Q], [Q, DOWN])
    with pytest.raises(ValueError, match=f"{Q} has no lora_A"):
        check_targets(config, [], [Q, DOWN])
    with pytest.raises(ValueError, match=f"{DOWN} has an adapter"):
        check_targets(config, [Q, DOWN], [Q, DOWN])
    with pytest.raises(ValueError, match="lm_head: this model has no linear layer"):
        check_targets(config, [Q, "lm_head"], [Q, DOWN])
