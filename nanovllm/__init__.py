"""nanovllm: a tensor-parallel LLM serving engine, exact and small enough to read in an afternoon."""

from typing import TYPE_CHECKING, Any

from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, StepOutput
from nanovllm.sampling_params import SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from nanovllm.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StepOutput",
    "StructuredOutput",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # LLM pulls in torch; the vocabulary above does not. Loading it on first use keeps `import nanovllm` instant.
    if name == "LLM":
        from nanovllm.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
