"""The paths that are served, and GET /openapi.json, made of them and of the types of requests and answers."""

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

import nanovllm
from nanovllm.serve.api import admin, anthropic, basics, chat, completions, dialects, generate, page, responses, shapes
from nanovllm.serve.api import fields as api
from nanovllm.serve.http.app import Operation
from nanovllm.serve.http.call import Call

if TYPE_CHECKING:
    from nanovllm.serve.front import Front

Schema = dict[str, Any]


async def openapi(front: "Front", call: Call) -> None:
    await call.respond(_document(front.app.routes, front.name))


_ANTHROPICS_FORM: dict[str, Any] = {"error": shapes.AnthropicErrorAnswer, "error_body": dialects.message_error}
_HEALTH = Operation(basics.health, "200 when requests are served, else 503", None, shapes.Health)
ROUTES: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        *(chat.chat, "Answers a chat", api.ChatFields, shapes.ChatCompletion, shapes.ChatCompletionChunk)
    ),
    ("POST", "/v1/completions"): Operation(
        completions.completions,
        *("Continues prompts", api.CompletionFields, shapes.Completion, shapes.CompletionChunk),
    ),
    ("POST", "/inference/v1/generate"): Operation(
        generate.generate,
        *("Continues token ids with token ids", api.GenerateFields, shapes.Generated, shapes.GeneratedChunk),
    ),
    ("POST", "/v1/responses"): Operation(
        *(dialects.create_response, "Answers a chat, in the form of OpenAI's Responses"),
        *(responses.ResponsesFields, shapes.ResponseObject, dict[str, Any]),
    ),
    ("POST", "/v1/messages"): Operation(
        *(dialects.create_message, "Answers a chat, in Anthropic's form"),
        *(anthropic.MessagesFields, shapes.AnthropicMessage, dict[str, Any]),
        **_ANTHROPICS_FORM,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        *(dialects.count_tokens, "Tokens of a chat"),
        *(anthropic.CountFields, shapes.InputTokens),
        **_ANTHROPICS_FORM,
    ),
    ("GET", "/v1/models"): Operation(basics.models, "The names that are served", None, shapes.Models),
    ("GET", "/v1/models/*"): Operation(basics.model, "One of them", None, shapes.Model),
    ("POST", "/tokenize"): Operation(
        *(basics.tokenize, "Token ids of a text or a chat"),
        *((api.TokenizeFields, api.TokenizeChatFields), shapes.Tokens),
    ),
    ("POST", "/detokenize"): Operation(
        *(basics.detokenize, "The text of token ids", api.DetokenizeFields, shapes.Prompt)
    ),
    ("GET", "/health"): _HEALTH,
    ("GET", "/ready"): _HEALTH,
    ("GET", "/ping"): _HEALTH,
    ("POST", "/ping"): _HEALTH,
    ("GET", "/version"): Operation(basics.version, "The server's version", None, shapes.Version),
    ("GET", "/load"): Operation(basics.load, "Requests in flight, and the KV cache's use", None, shapes.Load),
    ("GET", "/metrics"): Operation(basics.metrics, "Prometheus' text", None, "text/plain"),
    ("GET", "/"): Operation(page.page, "A chat page", None, "text/html"),
    ("GET", "/openapi.json"): Operation(openapi, "This document", None, dict[str, Any]),
}
ADMIN_ROUTES = {
    route: Operation(handler, f"Admin call: {route[1][1:].replace('_', ' ')}", kind, dict[str, Any], is_admin=True)
    for route, (handler, kind) in admin.ROUTES.items()
}
"""Served where there is an admin key."""
_ERRORS = {
    "400": "a field is wrong",
    "401": "the key is missing or wrong",
    "404": "there is no such path or model",
    "503": "the server is loading, full or shutting down; retry-after says when to ask again",
}


def document(routes: Iterable[tuple[str, str]], name: str) -> Schema:
    """The OpenAPI document of these routes, (method, path)."""
    described = {route: (ROUTES | ADMIN_ROUTES)[route] for route in routes}
    kinds = [kind for one in described.values() for kind in (*_requests(one), one.answer, one.chunk, _error(one))]
    used = [*dict.fromkeys(kind for kind in kinds if kind is not None and not isinstance(kind, str))]
    schemas, components = msgspec.json.schema_components(used, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(used, schemas, strict=True))
    paths: dict[str, Schema] = {}
    for (method, path), operation in described.items():
        entry = _entry(operation, schema_of, components)
        if path.endswith("/*"):
            path = path[:-1] + "{id}"
            entry["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(path, {})[method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": f"nanovllm: {name}", "version": nanovllm.__version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _entry(operation: Operation, schema_of: dict[Any, Schema], components: Schema) -> Schema:
    answer = operation.answer
    content: Schema = {answer: {"schema": {"type": "string"}}} if isinstance(answer, str) else _json(schema_of[answer])
    if operation.chunk is not None:
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema_of[operation.chunk]}
        either = {"anyOf": [{"const": "[DONE]"}, data]}
        event = {"type": "object", "properties": {"data": either}, "required": ["data"]}
        content["text/event-stream"] = {"schema": event}
    failure = _json(schema_of[_error(operation)])
    responses = {"200": {"description": "done", "content": content}}
    responses |= {status: {"description": why, "content": failure} for status, why in _ERRORS.items()}
    if operation is _HEALTH:
        responses["503"] = {"description": "not yet, or no longer", "content": content}
    entry: Schema = {"summary": operation.summary, "responses": responses}
    if requests := _requests(operation):
        needed = all(components[kind.__name__]["required"] for kind in requests)
        found = [schema_of[kind] for kind in requests]
        entry["requestBody"] = {"required": needed, "content": _json(found[0] if len(found) == 1 else {"anyOf": found})}
    return entry


def _error(operation: Operation) -> Any:
    return operation.error or shapes.ErrorAnswer


def _requests(operation: Operation) -> tuple[Any, ...]:
    kinds = operation.request
    return kinds if isinstance(kinds, tuple) else () if kinds is None else (kinds,)


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


@cache
def _document(routes: frozenset[tuple[str, str]], name: str) -> bytes:
    return msgspec.json.encode(document(sorted(routes), name))
