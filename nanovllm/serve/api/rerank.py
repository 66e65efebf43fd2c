"""POST /v1/score and /rerank: how well documents fit queries, as a generating model judges them (text/reranking.py)."""

from typing import Any

import msgspec

from nanovllm.serve import limits
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import Prepared, answer, check_characters, fit
from nanovllm.serve.api.embeddings import WholeAnswer, aborted
from nanovllm.serve.api.logprobs import read_line
from nanovllm.serve.api.reading import read
from nanovllm.serve.errors import bad_request, refusing
from nanovllm.serve.front import Front
from nanovllm.serve.http.call import Call
from nanovllm.serve.served_model import ServedModel
from nanovllm.text.reranking import paired


class ScoreAnswer(WholeAnswer):
    """Scores in the order of the pairs, in vLLM's form."""

    id_prefix = "score-"

    def scores(self) -> list[float]:
        """Score of each pair. Raises ApiError."""
        found, reranker = [], self.front.model.tokenizer.reranker
        for each in self.completions:
            if not each.lines:
                raise aborted()
            line = read_line(each.lines[0], self.k or 0)
            found.append(reranker.score({line.token_id: line.value, **dict(line.top)}))
        return found

    def response(self) -> bytes:
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(self.scores())]
        return msgspec.json.encode({**self.common(), "data": data, "usage": self.usage()})


class RerankAnswer(ScoreAnswer):
    """Documents in the order of their scores, in the form that Jina's and Cohere's clients read."""

    id_prefix = "rerank-"
    given: api.RerankFields

    def response(self) -> bytes:
        results: list[dict[str, Any]] = []
        scores, texts = self.scores(), self.given.texts
        for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: self.given.top_n]:
            results.append({"index": index, "relevance_score": scores[index]})
            if self.given.return_documents is not False:
                results[-1]["document"] = {"text": texts[index]}
        return msgspec.json.encode({"id": self.id, "model": self.model, "results": results, "usage": self.usage()})


def _prepare(
    model: ServedModel, call: Call, fields: api.ScoreFields | api.RerankFields, pairs: list[tuple[str, str]], name: str
) -> Prepared:
    """Checks and tokenizes pairs of query and document; `name`: of the documents' field. Raises ApiError."""
    if len(pairs) > limits.COMPLETIONS:
        raise bad_request(f"{name}: {len(pairs)} pairs, must be at most {limits.COMPLETIONS}")
    sizes = [sum(map(len, (*pair, fields.instruction or ""))) for pair in pairs]
    check_characters(model, max(sizes), name)
    if (total := sum(sizes)) > limits.PROMPTS_TEXT:
        raise bad_request(f"{name}: pairs have {total} characters together, must be at most {limits.PROMPTS_TEXT}")
    common = api.CommonFields(model=fields.model, cache_salt=fields.cache_salt)
    with refusing():
        reranker = model.tokenizer.reranker
        ids = [reranker.encode(*pair, fields.instruction) for pair in pairs]
    prompts = [fit(model, each, common, 1, None, name)[0] for each in ids]
    return Prepared(common, prompts, reranker.params, [1] * len(prompts))


async def score(front: Front, call: Call) -> None:
    front.admission.admit(call.key)

    def work(body: dict[str, Any]) -> Prepared:
        fields = read(front.model, call, api.ScoreFields, body)
        with refusing():
            pairs = paired(fields.text_1, fields.text_2, "text_2")
        return _prepare(front.model, call, fields, pairs, "text_2")

    await call.receive()
    await answer(ScoreAnswer(front, call, await front.pool.read(call, work)))


async def rerank(front: Front, call: Call) -> None:
    front.admission.admit(call.key)

    def work(body: dict[str, Any]) -> tuple[Prepared, api.RerankFields]:
        fields = read(front.model, call, api.RerankFields, body)
        pairs = paired(fields.query, fields.texts)
        return _prepare(front.model, call, fields, pairs, "documents"), fields

    await call.receive()
    prepared, fields = await front.pool.read(call, work)
    request = RerankAnswer(front, call, prepared)
    request.given = fields
    await answer(request)
