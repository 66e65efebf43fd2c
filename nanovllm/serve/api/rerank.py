"""POST /v1/score and /rerank: how well documents fit queries, as a generating model judges them (text/reranking.py)."""

from functools import partial
from typing import Any

from nanovllm.serve import limits
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import answer, check_characters, fit
from nanovllm.serve.api.reading import read
from nanovllm.serve.errors import bad_request, refusing
from nanovllm.serve.formats.tokens import RerankFormat, ScoreFormat
from nanovllm.serve.front import Front
from nanovllm.serve.http.call import Call
from nanovllm.serve.request import Prepared
from nanovllm.serve.served_model import ServedModel
from nanovllm.text.reranking import paired


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
    await answer(front, call, await front.pool.read(call, work), ScoreFormat)


async def rerank(front: Front, call: Call) -> None:
    front.admission.admit(call.key)

    def work(body: dict[str, Any]) -> tuple[Prepared, api.RerankFields]:
        fields = read(front.model, call, api.RerankFields, body)
        pairs = paired(fields.query, fields.texts)
        return _prepare(front.model, call, fields, pairs, "documents"), fields

    await call.receive()
    prepared, fields = await front.pool.read(call, work)
    await answer(front, call, prepared, partial(RerankFormat, given=fields))
