"""Options and models that do not go with adapters are refused by name."""

from pathlib import Path
from typing import Any

import pytest
from adapters.test_adapters import LORA
from exactness import family_cases
from exactness.family_cases import CASES, make_model

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.executor.resolve import settle
from nanovllm.models.registry import read_model_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_cases.save(make_model(CASES["qwen3"]), CASES["qwen3"], tmp_path_factory.mktemp("qwen"))


def test_a_gpu_computes_no_exact_bits_with_adapters(folder: Path) -> None:
    config = EngineConfig(str(folder), device="cuda", enable_lora=True, exact_bits="batch")
    with pytest.raises(ValueError, match="exact_bits='batch': must be None with enable_lora;"):
        settle(config, read_model_config(config), (9, 0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"exact_bits": "tp"}, "exact_bits='tp'"),
        ({"model_impl": "transformers"}, "model_impl"),
        ({"max_lora_rank": 512}, "max_lora_rank=512"),
        ({"max_loras": 0}, "max_loras=0"),
        ({"fully_sharded_loras": True}, "fully_sharded_loras"),
    ],
)
def test_options_that_do_not_go_with_adapters(options: dict[str, Any], said: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=said):
        LLM(str(folder), **{**LORA, **options})
