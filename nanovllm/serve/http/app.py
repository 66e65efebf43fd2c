"""The ASGI application: keys, routes, errors."""

import base64
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from nanovllm.serve.errors import ApiError, server_error
from nanovllm.serve.http.call import Call
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.options import ServeOptions

logger = logging.getLogger("nanovllm.serve")
Handler = Callable[[Call], Awaitable[None]]
Route = tuple[str, str]

_WITHOUT_KEY = frozenset(("/", "/health", "/ready", "/ping", "/metrics", "/version"))
_NOT_HERE = {
    path: f"{path}: this server generates text and has no such models"
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/audio/transcriptions", "/v1/audio/speech")
}


class App:
    """Answers every path; what it does not know is a 404 in OpenAI's form."""

    def __init__(
        self, routes: dict[Route, Handler], options: ServeOptions, admin_paths: frozenset[str],
        error_forms: Mapping[str, Callable[[ApiError], bytes]], metrics: Metrics,
    ) -> None:  # fmt: skip
        """`routes`: by method and path; a path that ends in "/*" serves all below it. `admin_paths`: those of them
        that take an admin key and no other. `error_forms`: by path, what makes the body of an error that has a form of
        its own."""
        self._routes, self.routes = routes, frozenset(routes)
        self._methods: dict[str, set[str]] = {}
        for method, path in routes:
            self._methods.setdefault(path, set()).add(method)
        self._admin_paths, self._error_forms = admin_paths, error_forms
        self._admin_keys = [key.encode() for key in options.admin_api_keys]
        keys = [key.encode() for key in options.api_keys]
        self._keys = [*keys, *self._admin_keys] if keys else []
        self._root = options.root_path.rstrip("/")
        self.metrics = metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path: str = scope["path"].removeprefix(self._root) or "/"
        call = Call(scope, receive, send, path)
        begin = time.monotonic()
        label = self._label(path)
        try:
            await self._answer(call, label)
        except ConnectionError:  # the client left in the middle of its request, or of our answer
            call.connection.give_up()
        self.metrics.count_http(
            label or "none", _method(scope["method"]), call.status or 499, time.monotonic() - begin
        )

    async def _answer(self, call: Call, label: str) -> None:
        try:
            self._check_key(call)
            await self._handler(label, call.scope["method"], call.path)(call)
        except ApiError as error:
            await self._fail(call, error)
        except ConnectionError:
            raise
        except Exception:
            logger.exception("request %s failed", call.request_id)
            await self._fail(call, server_error())

    def _check_key(self, call: Call) -> None:
        """Raises ApiError (401). Looks at the path alone, before it is routed; nothing of the headers changes it."""
        keys = self._admin_keys if call.path in self._admin_paths else self._keys
        if not keys or call.path in _WITHOUT_KEY or call.scope["method"] == "OPTIONS":
            return
        sent = _key_of(call)
        if sum(hmac.compare_digest(sent, key) for key in keys) == 0:  # all of them: in equal time
            raise ApiError(401, "the API key is missing or wrong", "invalid_api_key")

    def _label(self, path: str) -> str:
        """The route's path, "" for unknown ones."""
        if path in self._methods:
            return path
        head = path
        while head := head.rpartition("/")[0]:
            if f"{head}/*" in self._methods:
                return f"{head}/*"
        return ""

    def _handler(self, label: str, method: str, path: str) -> Handler:
        handler = self._routes.get((method, label))
        if handler is None and method == "HEAD":
            handler = self._routes.get(("GET", label))
        if handler is not None:
            return handler
        if label:
            allowed = ", ".join(sorted(self._methods[label]))
            raise ApiError(405, f"{method} is not allowed here; use {allowed}", "method_not_allowed")
        raise ApiError(404, _NOT_HERE.get(path, f"unknown path: {path[:200]}"), "unknown_url")

    async def _fail(self, call: Call, error: ApiError) -> None:
        if call.status:  # too late for a status: the stream has ended without its end
            call.connection.give_up()
        else:
            body = self._error_forms.get(call.path, ApiError.body)(error)
            await call.respond(body, error.status, headers=error.headers())


def _key_of(call: Call) -> bytes:
    """The key that a request brings: as a bearer's, as the password of a URL (https://any:KEY@host), in x-api-key."""
    scheme, _, given = (call.header(b"authorization") or "").partition(" ")
    given = given.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(given, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    if scheme.lower() != "bearer":
        given = (call.header(b"x-api-key") or "").strip()
    return given.encode("latin-1", "replace")


def _method(name: str) -> str:
    return name if name in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "other"
