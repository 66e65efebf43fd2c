"""Routing of requests to their handlers: access, routes, errors."""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from nanovllm.serve.errors import ApiError, server_error
from nanovllm.serve.front import Front
from nanovllm.serve.http.access import Access
from nanovllm.serve.http.call import Call

logger = logging.getLogger("nanovllm.serve")


class Operation(NamedTuple):
    """Handler of a method of a path, and how it is refused."""

    handler: Callable[[Front, Call], Awaitable[object]]
    """Function that answers the call."""
    error_body: Callable[[ApiError], bytes] = ApiError.body
    """Makes the bodies of errors."""
    is_admin: bool = False
    """Whether it takes an admin key and no other."""
    runner: str = ""
    """Runner that the engines must have (EngineConfig.runner); "": any."""


class App:
    """Answers every path; what it does not know is a 404 in OpenAI's form."""

    def __init__(self, front: Front, operations: dict[tuple[str, str], Operation]) -> None:
        """`operations`: by method and path; a path that ends in "/*" serves all below it, and no two of those hold each
        other."""
        self._front = front
        self._paths: dict[str, dict[str, Operation]] = {"": {}}
        """Operations by path and method; "" stands for unknown paths."""
        for (method, path), operation in operations.items():
            self._paths.setdefault(path, {})[method] = operation
        self._prefixes = [path.removesuffix("*") for path in self._paths if path.endswith("/*")]
        self._root = front.options.root_path.rstrip("/")
        self._access = Access(front.options)
        self.metrics, self.book = front.metrics, front.book

    async def answer(self, call: Call) -> None:
        """Answers a request."""
        begin = time.monotonic()
        if call.path.startswith(f"{self._root}/"):
            call.path = call.path.removeprefix(self._root)
        label = self._label(call.path)
        try:
            await self._answer(call, label)
        except ConnectionError:  # the client left in the middle of its request, or of our answer
            call.connection.transport.abort()
        self.metrics.count_http(label or "none", _method(call.method), call.status or 499, time.monotonic() - begin)

    async def _answer(self, call: Call, label: str) -> None:
        methods = self._paths[label]
        try:
            self._access.check(call, any(one.is_admin for one in methods.values()))
            if allowances := self._access.allowances(call):
                await call.respond(b"", headers=allowances)
                return
            operation = self._operation(call, methods)
            self._front.model.require_runner(operation.runner)
            await operation.handler(self._front, call)
        except ConnectionError:
            raise
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("request %s failed", call.request_id)
                error = server_error()
            if call.status:  # too late for a status: the stream has ended without its end
                call.connection.transport.abort()
                return
            body_of = next((one.error_body for one in methods.values()), ApiError.body)
            await call.respond(body_of(error), error.status, headers=error.headers())

    def _label(self, path: str) -> str:
        """The route's path, "" for unknown ones."""
        if path in self._paths:
            return path
        return next((f"{prefix}*" for prefix in self._prefixes if path.startswith(prefix)), "")

    def _operation(self, call: Call, methods: dict[str, Operation]) -> Operation:
        method = call.method
        found = methods.get(method) or (methods.get("GET") if method == "HEAD" else None)
        if found is not None:
            return found
        if methods:
            allowed = ", ".join(sorted(methods))
            call.notes.append((b"allow", allowed.encode()))
            raise ApiError(405, f"{method} is not allowed here; use {allowed}", "method_not_allowed")
        raise ApiError(404, f"unknown path: {call.path[:200]}", "unknown_url")


def _method(name: str) -> str:
    return name if name in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "other"
