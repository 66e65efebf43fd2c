"""POST /v1/score and /rerank: how well documents fit queries, as a generating model judges them (text/reranking.py)."""

from typing import Any

from nanovllm.serve import limits
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import check_characters, check_size, fit
from nanovllm.serve.api.reading import read
from nanovllm.serve.errors import ApiError, bad_request, refusing
from nanovllm.serve.http.call import Call
from nanovllm.serve.request import Prepared
from nanovllm.serve.served_model import ServedModel
from nanovllm.text.reranking import paired

_NAMES = {"queries": "text_1", "data_1": "text_1", "documents": "text_2", "items": "text_2", "data_2": "text_2"}
"""vLLM's other names of the texts of a score."""


def _encoded(model: ServedModel, fields: api.JudgedFields, query: str, document: str) -> list[int]:
    """Token ids of a pair's prompt. Its document ends where the prompt would be longer than what is asked for. Raises
    ApiError where its other parts are."""
    reranker, most = model.tokenizer.reranker, fields.truncate_prompt_tokens
    if fields.max_tokens_per_query:
        query = reranker.cut(query, fields.max_tokens_per_query)
    if fields.max_tokens_per_doc:
        document = reranker.cut(document, fields.max_tokens_per_doc)
    ids = reranker.encode(query, document, fields.instruction)
    most = model.info["max_model_len"] - 1 if most == -1 else most
    if most is not None and len(ids) > most:
        ids = reranker.encode(query, reranker.cut(document, most - len(ids)), fields.instruction)
        if len(ids) > most:
            raise bad_request(f"truncate_prompt_tokens={most}: must be >= {len(ids)}, which a prompt has by itself")
    return ids


def _prepare(model: ServedModel, fields: api.JudgedFields, pairs: list[tuple[str, str]], name: str) -> Prepared:
    """Checks and tokenizes pairs of query and document; `name`: of the documents' field. Raises ApiError."""
    if len(pairs) > limits.COMPLETIONS:
        raise bad_request(f"{name}: {len(pairs)} pairs, must be at most {limits.COMPLETIONS}")
    sizes = [sum(map(len, (*pair, fields.instruction or ""))) for pair in pairs]
    cuts = fields.max_tokens_per_query or fields.max_tokens_per_doc or fields.truncate_prompt_tokens is not None
    check_size(model, max(sizes), "characters", name) if cuts else check_characters(model, max(sizes), name)
    if (total := sum(sizes)) > limits.PROMPTS_TEXT:
        raise bad_request(f"{name}: pairs have {total} characters together, must be at most {limits.PROMPTS_TEXT}")
    common = api.CommonFields(model=fields.model, cache_salt=fields.cache_salt)
    with refusing():
        params = model.tokenizer.reranker.params(model.info["max_logprobs"])
        ids = [_encoded(model, fields, *pair) for pair in pairs]
    prompts = [fit(model, each, common, 1, None, name)[0] for each in ids]
    return Prepared(common, prompts, params, [1] * len(prompts), given=fields)


def prepare_score(model: ServedModel, call: Call, body: dict[str, Any]) -> Prepared:
    """Checks and tokenizes a request for scores. Raises ApiError."""
    given = {own: name for name, own in _NAMES.items() if name in body and own not in body}
    body = {_NAMES[name] if name in given.values() else name: value for name, value in body.items()}
    try:
        fields = read(model, call, api.ScoreFields, body)
        with refusing():
            pairs = paired(fields.text_1, fields.text_2, "text_2")
        return _prepare(model, fields, pairs, "text_2")
    except ApiError as error:
        error.rename(given)
        raise


def prepare_rerank(model: ServedModel, call: Call, body: dict[str, Any]) -> Prepared:
    """Checks and tokenizes a request for documents in order. Raises ApiError."""
    fields = read(model, call, api.RerankFields, body)
    return _prepare(model, fields, paired(fields.query, fields.texts), "documents")
