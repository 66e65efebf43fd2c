"""The paths that are served."""

from nanovllm.serve.api import admin, basics, chat, completions, dialects, embeddings, generate, page, rerank
from nanovllm.serve.formats.messages import message_error
from nanovllm.serve.http.app import Operation

ROUTES: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(chat.chat, runner="generate"),
    ("POST", "/v1/completions"): Operation(completions.completions, runner="generate"),
    ("POST", "/inference/v1/generate"): Operation(generate.generate, runner="generate"),
    ("POST", "/v1/responses"): Operation(dialects.create_response, runner="generate"),
    ("POST", "/v1/messages"): Operation(dialects.create_message, message_error, runner="generate"),
    ("POST", "/v1/messages/count_tokens"): Operation(dialects.count_message, message_error),
    ("POST", "/v1/responses/input_tokens"): Operation(dialects.count_response),
    ("POST", "/v1/embeddings"): Operation(embeddings.embeddings, runner="pooling"),
    ("POST", "/score"): Operation(rerank.score, runner="generate"),
    ("POST", "/v1/score"): Operation(rerank.score, runner="generate"),
    ("POST", "/rerank"): Operation(rerank.rerank, runner="generate"),
    ("POST", "/v1/rerank"): Operation(rerank.rerank, runner="generate"),
    ("POST", "/v2/rerank"): Operation(rerank.rerank, runner="generate"),
    ("GET", "/v1/models"): Operation(basics.models),
    ("GET", "/v1/models/*"): Operation(basics.model),
    ("POST", "/tokenize"): Operation(basics.tokenize),
    ("POST", "/detokenize"): Operation(basics.detokenize),
    ("GET", "/health"): Operation(basics.health),
    ("GET", "/ready"): Operation(basics.health),
    ("GET", "/ping"): Operation(basics.health),
    ("POST", "/ping"): Operation(basics.health),
    ("GET", "/version"): Operation(basics.version),
    ("GET", "/load"): Operation(basics.load),
    ("GET", "/metrics"): Operation(basics.metrics),
    ("GET", "/"): Operation(page.page),
}
"""Operations by method and path."""
ADMIN_ROUTES = {route: Operation(handler, is_admin=True) for route, (handler, _) in admin.ROUTES.items()}
"""Served where there is an admin key."""
