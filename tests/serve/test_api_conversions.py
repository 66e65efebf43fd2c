"""Fields that all dialects of the API take, and constraints that each refuses where it cannot hold them."""

from typing import Any

import pytest
from conversation import of_messages, of_responses

from nanovllm.serve.api import anthropic, responses
from nanovllm.serve.api import fields as api
from nanovllm.serve.errors import ApiError

SAMPLING = {"seed": 3, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "stop_token_ids": [7]}
SHARED = SAMPLING | {
    "structured_outputs": {"regex": "a+"},
    "cache_salt": "x",
    "chat_template_kwargs": {"polite": True},
    "logit_bias": {"5": 1.0},
    "bad_words": ["no"],
}
"""Fields that chat completions take and the other dialects have no words for."""


def test_all_dialects_take_what_is_sampled_by() -> None:
    for request in (
        of_messages({"messages": [{"role": "user", "content": "a"}], "max_tokens": 5} | SHARED),
        of_responses({"input": "a"} | SHARED),
    ):
        assert {name: request[name] for name in SHARED} == SHARED
        assert api.read(api.ChatFields, request)[1] == []


CONSTRAINTS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "output_format", "grammar", "regex")


@pytest.mark.parametrize(
    ("kind", "body", "more"),
    [
        (api.ChatFields, {"messages": [{"role": "user", "content": "a"}]}, ["output_config", "max_output_tokens"]),
        (api.CompletionFields, {"prompt": "a"}, ["output_config", "stop_sequences"]),
        (responses.ResponsesFields, {"input": "a"}, ["response_format", "max_tokens", "background", "logprobs"]),
        (anthropic.MessagesFields, MESSAGE := {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
         ["response_format", "max_completion_tokens", "mcp_servers"]),
        (anthropic.CountFields, MESSAGE, []),
        (api.GenerateFields, {"token_ids": [5], "sampling_params": {}}, ["response_format"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_what_constrains_an_answer_is_never_ignored(kind: Any, body: dict[str, Any], more: list[str]) -> None:
    for name in (*CONSTRAINTS, *more):
        with pytest.raises(ApiError, match=f"{name}: not supported; ") as caught:
            api.read(kind, body | {name: ["a"]})
        assert (caught.value.status, caught.value.param) == (400, name)
        assert api.read(kind, body | {name: None})[1] == []
    assert api.read(kind, body | {"no_such": 1})[1] == ["no_such"]


def test_a_constraint_of_unknown_kind_is_refused() -> None:
    for wanted in ({"structural_tag": "{}"}, {"regex": "a", "whitespace_pattern": " "}, {}):
        fields = api.convert(api.CompletionFields, {"prompt": "a", "structured_outputs": wanted})
        with pytest.raises(ApiError, match="structured_outputs: must hold exactly one of json, regex"):
            api.structured(fields)
