"""The part of an LLM that does not go on with a prompt: embeddings, and scores of documents."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nanovllm.engine.embeddings import pooling_of, stacked
from nanovllm.engine.inputs import GivenPrompt, as_batch, behind
from nanovllm.engine.protocol import Engine
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.reranking import paired

if TYPE_CHECKING:
    import numpy as np


class Embedding:
    """Base of LLM with the calls that `generate` is enough for."""

    engine: Engine
    generate: Callable[..., list[RequestOutput]]

    def embed(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        dimensions: int | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool = True,
    ) -> "np.ndarray":
        """Embeddings of prompts (texts or token ids), float32 [prompts, dimensions]; needs runner="pooling".

        `dimensions`: the first of each embedding, normalised anew; default: all. `prompt_name`: of the model's prompts,
        the one put before each text; default: the model's own default. Raises ValueError as `generate` does.
        """
        before = pooling_of(self.engine.model_config, dimensions).prompt(prompt_name)
        given = [behind(before, each) for each in as_batch(prompts)]
        outputs = self.generate(given, SamplingParams(max_tokens=0), use_tqdm)
        return stacked((output.pooled for output in outputs), dimensions, self.engine.model_config)

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], instruction: str | None = None,
        use_tqdm: bool = True,
    ) -> list[float]:  # fmt: skip
        """Relevance in [0, 1] of each document for its query, or for the only query, as Qwen3-Reranker judges it: the
        probability of "yes" against "no". `instruction`: what is asked of a document; default: the model card's.
        Raises ValueError as `generate` does."""
        reranker = self.engine.tokenizer.own.reranker
        params, pairs = reranker.params(self.engine.config.max_logprobs), paired(queries, documents)
        prompts: list[GivenPrompt] = [reranker.encode(*pair, instruction) for pair in pairs]
        outputs = self.generate(prompts, SamplingParams(**params), use_tqdm)
        found = [each[0] for output in outputs if (each := output.outputs[0].logprobs)]
        if len(found) < len(outputs):
            raise RuntimeError("score: a request was aborted")
        return [reranker.score({token_id: one.logprob for token_id, one in (each or {}).items()}) for each in found]
