"""`nanovllm plan` against engines on this GPU, with dummy weights: blocks within one in a hundred."""

import pytest
import torch

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.executor.resolve import settle
from nanovllm.models.registry import read_model_config
from nanovllm.runner.memory_plan import Gpu, plan_rank

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
MODELS = {
    "Qwen3-0.6B": {}, "Qwen3-8B": {}, "Qwen3-8B in fp8": {"quantization": "fp8"}, "Qwen3-30B-A3B": {}, "Gemma-2-9B": {},
    "gpt-oss-20b": {},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_those_of_an_engine(name: str) -> None:
    options = {**MODELS[name], "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda"}
    config = EngineConfig(name.partition(" ")[0], **options)  # type: ignore[arg-type]
    properties = torch.cuda.get_device_properties(0)
    gpu = Gpu("this", torch.cuda.mem_get_info()[1], properties.multi_processor_count)
    planned = plan_rank(settle(config, model := read_model_config(config)), model, gpu)
    with LLM(config.model, **options) as llm:
        info = llm.engine_info()
    seen = {key: info[f"{key}_gib"] for key in ("step", "graphs", "filters", "libraries", "taken")}
    assert planned.blocks == pytest.approx(info["num_kvcache_blocks"], rel=0.01), seen
