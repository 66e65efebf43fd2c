"""A small, exact, tensor-parallel inference engine for large language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanovllm.errors import QueueFull, ReplicaError, StepTimeout, WeightsIncomplete, WorkerError
from nanovllm.logprobs import Logprob
from nanovllm.outputs import CompletionOutput, RequestOutput, StepOutput
from nanovllm.sampling_params import SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.models.registry import register_model

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "QueueFull",
    "ReplicaError",
    "RequestOutput",
    "SamplingParams",
    "StepOutput",
    "StepTimeout",
    "StructuredOutput",
    "WeightsIncomplete",
    "WorkerError",
    "__version__",
    "register_model",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # it pulls in much; the vocabulary above does not
        return import_module("nanovllm.llm").LLM
    if name == "register_model":
        return import_module("nanovllm.models.registry").register_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
