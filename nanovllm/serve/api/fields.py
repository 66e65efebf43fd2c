"""The fields of chat and completion requests, and what they ask of the engine. Null means absent."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from nanovllm import sampling_params as bounds
from nanovllm.errors import TEXT_ALONE, shown
from nanovllm.sampling_params import SamplingParams, StructuredOutput
from nanovllm.serve.api.messages import Messages
from nanovllm.serve.errors import bad_request, from_value_error, refusing
from nanovllm.serve.parsers.tools import MAX_TOOLS

_MOST = 2**63 - 1  # of an integer on its way to an engine
Positive = Annotated[int, Meta(ge=1, le=_MOST)]
Count = Annotated[int, Meta(ge=0, le=_MOST)]
Likeliest = Count
"""Bounded by the engine's max_logprobs."""
CountOrOff = Annotated[int, Meta(ge=-1, le=_MOST)]
Text = Annotated[str, Meta(min_length=1, max_length=bounds.MAX_TEXT)]
Tools = Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_TOOLS)]
Ids = Annotated[list[Count], Meta(min_length=1)]
NotEmpty = Annotated[str, Meta(min_length=1)]
Salt = Annotated[str, Meta(min_length=1, max_length=bounds.MAX_SALT)]
Texts = Annotated[list[str], Meta(min_length=1)]
Prompts = NotEmpty | Annotated[list[NotEmpty | Ids | Count], Meta(min_length=1)]
"""Texts or token ids, one or several."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A schema, and what says nothing more; whatever else it held might be a constraint."""

    schema: dict[str, Any] | None = None
    name: Any = None
    description: Any = None
    strict: Any = None


class DialectFormat(JsonSchema):
    """A response_format in other dialects: the schema is beside the type."""

    type: Literal["text", "json_object", "json_schema"]


class ResponseFormat(DialectFormat):
    json_schema: JsonSchema | None = None


INSTEAD = {
    **dict.fromkeys(("json_schema", "regex", "ebnf", "grammar"), _STRUCTURED := "use structured_outputs"),
    **dict.fromkeys(("response_format", "output_config", "output_format"), _STRUCTURED),
    "max_output_tokens": "use max_tokens",
    "stop_sequences": "use stop",
}
"""Names of constraints elsewhere, and here: one that is not known is refused, since an answer without it is wrong. So
is whatever begins with guided_."""
_UNSUPPORTED = ("suffix", "use_beam_search", "functions", "audio", "prompt_embeds", "web_search_options")


class Fields(msgspec.Struct, kw_only=True):
    """Fields that any request may hold."""

    meaningless: ClassVar[frozenset[str]] = frozenset()
    """Names that clients know and that change nothing here."""
    refused: ClassVar[Mapping[str, str]] = INSTEAD
    """Names that are not fields here, and the error for each."""

    model: str | None = None


class SamplingFields(Fields, kw_only=True):
    """Sampling fields of requests for a single answer; SamplingParams owns their bounds."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: CountOrOff | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Count] | None = None
    logit_bias: dict[str, float] | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: Literal[0] | None = None
    cache_salt: Salt | None = None
    stream: bool | None = None


class DialectFields(SamplingFields, kw_only=True):
    """Fields shared by the dialects of a chat, for which these have no names of their own."""

    n: Literal[1] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def as_chat(self) -> dict[str, Any]:
        """The fields that a chat completion request names alike; a stream of it tells its usage."""
        found = {name: value for name in _SHARED if (value := getattr(self, name)) is not None}
        return found | ({"stream_options": {"include_usage": True}} if self.stream else {})


_SHARED = DialectFields.__struct_fields__


class CommonFields(SamplingFields, kw_only=True):
    """Fields shared by /v1/chat/completions and /v1/completions."""

    meaningless = frozenset(
        "request_id user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
        "prompt_cache_options verbosity prediction best_of moderation".split()
    )
    refused: ClassVar[Mapping[str, str]] = {
        **INSTEAD, **dict.fromkeys(_UNSUPPORTED, ""), "function_call": "use tool_choice",
        "multi_modal_data": TEXT_ALONE,
    }  # fmt: skip
    modalities: list[Literal["text"]] | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    prompt_logprobs: Likeliest | None = None
    prompt_logprob_start: Count | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: CountOrOff | None = None
    add_special_tokens: bool | None = None


class ChatFields(CommonFields, kw_only=True):
    messages: Messages
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionFields(CommonFields, kw_only=True):
    prompt: Prompts
    max_completion_tokens: Count | None = None
    logprobs: Likeliest | None = None
    echo: bool | None = None


class GenerateFields(Fields, kw_only=True):
    """Body of /inference/v1/generate."""

    refused: ClassVar[Mapping[str, str]] = {**INSTEAD, "features": TEXT_ALONE}
    token_ids: Ids
    sampling_params: dict[str, Any]
    """Fields of a completion request by their names."""
    request_id: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] | None = None


class _TextFields(Fields, kw_only=True):
    """Fields of requests that generate nothing."""

    meaningless = frozenset(("user", "metadata", "request_id"))
    priority: Literal[0] | None = None
    cache_salt: Salt | None = None


class EmbeddingFields(_TextFields, kw_only=True):
    """Body of /v1/embeddings."""

    input: Prompts
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: CountOrOff | None = None
    add_special_tokens: bool | None = None


class JudgedFields(_TextFields, kw_only=True):
    instruction: NotEmpty | None = None
    max_tokens_per_query: Count = 0  # 0: it is not cut
    max_tokens_per_doc: Count = 0
    truncate_prompt_tokens: CountOrOff | None = None


class ScoreFields(JudgedFields, kw_only=True):
    """Body of /v1/score."""

    text_1: str | Texts
    text_2: str | Texts


class Document(msgspec.Struct):
    text: str


class RerankFields(JudgedFields, kw_only=True):
    """Body of /rerank, as Jina's and Cohere's clients send it."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Positive | None = None
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class TokenizeFields(Fields, kw_only=True):
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatFields(ChatFields, kw_only=True):
    return_token_strs: bool | None = None


class DetokenizeFields(Fields, kw_only=True):
    tokens: list[Count]


Struct = TypeVar("Struct", bound=msgspec.Struct)
Given = TypeVar("Given", bound=Fields)


def read(kind: type[Given], body: dict[str, Any]) -> tuple[Given, list[str]]:
    """A request's fields, and the names of those that mean nothing here. Raises ApiError (400) naming field, value
    and bound."""
    unknown = {name for name in body.keys() - _known(kind) if body[name] is not None}
    constraints = INSTEAD | {name: _STRUCTURED for name in unknown if name.startswith("guided_")}
    refused = {**constraints, **kind.refused}
    for name in sorted(unknown & refused.keys()):
        if body[name] not in (False, "") and (name in constraints or body[name] not in ([], {})):
            hint = f"; {refused[name]}" if refused[name] else ""
            raise bad_request(f"{name[:100]}: not supported{hint}", name[:100], "unsupported_field")
    ignored = sorted(name[:100] for name in unknown - refused.keys())
    fields = convert(kind, body)
    if isinstance(fields, CommonFields):
        _check(fields, body)
    return fields, ignored


@cache
def _known(kind: type[Fields]) -> frozenset[str]:
    return kind.meaningless.union(kind.__struct_fields__)


def convert(kind: type[Struct], body: Mapping[str, Any], strict: bool = True) -> Struct:
    """The fields of `kind` in a body, other ones left out. Raises ApiError (400) naming field, value and bound.
    `strict` False: numbers may be texts."""
    given = {name: value for name, value in body.items() if value is not None}
    try:
        return msgspec.convert(given, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _type_error(kind, body, str(error)) from None


def _type_error(kind: type[msgspec.Struct], body: Mapping[str, Any], text: str) -> Exception:
    """msgspec's message in our words: the field, what it must be, what it is."""
    what, _, where = text.partition(" - at `$")
    path = where.strip(".`")
    if what.startswith("Object missing required field"):
        name = what.split("`")[1]
        return bad_request(f"{path}.{name}: is required".lstrip("."), code="missing_required_parameter")
    if what.startswith("Object contains unknown field"):
        return bad_request(f"{path}.{what.split('`')[1][:100]}: not supported", code="unsupported_field")
    wanted = what.removeprefix("Expected ").replace("`", "").replace(" | null", "")
    if what == "Number out of range":
        wanted = "in the range of float64"
    parts = re.findall(r"[^.\[\]]+", path)
    if what.startswith("Invalid enum value"):
        choices = [*map(repr, _choices(kind, parts))]
        wanted = f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    found: Any = body
    for part in parts:
        found = found[int(part)] if isinstance(found, list) else found[part]
    is_media = parts[-1:] == ["type"] and re.search("image|audio|video|file|document", str(found))
    if is_media or wanted.startswith("null"):
        wanted += f"; {TEXT_ALONE}"
    code = "invalid_type" if ", got " in wanted else "invalid_value"
    return bad_request(f"{path}={shown(found)}: must be {wanted}", code=code)


def _choices(hint: Any, path: list[str]) -> Iterator[Any]:
    """The values of the Literal that is at a path below a type."""
    if path and isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield from _choices(get_type_hints(hint)[path[0]], path[1:])
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for inner in get_args(hint):
            yield from _choices(inner, path[get_origin(hint) is list :])


def _check(fields: CommonFields, body: Mapping[str, Any]) -> None:
    best_of = body.get("best_of")
    if best_of is not None and best_of != (fields.n or 1):
        raise bad_request("best_of: must be n; sampling more is not supported", code="unsupported_field")
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options: only with stream=true")
    if fields.prompt_logprobs is not None and fields.stream:
        raise bad_request("prompt_logprobs: not with stream=true")


def max_tokens(fields: "ChatFields | CompletionFields") -> int | None:
    """The newer name counts first."""
    return fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens


_SAMPLING = {*CommonFields.__struct_fields__}.intersection(SamplingParams.__dataclass_fields__)
_SAMPLING -= {"max_tokens", "structured_outputs", "cache_salt"}


def sampling_fields(
    fields: CommonFields,
    defaults: Mapping[str, Any],
    asked: int | None,
    logprobs: int | None,
    structured: StructuredOutput | None,
) -> dict[str, Any]:
    """Fields of SamplingParams, those that are given, and `defaults` for what the request leaves open, but for
    max_tokens, which each prompt has of its own. `asked`: tokens that are asked for. Raises ApiError (400) as
    SamplingParams does."""
    found = dict(defaults)
    for name in _SAMPLING:
        if (value := getattr(fields, name)) is not None:
            found[name] = value
    found["max_tokens"] = max(1, fields.min_tokens or 0) if asked is None else max(1, asked)
    if logprobs is not None:
        found["logprobs"] = logprobs
    with refusing():
        SamplingParams(**found, structured_outputs=structured)
    if structured is not None:
        found["structured_outputs"] = structured.given
    return found


_KINDS = tuple(each.name for each in dataclasses.fields(StructuredOutput))


def structured(fields: CommonFields) -> StructuredOutput | None:
    """The one constraint that a request asks for. Raises ApiError (400)."""
    found: dict[str, dict[str, Any]] = {}
    if (form := fields.response_format) is not None and form.type != "text":
        if form.type == "json_schema" and form.json_schema is None and form.schema is None:
            raise bad_request("response_format.json_schema: is required")
        schema = form.schema if form.json_schema is None else form.json_schema.schema
        found["response_format"] = {"json_object": True} if schema is None else {"json": schema}
    if (given := fields.structured_outputs) is not None:
        kinds = {name: value for name, value in given.items() if value not in (None, False)}
        if len(kinds) != 1 or not kinds.keys() <= {*_KINDS}:
            one_of = ", ".join(_KINDS)
            raise bad_request(f"structured_outputs: must hold exactly one of {one_of}, found {shown([*kinds])}")
        found["structured_outputs"] = kinds
    if len(found) > 1:
        raise bad_request(f"{' and '.join(found)}: only one of them can be given", next(iter(found)))
    try:
        msgspec.msgpack.encode(found)  # as it travels to the engine
        return next((StructuredOutput(**wanted) for wanted in found.values()), None)
    except OverflowError:
        raise bad_request(f"{next(iter(found))}: integers must be in -2**63..2**64 - 1", code="invalid_value") from None
    except ValueError as error:
        failure = from_value_error(str(error))
        failure.param = next(iter(found))
        failure.message = f"{failure.param}: {failure.message}"
        raise failure from None
