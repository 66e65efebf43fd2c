"""A small, exact, tensor-parallel inference engine for large language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanovllm.errors import QueueFull, ReplicaError
from nanovllm.logprobs import Logprob
from nanovllm.outputs import CompletionOutput, RequestOutput, StepOutput
from nanovllm.sampling_params import SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from nanovllm.engine.control import WeightsIncomplete
    from nanovllm.executor.processes import WorkerError
    from nanovllm.llm import LLM
    from nanovllm.runner.device_io import StepTimeout

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
]


# These pull in much; the vocabulary above does not. Loading them on first use keeps `import nanovllm` instant.
_ON_FIRST_USE = {
    "LLM": "nanovllm.llm",
    "StepTimeout": "nanovllm.runner.device_io",
    "WeightsIncomplete": "nanovllm.engine.control",
    "WorkerError": "nanovllm.executor.processes",
}


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return getattr(import_module(_ON_FIRST_USE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
