"""Judging of documents by a generating model: the yes/no form of Qwen3-Reranker (arXiv 2506.05176). No torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nanovllm.errors import refuse

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {{ instruction }}\n<Query>: {{ query }}\n<Document>: {{ document }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>{{ '\n\n' }}"
)
"""The prompt that the models were trained with."""


class Reranker:
    """Prompts that ask whether a document fits a query, and scores from the log-probabilities of the answer."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a CheckpointTokenizer. Raises ValueError where it has no single tokens for the two answers."""
        answers = [tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
        if any(len(ids) != 1 for ids in answers):
            raise ValueError("score: needs a tokenizer in which 'yes' and 'no' are one token each")
        [self._yes], [self._no] = answers
        self._tokenizer = tokenizer.with_template(_TEMPLATE)

    def params(self, max_logprobs: int) -> dict[str, Any]:
        """Fields of SamplingParams under which a model's answer is one of the two, with log-probabilities of both among
        themselves. Raises ValueError where the engine's `max_logprobs` allows fewer."""
        if 0 <= max_logprobs < 2:
            refuse("max_logprobs", max_logprobs, "-1 or at least 2 for scores")
        sampled = {"max_tokens": 1, "temperature": 0.0, "allowed_token_ids": [self._yes, self._no], "ignore_eos": True}
        return {**sampled, "logprobs": 2, "logprobs_mode": "processed", "detokenize": False}

    def encode(self, query: str, document: str, instruction: str | None = None) -> list[int]:
        """Token ids of the prompt; control tokens in the texts are plain text there."""
        texts = {"query": query, "document": document, "instruction": instruction or _INSTRUCTION}
        return self._tokenizer.encode_chat([{"role": "user", "content": ""}], chat_template_kwargs=texts)[1]

    def cut(self, text: str, most: int) -> str:
        """A text's first `most` tokens; below 0: all but its last ones. Half a character is left out."""
        beyond = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).offsets[most:]
        return text[: beyond[0][0]] if beyond else text

    def score(self, logprobs: Mapping[int, float]) -> float:
        """Probability of "yes", from log-probabilities by token id."""
        return math.exp(logprobs[self._yes])


def paired(
    queries: str | Sequence[str], documents: str | Sequence[str], name: str = "documents"
) -> list[tuple[str, str]]:  # fmt: skip
    """Each query with its document, or the only one with every document. Raises ValueError for what is no text and for
    other numbers, and names the documents as `name`."""
    left, right = _texts(queries, "queries"), _texts(documents, name)
    left = left * len(right) if len(left) == 1 else left
    if len(left) != len(right):
        raise ValueError(f"{name}: {len(right)} for {len(left)} queries: must be as many texts, or for one query")
    return list(zip(left, right, strict=True))


def _texts(given: Any, name: str) -> list[str]:
    texts = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping)) else [given]
    for text in texts:
        if not isinstance(text, str):
            refuse(name, text, "a text, or a list of texts")
    return texts
