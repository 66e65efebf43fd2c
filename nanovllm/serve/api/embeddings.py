"""POST /v1/embeddings: vectors of texts, by a server whose model has a pooling (--runner pooling)."""

from typing import Any

from nanovllm.model_config import Pooling
from nanovllm.serve import limits
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import fit
from nanovllm.serve.api.completions import as_list, token_ids_of
from nanovllm.serve.api.reading import read
from nanovllm.serve.errors import bad_request, refusing
from nanovllm.serve.http.call import Call
from nanovllm.serve.request import Prepared
from nanovllm.serve.served_model import ServedModel
from nanovllm.serve.text_pool import SHORT


def prepare(model: ServedModel, call: Call, body: dict[str, Any]) -> Prepared:
    """Checks and tokenizes a request. Raises ApiError."""
    fields = read(model, call, api.EmbeddingFields, body)
    given, size = as_list(fields.input, "input"), model.info["hidden_size"]
    if (asked := fields.dimensions or size) > size:
        raise bad_request(f"dimensions={asked}: must be in 1..{size}")
    if len(given) > limits.INPUTS:
        raise bad_request(f"input: {len(given)} texts, must be at most {limits.INPUTS}")
    if (total := len(given) * asked) > limits.EMBEDDINGS:
        raise bad_request(f"input: {len(given)} texts of {asked} numbers each are {total}, at most {limits.EMBEDDINGS}")
    with refusing():
        before = Pooling(**model.info["pooling"]).prompt(fields.prompt_name)
    texts = [before + each if isinstance(each, str) else each for each in given]
    ids = token_ids_of(model, texts, fields.add_special_tokens is not False, "input")
    cut, salt = fields.truncate_prompt_tokens, fields.cache_salt
    common = api.CommonFields(model=fields.model, truncate_prompt_tokens=cut, cache_salt=salt)
    prompts = [fit(model, each, common, 0, None, "input")[0] for each in ids]
    return Prepared(common, prompts, {}, [0] * len(prompts), given=fields)


def is_short(call: Call, body: dict[str, Any]) -> bool:
    """Whether there is little to tokenize."""
    return call.size <= SHORT
