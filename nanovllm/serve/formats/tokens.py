"""Formats of answers without text: token ids, embeddings, scores."""

import math
from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec

from nanovllm.serve.api import fields as api
from nanovllm.serve.errors import ApiError
from nanovllm.serve.formats import shapes
from nanovllm.serve.formats.base import ChoicesFormat
from nanovllm.serve.formats.logprobs import id_entries, read_line
from nanovllm.serve.request import Request, Row
from nanovllm.text.no_tokenizer import NoText


class TextlessFormat(ChoicesFormat):
    object_name = "list"

    def detokenizer(self, skip_special_tokens: bool, prompt: Sequence[int]) -> Any:
        return NoText()


class GenerateFormat(TextlessFormat):
    """/inference/v1/generate."""

    needs_ids = True

    def common(self) -> dict[str, Any]:
        return {"request_id": self.id}

    def chunk(self, row: Row, text: str) -> bytes:
        choice = self._choice(row)
        row.ids, row.lines = [], None if row.lines is None else []
        return self.event(choice, row)

    def _choice(self, row: Row) -> dict[str, Any]:
        logprobs = None if row.lines is None else {"content": id_entries(row.lines, self.k or 0)}
        found = {"index": row.index, "token_ids": row.ids or [], "logprobs": logprobs}
        found["finish_reason"] = self.finish_reason(row)
        if (end := row.end) is not None:
            versions = end.weight_versions or [(0, 0, row.num_tokens)]
            found["stop_reason"] = end.stop_reason
            found["weight_versions"] = [{"version": str(v), "start": begin, "end": end} for v, begin, end in versions]
        if self.params.get("sampling_mask"):
            found["sampling_mask"] = [shapes.written(memoryview(ids).cast("i").tolist()) for ids in row.kept]
        return found

    def whole(self, request: Request) -> bytes:
        about = {"request_id": self.id, "output_mode": "tokens", "created": self.created, "model": self.model}
        choices, of_prompt = [self._choice(row) for row in request.rows], self.of_prompt(request, 0)
        return msgspec.json.encode({**about, "choices": choices, "usage": self.usage(request), **of_prompt})


class EmbeddingFormat(TextlessFormat):
    """/v1/embeddings."""

    id_prefix = "embd-"
    given: api.EmbeddingFields

    def size(self, request: Request) -> tuple[int, int]:
        return sum(len(row.end.pooled or b"") for row in request.rows if row.end is not None), 0

    def whole(self, request: Request) -> bytes:
        data = []
        for row in request.rows:
            if row.end is None or row.end.pooled is None:
                raise _aborted()
            shown = self._shown(row.end.pooled)
            data.append({"object": "embedding", "index": row.index, "embedding": shapes.written(shown)})
        return msgspec.json.encode({**self.common(), "data": data, "usage": self.usage(request)})

    def _shown(self, vector: bytes) -> str | list[float]:
        """The vector, as bytes of float32, in the form that was asked for."""
        if (count := self.given.dimensions) is not None:
            numbers = array("f", vector[: 4 * count])
            if self.served.info["pooling"]["normalizes"]:
                norm = math.sqrt(math.fsum(number * number for number in numbers)) or 1.0
                numbers = array("f", [number / norm for number in numbers])
            vector = numbers.tobytes()
        if self.given.encoding_format == "base64":
            return b64encode(vector).decode()
        return array("f", vector).tolist()


class ScoreFormat(TextlessFormat):
    """/v1/score: scores in the order of the pairs, in vLLM's form."""

    id_prefix = "score-"

    def scores(self, request: Request) -> list[float]:
        """Score of each pair. Raises ApiError."""
        found, reranker = [], self.served.tokenizer.reranker
        for row in request.rows:
            if not row.lines:
                raise _aborted()
            line = read_line(row.lines[0], self.k or 0)
            found.append(reranker.score({line.token_id: line.value, **dict(line.top)}))
        return found

    def whole(self, request: Request) -> bytes:
        scores = enumerate(self.scores(request))
        data = [{"index": index, "object": "score", "score": score} for index, score in scores]
        return msgspec.json.encode({**self.common(), "data": data, "usage": self.usage(request)})


class RerankFormat(ScoreFormat):
    """/rerank: documents in the order of their scores, in the form that Jina's and Cohere's clients read."""

    id_prefix = "rerank-"
    given: api.RerankFields

    def whole(self, request: Request) -> bytes:
        results: list[dict[str, Any]] = []
        scores, texts = self.scores(request), self.given.texts
        for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: self.given.top_n]:
            results.append({"index": index, "relevance_score": scores[index]})
            if self.given.return_documents is not False:
                results[-1]["document"] = {"text": texts[index]}
        about = {"id": self.id, "model": self.model}
        return msgspec.json.encode({**about, "results": results, "usage": self.usage(request)})


def _aborted() -> ApiError:
    """Error of an answer that cannot be given: a part of it was aborted by a trainer or an administrator."""
    return ApiError(503, "the request was aborted", "request_aborted")
