"""Answers of the endpoints, as types: answers are made of them, and the tests read answers by them."""

from typing import Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

Value = TypeVar("Value")
FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    """An object with these fields and no other; those that may be left out are UNSET."""


def written(value: Value) -> Value:
    """A part of an answer as the JSON that it becomes, which takes a tenth of the memory of its objects."""
    return cast(Value, msgspec.Raw(msgspec.json.encode(value)))


class Error(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Shape):
    error: Error


class PromptDetails(Shape):
    cached_tokens: int


class OutputDetails(Shape):
    reasoning_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: OutputDetails | UnsetType = UNSET


class Function(Shape, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(Shape, kw_only=True):
    index: int | UnsetType = UNSET
    """Number of the call, in chunks only."""
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: Function


class Token(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ContentToken(Token):
    top_logprobs: list[Token]


class ChatLogprobs(Shape):
    content: list[ContentToken]
    refusal: None


class TextLogprobs(Shape):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float | None] | None]


class PromptToken(Shape):
    logprob: float
    rank: int
    decoded_token: str


class Delta(Shape):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Message(Delta, kw_only=True):
    refusal: None


class Choice(Shape, kw_only=True):
    """Fields of every choice."""

    index: int
    finish_reason: FinishReason | None


PromptLogprobs = list[dict[str, PromptToken] | None]


class WholeChoice(Choice, kw_only=True):
    stop_reason: int | str | None
    token_ids: list[int] | None


class TextChoice(WholeChoice, kw_only=True):
    text: str
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    logprobs: TextLogprobs | None


class Head(Shape):
    id: str
    created: int
    model: str
    system_fingerprint: str


class Whole(Head):
    usage: Usage
    service_tier: None
    kv_transfer_params: None


class Completion(Whole, kw_only=True):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class IdToken(Shape):
    token_id: int
    logprob: float
    rank: int


class SampledToken(IdToken):
    top_logprobs: list[IdToken]


class IdLogprobs(Shape):
    content: list[SampledToken]


class WeightSpan(Shape):
    version: str
    start: int
    end: int


class GeneratedChoice(Shape):
    index: int
    token_ids: list[int]
    logprobs: IdLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET
    sampling_mask: list[list[int] | None] | UnsetType = UNSET


class Generated(Shape):
    request_id: str
    output_mode: Literal["tokens"]
    created: int
    model: str
    choices: list[GeneratedChoice]
    usage: Usage
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class Models(Shape):
    object: Literal["list"]
    data: list[Model]


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Prompt(Shape):
    prompt: str


class Health(Shape):
    status: Literal["loading", "ok", "incomplete", "silent", "draining", "failed"]
    stage: str | UnsetType = UNSET
    percent: int | UnsetType = UNSET


class Load(Shape):
    server_load: int
    running: int
    waiting: int
    kv_cache_usage: float


class Version(Shape):
    version: str


class InputTokens(Shape):
    input_tokens: int


