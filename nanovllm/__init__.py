"""A small, exact, tensor-parallel inference engine for large language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanovllm.errors import (
    EngineAsleep,
    OutOfMemory,
    QueueFull,
    ReplicaError,
    StepTimeout,
    WeightsIncomplete,
    WorkerError,
)
from nanovllm.sampling_params import SamplingParams, StructuredOutput
from nanovllm.version import __version__

if TYPE_CHECKING:
    from nanovllm.adapters import LoRARequest
    from nanovllm.async_llm import AsyncLLM, TextDelta
    from nanovllm.llm import LLM
    from nanovllm.logprobs import Logprob
    from nanovllm.models.registry import register_model
    from nanovllm.outputs import CompletionOutput, RequestOutput, StepOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineAsleep",
    "LoRARequest",
    "Logprob",
    "OutOfMemory",
    "QueueFull",
    "ReplicaError",
    "RequestOutput",
    "SamplingParams",
    "StepOutput",
    "StepTimeout",
    "StructuredOutput",
    "TextDelta",
    "WeightsIncomplete",
    "WorkerError",
    "__version__",
    "register_model",
]


_ELSEWHERE = {
    "LLM": "nanovllm.llm",
    "AsyncLLM": "nanovllm.async_llm",
    "TextDelta": "nanovllm.async_llm",
    "LoRARequest": "nanovllm.adapters",
    "Logprob": "nanovllm.logprobs",
    **dict.fromkeys(("CompletionOutput", "RequestOutput", "StepOutput"), "nanovllm.outputs"),
    "register_model": "nanovllm.models.registry",
}
"""Modules that pull in much, by what is taken from them; the vocabulary above does not."""


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
