"""POST /inference/v1/generate: token ids in, token ids out, as vLLM's endpoint for trainers; nothing is tokenized."""

from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import fit
from nanovllm.serve.api.completions import token_ids
from nanovllm.serve.api.reading import read
from nanovllm.serve.errors import bad_request
from nanovllm.serve.http.call import Call
from nanovllm.serve.request import Prepared
from nanovllm.serve.served_model import ServedModel

_FILTERS = ("temperature", "top_p", "top_k", "min_p")


def prepare(model: ServedModel, call: Call, body: dict[str, Any]) -> Prepared:
    """Checks a request; what its answer is made of. Raises ApiError."""
    given = read(model, call, api.GenerateFields, body)
    wanted = dict(given.sampling_params)
    masked = wanted.pop("sampling_mask", False)
    if masked is not False and (masked is not True or given.stream):
        raise bad_request("sampling_mask: must be true or false, and not with stream=true")
    names = ("model", "stream", "stream_options", "cache_salt", "priority", "return_token_ids")
    wanted |= {name: value for name in names if (value := getattr(given, name)) is not None}
    fields = read(model, call, api.CompletionFields, wanted | {"prompt": given.token_ids})
    if (asked := api.max_tokens(fields)) == 0:
        raise bad_request("max_tokens=0: must be >= 1", "sampling_params")
    prompt, room = fit(
        model, token_ids(model, given.token_ids, "token_ids"), fields, asked, fields.logprobs, "token_ids"
    )
    params = api.sampling_fields(fields, {}, asked, fields.logprobs, api.structured(fields))
    if masked:
        if not SamplingParams(**{name: params[name] for name in _FILTERS if name in params}).filters:
            raise bad_request("sampling_mask: needs top_p, top_k or min_p: all ids are kept")
        params["sampling_mask"] = True
    if given.request_id is not None:
        call.name(given.request_id)
    return Prepared(fields, [prompt], params, [room])
