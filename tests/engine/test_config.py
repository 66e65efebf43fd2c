"""Whatever a user can get wrong is refused with a message that names option, value and bound."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.config import OPTIMISATIONS, EngineConfig
from nanovllm.executor.resolve import resolve
from nanovllm.model_config import ModelConfig, RopeConfig
from nanovllm.models.published import PUBLISHED_SHAPES
from nanovllm.models.registry import parse_config, read_model_config, resolve_model_folder

SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "rope_theta": 5000.0, "tie_word_embeddings": True, "eos_token_id": 7,
}  # fmt: skip


def small(**changes: Any) -> dict[str, Any]:
    return {**SMALL, **changes}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in SMALL.items() if key != name}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    return tmp_path


# -- engine options -------------------------------------------------------------------------------------------------

AT_LEAST_1 = [
    "max_num_seqs", "max_num_batched_tokens", "max_num_partial_prefills", "max_long_partial_prefills",
    "max_model_len", "num_kvcache_blocks", "max_num_prefill_tokens_with_decodes", "max_queued_requests",
]  # fmt: skip
BOOLS = ["skip_tokenizer_init", "enable_prefix_caching", "enforce_eager"]
BAD_OPTIONS = [
    *[(name, value, "an integer >= 1") for name in AT_LEAST_1 for value in (0, -3, 1.5, "4", True)],
    *[(name, None, "an integer >= 1") for name in AT_LEAST_1[:4]],
    *[(name, value, "True or False") for name in BOOLS for value in ("yes", 1, None)],
    *[("tensor_parallel_size", value, "an integer in 1..8") for value in (0, 9, -1, 2.0, "2", True, None)],
    *[("seed", value, "an integer in 0..9223372036854775807") for value in (-1, 2**63, 0.5, None)],
    *[("long_prefill_token_threshold", value, "an integer >= 0") for value in (-1, 0.5, True)],
    *[("kvcache_block_size", value, "an integer >= 16") for value in (0, 8, -16, 16.0)],
    *[("kvcache_block_size", value, "a multiple of 16") for value in (17, 100)],
    *[("gpu_memory_utilization", v, "a number in (0, 1]") for v in (0, -0.1, 1.01, math.nan, math.inf, "0.9", None)],
    *[("cpu_kvcache_gib", value, "a finite number > 0") for value in (0, -1, math.nan, math.inf, "1", None)],
    *[("step_timeout", value, "a finite number > 0") for value in (0, -1, math.nan, math.inf, "60", None)],
    *[("device", value, "one of 'auto', 'cuda', 'cpu'") for value in ("gpu", "", None, 0)],
    *[("dtype", v, "one of 'auto', 'bfloat16', 'float16', 'float32'") for v in ("int8", "bf16", None)],
    *[("load_format", value, "one of 'auto', 'dummy'") for value in ("gguf", None)],
    *[("attention_backend", v, "one of 'auto', 'flash', 'triton', 'torch', 'flex'") for v in ("sdpa", "Flash", None)],
    *[("hf_overrides", value, "a dict of config.json entries") for value in (None, "{}", [("a", 1)])],
    *[("disable", value, "names of optimisations") for value in (None, 3, ["pdl", 3])],
    *[("model", value, "a path or hub id") for value in ("", None, 3)],
    *[(name, "/caf\udce9", "in UTF-8") for name in ("model", "tokenizer", "download_dir")],
]


@pytest.mark.parametrize(("option", "value", "bound"), BAD_OPTIONS)
def test_a_bad_option_is_refused_by_name_value_and_bound(option: str, value: Any, bound: str) -> None:
    with pytest.raises(ValueError) as error:
        EngineConfig(**{"model": "some/model", option: value})
    assert str(error.value) == f"{option}={value!r}: must be {bound}"


GOOD_OPTIONS = [
    *[(name, value) for name in AT_LEAST_1 for value in (1, 10**6)],
    *[(name, None) for name in AT_LEAST_1[4:]],
    *[(name, value) for name in BOOLS for value in (True, False)],
    *[("tensor_parallel_size", value) for value in range(1, 9)],
    *[("seed", value) for value in (0, 2**63 - 1)],
    *[("long_prefill_token_threshold", value) for value in (0, 1, None)],
    *[("kvcache_block_size", value) for value in (16, 48, 128, None)],
    *[("gpu_memory_utilization", value) for value in (0.01, 1, 1.0)],
    *[("step_timeout", value) for value in (0.5, 1)],
]


@pytest.mark.parametrize(("option", "value"), GOOD_OPTIONS)
def test_every_value_within_its_bound_is_taken(option: str, value: Any) -> None:
    assert getattr(EngineConfig.from_options("some/model", **{option: value}), option) == value


@pytest.mark.parametrize(
    ("option", "hint"),
    [("tensor_paralel_size", "; did you mean 'tensor_parallel_size'?"), ("max_seqs", "; did you mean"), ("zzz", "")],
)
def test_an_unknown_option_is_refused_with_the_nearest_known_one(option: str, hint: str) -> None:
    with pytest.raises(TypeError) as error:
        EngineConfig.from_options("some/model", **{option: 1})
    assert f"unknown option {option!r}{hint}" in str(error.value)


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ({"block_size": 32, "kv_cache_dtype": "fp8_e4m3"}, {"kvcache_block_size": 32, "kv_cache_dtype": "fp8"}),
        ({"tokenizer_mode": "auto", "pipeline_parallel_size": 1, "swap_space": 0, "trust_remote_code": False}, {}),
        ({"enable_sleep_mode": True, "dtype": "half"}, {"enable_sleep": True, "dtype": "float16"}),
        ({"dtype": torch.bfloat16, "max_num_seqs": None, "hf_overrides": None, "seed": None}, {"dtype": "bfloat16"}),
        ({"max_model_len": np.int64(8), "gpu_memory_utilization": np.float32(0.5)},
         {"max_model_len": 8, "gpu_memory_utilization": 0.5}),
    ],
)
def test_options_of_vllm_are_taken(given: dict[str, Any], known: dict[str, Any]) -> None:
    found, expected = EngineConfig.from_options("m", **given), EngineConfig("m", **known)
    assert found == expected and all(type(getattr(found, name)) is type(getattr(expected, name)) for name in known)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: not supported; use tensor_parallel_size"),
        ({"swap_space": 4}, "swap_space=4: not supported; KV is never swapped"),
        ({"trust_remote_code": True}, "trust_remote_code=True: not supported; code from a checkpoint is never run"),
        ({"block_size": 16, "kvcache_block_size": 32}, "block_size: is kvcache_block_size, which is given too"),
    ],
)
def test_options_of_vllm_that_mean_something_else_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig.from_options("m", **given)


def test_a_model_may_be_a_path() -> None:
    assert EngineConfig(Path("some") / "folder").model == str(Path("some") / "folder")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("threshold", "budget", "resolved"), [(None, 4096, 1024), (None, 1, 1), (0, 64, 0), (9, 64, 9)]
)
def test_the_long_prompt_threshold_follows_the_budget(threshold: int | None, budget: int, resolved: int) -> None:
    config = EngineConfig("m", long_prefill_token_threshold=threshold, max_num_batched_tokens=budget)
    assert config.long_prefill_threshold == resolved


# -- the model's configuration --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (without("architectures"), "architectures=None: must be exactly one architecture in config.json"),
        (small(architectures=["A", "B"]), "architectures=['A', 'B']: must be exactly one"),
        *[
            (without(name), f"config.json: {name!r} is missing")
            for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
        ],
        (small(vocab_size=0), "vocab_size=0: must be an integer >= 1"),
        (small(num_hidden_layers="2"), "num_hidden_layers='2': must be an integer >= 1"),
        (small(num_key_value_heads=4), "num_key_value_heads=4: must be a divisor of num_attention_heads=6"),
        (small(num_key_value_heads=-1), "num_key_value_heads=-1: must be an integer >= 1"),
        (small(head_dim=1.5), "head_dim=1.5: must be an integer >= 1"),
        (small(hidden_act="gelu"), "hidden_act='gelu': must be one of 'silu', 'gelu_pytorch_tanh', 'relu2'"),
        (small(mlp_bias=True), "mlp_bias=True: must be False or absent (others are not supported)"),
        (small(final_logit_softcapping=30.0), "final_logit_softcapping=30.0: must be absent"),
        (small(attention_bias="yes"), "attention_bias='yes': must be True or False"),
        (small(quantization_config={"quant_method": "x" * 300}), "x...: must be absent"),
        (small(layer_types=["full_attention"]), "layer_types=['full_attention']: must be 2 of 'full_attention' and "),
        (small(layer_types=["chunked_attention"] * 2), "layer_types=['chunked_attention', 'chunked_attention']: must"),
        (
            small(rope_scaling={"rope_type": "dynamic"}),
            "rope_type='dynamic': must be one of 'default', 'linear', 'yarn'",
        ),
        (small(rope_scaling={"rope_type": "yarn"}), "must be given a 'factor' for rope type 'yarn'"),
        (small(rope_scaling="yarn"), "rope_scaling='yarn': must be a dict"),
        (small(rope_scaling={"factor": 4.0}), "rope_type=None: must be one of 'default', 'linear'"),
        (small(rope_parameters={"rope_theta": 5e3, "mscale": 1.0}), "rope_type=None: must be one of 'default'"),
        (small(rope_scaling={"name": "yarn", "factor": 4.0}), "rope_scaling: 'name' is no entry of a rotary embedding"),
        (
            small(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embedding": 32}),
            "is no entry of a rotary embedding here; did you mean 'original_max_position_embeddings'?",
        ),
        (
            small(architectures=["Gemma3ForCausalLM"], rope_parameters={"rope_type": "linear", "factor": 4.0}),
            "must be a table for each of 'full_attention' and 'sliding_attention'",
        ),
        (small(rope_scaling={"type": "linear", "factor": "x"}), "factor='x': must be a finite number > 0"),
        (small(rope_scaling={"type": "linear", "factor": -1}), "factor=-1: must be a finite number > 0"),
        (small(rope_theta="x"), "rope_theta='x': must be"),
        (small(rms_norm_eps="x"), "rms_norm_eps='x': must be"),
        (small(tie_word_embeddings="x"), "tie_word_embeddings='x': must be"),
        (small(eos_token_id="x"), "eos_token_id='x': must be an integer in 0..99"),
        (small(eos_token_id=[1, 100]), "eos_token_id=100: must be an integer in 0..99"),
        (small(dtype="float8"), "dtype='float8': must be one of"),
        (small(head_dim=7), "head_dim=7: must be even"),
    ],
)
def test_a_bad_model_configuration_is_refused_by_name_value_and_bound(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_config(raw)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [({}, (7,)), ({"eos_token_id": 3}, (3,)), ({"eos_token_id": [3, 4]}, (3, 4)), ({"eos_token_id": 0}, (0,)),
     ({"eos_token_id": None}, (7,))],
)  # fmt: skip
def test_all_end_of_text_ids_of_the_generation_config_count(generation: dict, expected: tuple[int, ...]) -> None:
    assert parse_config(SMALL, generation).eos_token_ids == expected


def test_yarn_extends_the_context() -> None:
    """Qwen3's own recipe for long texts; where YaRN shortens nothing, the longer bound stays."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    raw = {**PUBLISHED_SHAPES["Qwen3-8B"], "rope_scaling": yarn}
    assert parse_config(raw).max_position_embeddings == 131072
    assert parse_config({**raw, "max_position_embeddings": 262144}).max_position_embeddings == 262144
    config = EngineConfig("Qwen3-8B", load_format="dummy", max_model_len=131072, device="cpu")
    assert resolve(config, parse_config(raw)).max_model_len == 131072


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_linear_scaling_extends_the_context(kind: str) -> None:
    raw = small(rope_scaling={kind: "linear", "factor": 4.0})
    assert parse_config(raw).max_position_embeddings == 4 * SMALL["max_position_embeddings"]
    extended_already = {**raw, "architectures": ["Gemma3ForCausalLM"]}
    assert parse_config(extended_already).max_position_embeddings == SMALL["max_position_embeddings"]


@pytest.mark.parametrize(("original", "usual"), [(64, 64), (None, 128), (256, 128)])
def test_a_context_under_longrope_is_the_original_one_unless_a_longer_one_is_asked_for(
    original: int | None, usual: int
) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    raw = small(rope_scaling={"type": "longrope", **factors}, original_max_position_embeddings=original)
    model = parse_config(raw)
    found = [
        resolve(EngineConfig("m", device="cpu", max_model_len=length), model).max_model_len for length in (None, 128)
    ]
    assert found == [usual, 128]


# -- files and overrides --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("newer", [False, True])
def test_overrides_win_whichever_spelling_the_checkpoint_has(folder: Path, newer: bool) -> None:
    raw = (
        {**without("rope_theta"), "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}} if newer else SMALL
    )
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}', encoding="utf-8")

    def read(**overrides: Any) -> ModelConfig:
        return read_model_config(EngineConfig(str(folder), hf_overrides=overrides))

    def rope(**overrides: Any) -> RopeConfig:
        return read(**overrides).ropes["full_attention"]

    assert rope() == RopeConfig(5000.0)
    assert rope(rope_scaling={"rope_type": "linear", "factor": 2.0}) == RopeConfig(5000.0, "linear", 2.0)
    assert rope(rope_theta=9.0) == RopeConfig(9.0)
    assert rope(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}).theta == 9.0
    assert read(eos_token_id=5).eos_token_ids == (5,)
    assert read(hidden_size=128).hidden_size == 128
    with pytest.raises(ValueError, match="vocab_size=0"):
        read(vocab_size=0)
    by_kind = {"rope_parameters": {"full_attention": {"rope_type": "default"}}}
    (folder / "config.json").write_text(json.dumps({**SMALL, **by_kind}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"hf_overrides=.*9\.0}: must be given rope_parameters"):
        read(rope_theta=9.0)


@pytest.mark.parametrize("model", ["no-such-folder", "./no/such", "/no/such", "a/b/c"])
def test_a_missing_folder_is_named(model: str) -> None:
    with pytest.raises(FileNotFoundError) as error:
        resolve_model_folder(EngineConfig(model))
    assert repr(model) in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "not valid JSON"), (b"\xff\xfe", "not valid JSON"), (b"[]", "expected a JSON object")],
)
def test_a_corrupt_config_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_model_config(EngineConfig(str(tmp_path)))
    assert message in str(error.value) and str(tmp_path / "config.json") in str(error.value)


def test_optimisations_are_disabled_by_name() -> None:
    assert EngineConfig("m").disable == () and all(EngineConfig("m").uses(name) for name in OPTIMISATIONS)
    lists = ["pdl", "lookahead", "pdl"], ("lookahead", "pdl"), {"pdl", "lookahead"}
    for given in (*lists, "pdl, lookahead", "lookahead,pdl", ("lookahead,pdl",)):  # the last: of a command line
        config = EngineConfig("m", disable=given)  # type: ignore[arg-type]
        assert config.disable == ("lookahead", "pdl")
        assert {name for name in OPTIMISATIONS if not config.uses(name)} == {"lookahead", "pdl"}
    with pytest.raises(ValueError, match=r"^disable='pld': must be one of 'fused_kernels', "):
        EngineConfig("m", disable=("pld",))
