"""A layer's own code says what it is: nothing is written into it from outside after it is built."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes.process_checks import write_tiny_config
from torch import nn

from nanovllm import LLM, SamplingParams

ROOMS = ("nanovllm.layers", "nanovllm.models.decoder")


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_no_attribute_of_a_layer_is_assigned_outside_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    """From the start of an engine over its steps to its end."""
    found: set[tuple[str, str, str]] = set()
    seen: set[type] = set()
    assign = nn.Module.__setattr__

    def watched(module: nn.Module, name: str, value: Any) -> None:
        caller, kind = sys._getframe(1), type(module)
        if kind.__module__.startswith(ROOMS):
            seen.add(kind)
            if caller.f_locals.get("self") is not module:
                found.add((kind.__name__, name, caller.f_code.co_qualname))
        assign(module, name, value)

    monkeypatch.setattr(nn.Module, "__setattr__", watched)
    model = write_tiny_config(tmp_path, hidden_size=128, intermediate_size=128)
    options: dict[str, Any] = {"num_kvcache_blocks": 16, "max_model_len": 64, "skip_tokenizer_init": True}
    with LLM(model, load_format="dummy", device="cpu", quantization=quantization, **options) as llm:
        llm.generate([[1, 2, 3], [4]], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
        assert isinstance(llm.engine.executor.runner.model.embed_tokens.weight, torch.Tensor)
    assert len(seen) >= 8 and not found
