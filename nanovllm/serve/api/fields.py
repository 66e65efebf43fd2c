"""The fields of chat and completion requests, and what they ask of the engine. Null means absent."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from nanovllm.sampling_params import SamplingParams, StructuredOutput
from nanovllm.serve.errors import bad_request, from_value_error
from nanovllm.serve.limits import LOGPROBS


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CommonFields(msgspec.Struct, kw_only=True):
    """What /v1/chat/completions and /v1/completions share."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


class ChatFields(CommonFields, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionFields(CommonFields, kw_only=True):
    prompt: Any
    max_completion_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None


_IGNORED = frozenset(
    (
        *("request_id", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "verbosity", "prediction", "best_of", "moderation"),
    )
)
_UNSUPPORTED = ("suffix", "use_beam_search", "functions", "audio", "prompt_embeds", "web_search_options")
_NAMES: dict[type, frozenset[str]] = {
    kind: frozenset(kind.__struct_fields__) | _IGNORED | {*_UNSUPPORTED, "modalities", "function_call"}
    for kind in (ChatFields, CompletionFields)
}
Fields = TypeVar("Fields", ChatFields, CompletionFields)


def read(kind: type[Fields], body: dict[str, Any], strict: bool) -> tuple[Fields, list[str]]:
    """A request's fields, and the names of those that mean nothing here. Raises ApiError (400) naming field, value
    and bound. `strict`: unknown fields are an error."""
    unknown = sorted(name[:100] for name in body.keys() - _NAMES[kind])
    if unknown and strict:
        raise bad_request(f"{unknown[0]}: unknown field (--strict-fields)", unknown[0], "unknown_field")
    _refuse_unsupported(body)
    try:
        fields = msgspec.convert({name: value for name, value in body.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        raise type_error(body, str(error)) from None
    _check(fields)
    return fields, unknown


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if body.get(name):
            raise bad_request(f"{name}: not supported", name, "unsupported_field")
    modalities = body.get("modalities")
    if modalities and (not isinstance(modalities, list) or any(one != "text" for one in modalities)):
        raise bad_request("modalities: only text is supported", "modalities", "unsupported_field")
    best_of = body.get("best_of")
    if best_of is not None and best_of != (body.get("n") or 1):
        raise bad_request("best_of: must be n; sampling more is not supported", "best_of", "unsupported_field")


def type_error(body: dict[str, Any], text: str) -> Exception:
    """msgspec's message in our words: the field, what it must be, what it is."""
    if text.startswith("Object missing required field"):
        name = text.split("`")[1]
        return bad_request(f"{name}: is required", name, "missing_required_parameter")
    what, _, where = text.partition(" - at `$.")
    path = where.rstrip("`")
    name = path.partition("[")[0].partition(".")[0]
    value = repr(body.get(name))
    shown = value if len(value) <= 100 else value[:97] + "..."
    wanted = what.removeprefix("Expected ").replace("`", "").replace(" | null", "")
    return bad_request(f"{path}={shown}: must be {wanted}", name or None, "invalid_type")


def _check(fields: CommonFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options: only with stream=true", "stream_options")
    if fields.prompt_logprobs is not None and fields.stream:
        raise bad_request("prompt_logprobs: not with stream=true", "prompt_logprobs")
    if fields.priority:
        raise bad_request(f"priority={fields.priority}: must be 0; there are no others yet", "priority")
    if fields.truncate_prompt_tokens is not None and fields.truncate_prompt_tokens < -1:
        raise bad_request(f"truncate_prompt_tokens={fields.truncate_prompt_tokens}: must be >= -1")


_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "stop"),
    *("stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias", "prompt_logprobs", "cache_salt"),
)


def sampling_fields(
    fields: CommonFields,
    defaults: Mapping[str, Any],
    max_tokens: int,
    logprobs: int | None,
    structured: StructuredOutput | None,
) -> dict[str, Any]:
    """Fields of SamplingParams, those that are given. `defaults`: the server's, for what the request leaves open.
    Raises ApiError (400) as SamplingParams does."""
    found = dict(defaults)
    for name in _SAMPLING:
        if (value := getattr(fields, name)) is not None and value != []:
            found[name] = value
    found["max_tokens"] = max_tokens
    if logprobs is not None:
        found["logprobs"] = logprobs
    for name in ("logprobs", "prompt_logprobs"):
        if not 0 <= found.get(name, 0) <= LOGPROBS:
            raise bad_request(f"{name}={found[name]}: must be in 0..{LOGPROBS}", name)
    try:
        SamplingParams(**found, structured_outputs=structured)
    except (ValueError, TypeError) as error:
        raise from_value_error(str(error)) from None
    if structured is not None:
        found["structured_outputs"] = as_fields(structured)
    return found


def as_fields(wanted: StructuredOutput) -> dict[str, Any]:
    """A constraint as it travels to the engine."""
    return {name: value for name in _KINDS if (value := getattr(wanted, name)) not in (None, False)}


_KINDS = ("json", "regex", "choice", "grammar", "json_object")


def structured(fields: CommonFields) -> StructuredOutput | None:
    """The one constraint that a request asks for. Raises ApiError (400)."""
    found: dict[str, dict[str, Any]] = {}
    if (form := fields.response_format) is not None and (wanted := _response_format(form)) is not None:
        found["response_format"] = wanted
    if (given := fields.structured_outputs) is not None:
        kinds = {name: given[name] for name in _KINDS if given.get(name) not in (None, False)}
        if len(kinds) != 1:
            one_of = ", ".join(_KINDS)
            raise bad_request(f"structured_outputs: must hold exactly one of {one_of}", "structured_outputs")
        found["structured_outputs"] = kinds
    for name in ("json", "regex", "choice"):
        if (value := getattr(fields, f"guided_{name}")) is not None:
            found[f"guided_{name}"] = {name: value}
    if len(found) > 1:
        raise bad_request(f"{' and '.join(found)}: only one of them can be given", next(iter(found)))
    try:
        return next((StructuredOutput(**wanted) for wanted in found.values()), None)
    except (ValueError, TypeError) as error:
        failure = from_value_error(str(error))
        failure.param = next(iter(found))
        raise failure from None


CONSTRAINTS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "tools")
"""Fields that a grammar is made of."""


def _response_format(form: dict[str, Any]) -> dict[str, Any] | None:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        bound = "text, json_object or json_schema"
        raise bad_request(f"response_format.type={str(kind)[:50]!r}: must be {bound}", "response_format")
    inner = form.get("json_schema")
    if not isinstance(inner, dict):
        raise bad_request("response_format.json_schema: is required and must be an object", "response_format")
    schema = inner.get("schema")
    if schema is None:
        return {"json_object": True}
    if not isinstance(schema, dict):
        raise bad_request("response_format.json_schema.schema: must be an object", "response_format", "invalid_schema")
    return {"json": schema}
