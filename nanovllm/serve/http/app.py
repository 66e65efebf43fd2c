"""The ASGI application: keys, routes, errors."""

import base64
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from nanovllm.serve.errors import ApiError, server_error
from nanovllm.serve.http.call import Call
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.options import ServeOptions

logger = logging.getLogger("nanovllm.serve")

_WITHOUT_KEY = frozenset(("/", "/health", "/ready", "/ping", "/metrics", "/version"))


class Operation(NamedTuple):
    """What answers a method of a path, and what /openapi.json says of it."""

    handler: Callable[[Any, Call], Awaitable[None]]
    """Of a Front and a Call."""
    summary: str
    request: Any = None
    """The type of the body, or several; of an admin call, also of the query."""
    answer: Any = None
    """The type of a JSON answer; a text: the media type of another one."""
    chunk: Any = None
    """The type of the data of a stream's events, where the answer may be one."""
    error: Any = None
    """The type of errors, where they have not OpenAI's form, and what makes their bodies."""
    error_body: Callable[[ApiError], bytes] = ApiError.body
    is_admin: bool = False
    """Whether it takes an admin key and no other."""


class App:
    """Answers every path; what it does not know is a 404 in OpenAI's form."""

    def __init__(
        self, front: Any, operations: dict[tuple[str, str], Operation], options: ServeOptions, metrics: Metrics
    ) -> None:
        """`operations`: by method and path; a path that ends in "/*" serves all below it."""
        self._front, self.routes = front, frozenset(operations)
        self._paths: dict[str, dict[str, Operation]] = {"": {}}
        """By path, what its methods do; "" stands for unknown paths."""
        for (method, path), operation in operations.items():
            self._paths.setdefault(path, {})[method] = operation
        self._admin_keys = [key.encode() for key in options.admin_api_keys]
        keys = [key.encode() for key in options.api_keys]
        self._keys = [*keys, *self._admin_keys] if keys else []
        self.metrics = metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        call = Call(scope, receive, send)
        begin = time.monotonic()
        label = self._label(call.path)
        try:
            await self._answer(call, label)
        except ConnectionError:  # the client left in the middle of its request, or of our answer
            call.connection.give_up()
        self.metrics.count_http(
            label or "none", _method(scope["method"]), call.status or 499, time.monotonic() - begin
        )

    async def _answer(self, call: Call, label: str) -> None:
        methods = self._paths[label]
        try:
            self._check_key(call, any(one.is_admin for one in methods.values()))
            await self._operation(call, methods).handler(self._front, call)
        except ConnectionError:
            raise
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("request %s failed", call.request_id)
                error = server_error()
            if call.status:  # too late for a status: the stream has ended without its end
                call.connection.give_up()
                return
            body_of = next((one.error_body for one in methods.values()), ApiError.body)
            await call.respond(body_of(error), error.status, headers=error.headers())

    def _check_key(self, call: Call, is_admin: bool) -> None:
        """Raises ApiError (401). Looks at the path alone; nothing of the headers changes it."""
        keys = self._admin_keys if is_admin else self._keys
        if not keys or call.path in _WITHOUT_KEY or call.scope["method"] == "OPTIONS":
            return
        sent = _key_of(call)
        if sum(hmac.compare_digest(sent, key) for key in keys) == 0:  # all of them: in equal time
            call.notes.append((b"www-authenticate", b"Bearer"))
            raise ApiError(401, "the API key is missing or wrong", "invalid_api_key")

    def _label(self, path: str) -> str:
        """The route's path, "" for unknown ones."""
        if path in self._paths:
            return path
        head = path
        while head := head.rpartition("/")[0]:
            if f"{head}/*" in self._paths:
                return f"{head}/*"
        return ""

    def _operation(self, call: Call, methods: dict[str, Operation]) -> Operation:
        method = call.scope["method"]
        found = methods.get(method) or (methods.get("GET") if method == "HEAD" else None)
        if found is not None:
            return found
        if methods:
            allowed = ", ".join(sorted(methods))
            call.notes.append((b"allow", allowed.encode()))
            raise ApiError(405, f"{method} is not allowed here; use {allowed}", "method_not_allowed")
        raise ApiError(404, f"unknown path: {call.path[:200]}", "unknown_url")


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
