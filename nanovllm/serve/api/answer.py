"""Answers to requests: checked and tokenized, put in flight, and their responses sent."""

from collections.abc import Callable
from functools import partial
from typing import Any

from nanovllm.engine.prompt import Prompt
from nanovllm.serve import limits
from nanovllm.serve.api import fields as api
from nanovllm.serve.errors import ApiError, bad_request
from nanovllm.serve.formats.base import ChoicesFormat
from nanovllm.serve.front import Front
from nanovllm.serve.http.call import Call
from nanovllm.serve.request import Prepared, Request
from nanovllm.serve.served_model import ServedModel
from nanovllm.serve.text_pool import IsShort

Prepare = Callable[[ServedModel, Call, dict[str, Any]], Prepared]
"""Checks and tokenizes a request: (the model, the call, its body) -> what its answer is made of. Raises ApiError."""
MakeFormat = Callable[[ServedModel, Call, Prepared], ChoicesFormat]


async def serve(
    front: Front, call: Call, prepare: Prepare, make: MakeFormat, is_short: IsShort = lambda call, body: True
) -> Request:
    """Answers a call in the format that `make` makes. `is_short`: see TextPool.read. Raises ApiError as `answer`."""
    front.admission.admit(call.key)
    await call.receive()
    prepared = await front.pool.read(call, partial(prepare, front.model, call), is_short)
    return await answer(front, call, prepared, make)


async def answer(front: Front, call: Call, prepared: Prepared, make: MakeFormat) -> Request:
    """Sends a request to the engine, and its answer to the client in the format that `make` makes; returns it. Raises
    ApiError where more may be said about tokens than an answer holds, and as `Front.submit`."""
    most = 0 if prepared.fields.stream else sum(prepared.max_tokens)
    check_details(front.model.info["vocab_size"], prepared.params, prepared.prompts, most)
    form = make(front.model, call, prepared)
    request = Request(call, prepared, form, front.now())
    call.require_client()  # who may have left while the prompt was tokenized
    front.submit(request)
    try:
        await request.done
        if request.is_streamed and not request.has_left:
            call.end()
        elif not request.has_left:
            await call.respond(await front.pool.write(call, partial(form.whole, request), *form.size(request)))
    finally:
        front.book.leave(call)  # where it has not ended
        front.log.end_request(request)
    return request


def check_details(vocab: int, params: dict[str, Any], prompts: list[Prompt], max_tokens: int) -> None:
    """Raises ApiError where an answer may name more ids than it holds. `max_tokens`: of all prompts, kept up to its
    end."""
    n = params.get("n", 1)
    num_kept = min(top_k, vocab) if (top_k := params.get("top_k", 0)) > 0 else vocab
    for name, count, num_each, most in (
        ("prompt_logprobs", sum(map(len, prompts)), params.get("prompt_logprobs", -1) + 1, limits.PROMPT_LOGPROBS),
        ("logprobs", max_tokens, params.get("logprobs", -1) + 1, limits.LOGPROBS),
        ("sampling_mask", max_tokens, num_kept if params.get("sampling_mask") else 0, limits.MASK_IDS),
    ):
        if (total := n * count * num_each) > most:
            tokens = f"{count} {'prompt tokens' if name == 'prompt_logprobs' else 'tokens (max_tokens)'}"
            raise bad_request(f"{name}: {num_each} ids for each of {tokens}, n={n} times, is {total}, at most {most}")


def fit(
    model: ServedModel, token_ids: list[int], fields: api.CommonFields, asked: int | None, k: int | None,
    name: str = "prompt",
) -> tuple[Prompt, int]:  # fmt: skip
    """The prompt of these ids, cut where the request says so, and the most tokens that it can be continued by. Raises
    ApiError. `k`: likeliest ids of each token that the answer names, None where it names none. If no number of tokens
    is asked for, the most is as many as one answer may name them of. `name`: of the prompt's field, unless it is a
    chat."""
    limit = model.info["max_model_len"]
    if (keep := fields.truncate_prompt_tokens) is not None:
        if keep == 0:
            raise bad_request("truncate_prompt_tokens=0: must be -1 or >= 1")
        if keep == -1 and len(token_ids) + (asked != 0) > limit:  # an answer of one token would help nobody
            keep = limit - (limit // 4 if asked is None else min(asked, limit // 2))
        token_ids = token_ids[-keep:] if keep > 0 else token_ids
    if not token_ids:
        raise bad_request("the prompt is empty", name)
    if len(token_ids) + (asked != 0) > limit:
        more = "at least 1" if asked is None else asked
        what = f"{len(token_ids)} tokens in the prompt and asks for {more} in the completion"
        raise _too_long(limit, what, "messages" if isinstance(fields, api.ChatFields) else name, len(token_ids))
    room = limit - len(token_ids)
    if asked is None and k is not None and not fields.stream:
        asked = max(1, limits.LOGPROBS // ((k + 1) * (fields.n or 1)))
    prompt = Prompt.of(token_ids, fields.cache_salt, model.adapter_of(fields.model))
    return prompt, room if asked is None else min(asked, room)


def check_size(model: ServedModel, size: int, what: str, name: str) -> None:
    """Raises ApiError where `size` bytes or characters of `what` are more than the context is worth, before anything is
    made of them."""
    limit = model.info["max_model_len"]
    most = limits.TEXT_BYTES + limits.TEXT_BYTES_PER_TOKEN * limit
    if size > most:
        too_many = f"{size} {what}, at most {most} are taken"
        raise _too_long(limit, too_many, name, size // limits.TEXT_BYTES_PER_TOKEN)


def check_characters(model: ServedModel, count: int, name: str) -> None:
    """Raises ApiError where a text of so many characters cannot fit, before it is tokenized."""
    check_size(model, count, "characters", name)
    limit = model.info["max_model_len"]
    if count > limit * model.tokenizer.longest_token:
        what = f"{count} characters, which are more than {limit} tokens"
        raise _too_long(limit, what, name, count // model.tokenizer.longest_token)


def _too_long(limit: int, what: str, name: str, count: int) -> ApiError:
    """`count`: tokens of the prompt, at least."""
    text = f"This model's maximum context length is {limit} tokens. However, your request has {what}."
    error = bad_request(f"{text} Please reduce the length of the prompt.", name, "context_length_exceeded")
    error.excess = count, limit - 1
    return error
