"""The paths that are served."""

from functools import partial

from nanovllm.serve.api import admin, basics, chat, completions, dialects, embeddings, generate, page, rerank
from nanovllm.serve.api.answer import MakeFormat, Prepare, serve
from nanovllm.serve.formats.chat import ChatFormat
from nanovllm.serve.formats.completion import CompletionFormat
from nanovllm.serve.formats.messages import message_error
from nanovllm.serve.formats.tokens import EmbeddingFormat, GenerateFormat, RerankFormat, ScoreFormat
from nanovllm.serve.http.app import Operation
from nanovllm.serve.text_pool import IsShort


def _serving(
    prepare: Prepare, make: MakeFormat, is_short: IsShort = lambda call, body: True, runner: str = "generate"
) -> Operation:
    return Operation(partial(serve, prepare=prepare, make=make, is_short=is_short), runner=runner)


_SCORE = _serving(rerank.prepare_score, ScoreFormat)
_RERANK = _serving(rerank.prepare_rerank, RerankFormat)
ROUTES: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): _serving(chat.prepare, ChatFormat, chat.is_short),
    ("POST", "/v1/completions"): _serving(completions.prepare, CompletionFormat, completions.is_short),
    ("POST", "/inference/v1/generate"): _serving(generate.prepare, GenerateFormat),
    ("POST", "/v1/responses"): Operation(dialects.create_response, dialects.response_error, runner="generate"),
    ("POST", "/v1/messages"): Operation(dialects.create_message, message_error, runner="generate"),
    ("POST", "/v1/messages/count_tokens"): Operation(dialects.count_message, message_error),
    ("POST", "/v1/responses/input_tokens"): Operation(dialects.count_response, dialects.response_error),
    ("POST", "/v1/embeddings"): _serving(embeddings.prepare, EmbeddingFormat, embeddings.is_short, "pooling"),
    ("POST", "/score"): _SCORE,
    ("POST", "/v1/score"): _SCORE,
    ("POST", "/rerank"): _RERANK,
    ("POST", "/v1/rerank"): _RERANK,
    ("POST", "/v2/rerank"): _RERANK,
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
ADMIN_ROUTES = {route: Operation(handler, is_admin=True) for route, handler in admin.ROUTES.items()}
"""Served where there is an admin key."""
