"""/openapi.json says what the server does: its paths, the bounds of its fields, the shape of its answers."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from serving import events, user

from nanovllm import SamplingParams
from nanovllm.sampling_params import MAX_ALLOWED_IDS
from nanovllm.serve.api import anthropic, responses, shapes
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.routes import ADMIN_ROUTES, ROUTES, document
from nanovllm.serve.errors import ApiError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = {"messages": user("What is the capital of Italy?"), "temperature": 0, "max_tokens": 8}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
NEEDED: dict[type, dict[str, Any]] = {
    api.ChatFields: {"messages": user("a")},
    api.CompletionFields: {"prompt": "a"},
    anthropic.MessagesFields: {"messages": user("a"), "max_tokens": 1, "tools": [{"name": "a", "input_schema": {}}]},
    responses.ResponsesFields: {"input": user("a"), "tools": [{"type": "function", "name": "a"}]},
}
"""Bodies with all that is required, and with one item of each list of objects."""


def test_paths_are_those_that_are_served(client: httpx.Client) -> None:
    served = client.get("/openapi.json").json()
    for path, operations in served["paths"].items():
        for method in operations:
            answer = client.request(method, path.replace("{id}", "demo"), content=b"{" if method == "post" else None)
            assert answer.status_code == (400 if method == "post" and path != "/ping" else 200), path
    assert client.get("/docs").status_code == 404
    assert "/sleep" not in served["paths"], "there is no admin key"
    assert {"/sleep", "/v1/models/{id}"} <= document(ROUTES | ADMIN_ROUTES, "all")["paths"].keys()


def test_references_lead_somewhere() -> None:
    whole = document(ROUTES | ADMIN_ROUTES, "all")
    text = json.dumps(whole)
    names = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= whole["components"]["schemas"].keys()


def bounded(schema: dict[str, Any], required: bool = False) -> Iterator[dict[str, Any]]:
    """The forms of a field that have bounds."""
    for form in schema.get("anyOf", [schema]):
        if {"minimum", "maximum", "exclusiveMinimum", "maxItems", "minItems", "maxLength", "minLength"} & form.keys():
            yield form


def values_at(form: dict[str, Any], example: Any) -> tuple[list[Any], list[Any]]:
    """Values just within a form's bounds, and just beyond; `example`: a list of objects."""
    step = 1 if form["type"] == "integer" else 1e-3
    good, bad = [], []
    if "minimum" in form:
        good.append(form["minimum"])
        bad.append(form["minimum"] - step)
    if "exclusiveMinimum" in form:
        good.append(form["exclusiveMinimum"] + step)
        bad.append(form["exclusiveMinimum"])
    if "maximum" in form:
        good.append(form["maximum"])
        bad.append(form["maximum"] * 1.001 + step if step < 1 else form["maximum"] + 1)
    if form["type"] == "string":
        good += ["a" * form["minLength"], "a" * form["maxLength"]]
        bad += ["a" * (form["minLength"] - 1), "a" * (form["maxLength"] + 1)]
    if form["type"] == "array":
        item = example[0] if example else {"string": "a", "integer": 5, "object": {}}[form["items"]["type"]]
        good.append([item] * max(1, form.get("minItems", 1)))
        if form["maxItems"] <= MAX_ALLOWED_IDS:
            bad.append([item] * (form["maxItems"] + 1))
        if form.get("minItems"):
            bad.append([])
    return good, bad


@pytest.mark.parametrize("kind", NEEDED, ids=lambda kind: kind.__name__)
def test_bounds_are_those_that_are_kept(kind: Any) -> None:
    """Values at a bound are taken, also by SamplingParams; values beyond it are refused, by SamplingParams too."""
    count = 0
    [_], components = msgspec.json.schema_components([kind])
    of_engine = set(SamplingParams.__dataclass_fields__)
    for name, schema in components[kind.__name__]["properties"].items():
        for form in bounded(schema) if name != "prompt" else ():  # read apart from the others
            good, bad = values_at(form, NEEDED[kind].get(name))
            for value in good:
                fields = api.convert(kind, NEEDED[kind] | {name: value})
                if isinstance(fields, api.CommonFields):
                    api.sampling_fields(fields, {}, 1 << 40, None, None)
            for value in bad:
                count += 1
                with pytest.raises(ApiError) as refused:
                    api.convert(kind, NEEDED[kind] | {name: value})
                assert refused.value.param == name and len(refused.value.message) < 400
                if name in of_engine and name not in ("max_tokens", "logprobs", "prompt_logprobs"):
                    with pytest.raises(ValueError, match=name):
                        SamplingParams(**{name: value})
    assert count >= 4


@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [
        (CHAT, ASK | {"n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}, shapes.ChatCompletion),
        (CHAT, ASK | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}, shapes.ChatCompletion),
        (CHAT, ASK | {"stop": ["Italy"], "prompt_logprobs": 1}, shapes.ChatCompletion),
        (COMPLETIONS, {"prompt": ["a", "b"], "logprobs": 2, "echo": True, "max_tokens": 3}, shapes.Completion),
        (COMPLETIONS, {"prompt": [5, 6], "max_tokens": 2, "return_token_ids": True}, shapes.Completion),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 1}}, shapes.Generated),
        ("/v1/responses", {"input": "Hello"}, shapes.ResponseObject),
        ("/v1/messages", ASK, shapes.AnthropicMessage),
        ("/v1/messages/count_tokens", {"messages": user("Hello")}, shapes.InputTokens),
        ("/tokenize", {"prompt": "Hello", "return_token_strs": True}, shapes.Tokens),
        ("/tokenize", ASK, shapes.Tokens),
        ("/detokenize", {"tokens": [5, 6]}, shapes.Prompt),
        (CHAT, {"messages": 3}, shapes.ErrorAnswer),
        ("/v1/messages", {"messages": 3}, shapes.AnthropicErrorAnswer),
    ],
)
def test_answers_have_their_shape(client: httpx.Client, path: str, body: dict[str, Any], shape: type) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == (400 if "Error" in shape.__name__ else 200), answer.text
    msgspec.convert(answer.json(), shape)


@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [
        (CHAT, ASK | {"logprobs": True, "n": 2, "return_token_ids": True}, shapes.ChatCompletionChunk),
        (CHAT, ASK | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}, shapes.ChatCompletionChunk),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1, "max_tokens": 4}, shapes.CompletionChunk),
    ],
)
def test_chunks_have_their_shape(client: httpx.Client, path: str, body: dict[str, Any], shape: type) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with client.stream("POST", path, json=body | {"stream": True, "stream_options": options}) as stream:
        for chunk in events(stream):
            msgspec.convert(chunk, shape)
