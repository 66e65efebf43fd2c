"""POST /v1/completions."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from nanovllm.engine.prompt import Prompt
from nanovllm.serve import limits
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import check_characters, fit
from nanovllm.serve.api.reading import read
from nanovllm.serve.errors import bad_request, refusing
from nanovllm.serve.http.call import Call
from nanovllm.serve.request import Prepared
from nanovllm.serve.served_model import ServedModel
from nanovllm.serve.text_pool import SHORT

_DEFAULT_MAX_TOKENS = 16


def _prompts(model: ServedModel, fields: api.CompletionFields) -> list[list[int]]:
    """The prompts as token ids. Raises ApiError."""
    given = as_list(fields.prompt)
    count = len(given) * (fields.n or 1)  # n is checked by now
    if count > limits.COMPLETIONS:
        raise bad_request(f"prompt: prompts x n is {count}, must be at most {limits.COMPLETIONS}")
    return token_ids_of(model, given, fields.add_special_tokens is not False, "prompt")


def token_ids_of(model: ServedModel, given: list[Any], special: bool, name: str) -> list[list[int]]:
    """Texts and lists of token ids as the latter. Raises ApiError. `name`: of their field."""
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    check_characters(model, max(map(len, texts), default=0), name)
    if (total := sum(map(len, texts))) > limits.PROMPTS_TEXT:
        raise bad_request(f"{name}: texts have {total} characters together, must be at most {limits.PROMPTS_TEXT}")
    with refusing():  # without a tokenizer
        return [
            model.tokenizer.encode(prompt, special) if isinstance(prompt, str) else token_ids(model, prompt, name)
            for prompt in given
        ]


def token_ids(model: ServedModel, prompt: list[int], name: str = "prompt") -> list[int]:
    """A prompt that is ids. Raises ApiError."""
    vocab = model.info["vocab_size"]
    if max(prompt) >= vocab:
        raise bad_request(f"{name}: token ids must be in 0..{vocab - 1}")
    return prompt


def prepare(model: ServedModel, call: Call, body: dict[str, Any]) -> Prepared:
    """Checks and tokenizes a request; what its answer is made of. Raises ApiError."""
    fields = read(model, call, api.CompletionFields, body)
    asked = _DEFAULT_MAX_TOKENS if (most := api.max_tokens(fields)) is None else most
    if asked == 0 and not fields.echo:
        raise bad_request("max_tokens=0: must be >= 1, or come with echo=true")
    params = api.sampling_fields(fields, model.defaults, asked, fields.logprobs, api.structured(fields))
    if fields.echo and fields.logprobs is not None:
        params["prompt_logprobs"] = max(fields.logprobs, fields.prompt_logprobs or 0)
    given = _prompts(model, fields)
    prompts, counts = map(list, zip(*[fit(model, ids, fields, asked, fields.logprobs) for ids in given], strict=True))
    if fields.echo:
        prompts = [*map(partial(_with_text, model, fields), as_list(fields.prompt), prompts)]
    check_repeats(fields, prompts)
    _check_params(params, len(prompts))
    return Prepared(fields, prompts, params, counts)


def _check_params(params: dict[str, Any], num_prompts: int) -> None:
    """Raises ApiError where sampling fields take too much, which each prompt brings to an engine anew."""
    if num_prompts == 1:
        return
    size = len(msgspec.msgpack.encode(params))
    if size * num_prompts > limits.PARAMS_BYTES:
        what = f"{num_prompts} prompts with {size} bytes of sampling fields each are {num_prompts * size}"
        raise bad_request(f"prompt: {what}, at most {limits.PARAMS_BYTES} are taken; send fewer at once")


def check_repeats(fields: api.CompletionFields, prompts: Sequence[Prompt]) -> None:
    """Raises ApiError where all completions together repeat too much of their prompts."""
    texts = sum(len(prompt.text or "") for prompt in prompts) if fields.echo else 0
    ids = sum(map(len, prompts)) if fields.return_token_ids else 0
    for name, what, size, most in (
        ("echo", "characters", texts, limits.ECHO_TEXT), ("return_token_ids", "token ids", ids, limits.ECHO_IDS),
    ):  # fmt: skip
        if (total := (fields.n or 1) * size) > most:
            raise bad_request(f"{name}: {size} {what} of prompts, n={fields.n} times, is {total}, at most {most}")


def _with_text(model: ServedModel, fields: api.CompletionFields, given: Any, prompt: Prompt) -> Prompt:
    """A prompt with the text of its tokens, which may be fewer than were given."""
    whole = isinstance(given, str) and fields.truncate_prompt_tokens is None
    return replace(prompt, text=given if whole else model.tokenizer.decode(prompt.token_ids, False))


def is_short(call: Call, body: dict[str, Any]) -> bool:
    """Whether there is little to tokenize."""
    given = body.get("prompt")
    texts = [text for text in (given if isinstance(given, list) else [given]) if isinstance(text, str)]
    return not body.get("echo") and sum(map(len, texts)) <= SHORT


def as_list(given: Any, name: str = "prompt") -> list[Any]:
    """One prompt or several as several. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    kinds = {*map(type, given)}
    if int in kinds and len(kinds) > 1:
        raise bad_request(f"{name}: must be texts, or lists of token ids")
    return [given] if int in kinds else given
