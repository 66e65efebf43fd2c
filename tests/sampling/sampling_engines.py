"""The demo checkpoint, served; and the same model in transformers, to compare with."""

from functools import cache
from typing import Any

import torch

from nanovllm import LLM
from nanovllm.config import EngineConfig

DEMO = EngineConfig("demo").model
PROMPT = "Once upon a time"


class Engines:
    """Engines by their options, each started once."""

    def __init__(self) -> None:
        self._started: dict[str, LLM] = {}

    def get(self, **options: Any) -> LLM:
        key = repr(sorted(options.items()))
        if key not in self._started:
            common = {"num_kvcache_blocks": 256, "max_num_seqs": 64, "max_num_batched_tokens": 512, "device": "cpu"}
            self._started[key] = LLM(DEMO, **{**common, **options})
        return self._started[key]

    def close(self) -> None:
        for llm in self._started.values():
            llm.close()
        self._started.clear()


@cache
def reference_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def reference_logits(token_ids: list[int]) -> torch.Tensor:
    """float32 [tokens, vocab]."""
    with torch.inference_mode():
        return reference_model()(torch.tensor([token_ids])).logits[0].float().clone()
