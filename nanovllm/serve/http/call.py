"""One HTTP request and its response."""

import re
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec

from nanovllm.serve import limits
from nanovllm.serve.errors import bad_request
from nanovllm.serve.http.protocol import BoundedProtocol

JSON = b"application/json"
_GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Call:
    """What a handler gets."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.path: str = scope["path"]
        self.status = 0
        """Of the response, once it has begun."""
        self.notes: list[tuple[bytes, bytes]] = []
        """Headers that any response gets."""
        given = self.header(b"x-request-id")
        self.given_id = given if given is not None and _GIVEN_ID.fullmatch(given) else None
        self.request_id = self.given_id or uuid4().hex

    def name(self, request_id: str) -> None:
        """The id that the request has in its body. Raises ApiError where it is none."""
        if not _GIVEN_ID.fullmatch(request_id):
            raise bad_request(f"request_id={request_id[:200]!r}: must be 1 to 128 letters, digits, '.', '_' or '-'")
        self.given_id = self.request_id = request_id

    @property
    def connection(self) -> BoundedProtocol:
        return self.scope["connection"]  # type: ignore[no-any-return]

    @property
    def is_gone(self) -> bool:
        """Whether the client has left."""
        return self.connection.transport.is_closing()

    def header(self, name: bytes) -> str | None:
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == name), None)

    @property
    def trace_headers(self) -> dict[str, str]:
        """Those of W3C Trace Context."""
        found = {name: self.header(name.encode()) for name in ("traceparent", "tracestate")}
        return {name: value for name, value in found.items() if value is not None}

    async def json(self, or_empty: bool = False) -> dict[str, Any]:
        """The object in the body; `or_empty`: there may be no body. Raises ApiError."""
        pieces = []
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ConnectionResetError
            pieces.append(message["body"])
            if not message["more_body"]:
                body = b"".join(pieces)
                return {} if or_empty and not body else limits.parse_json(body)

    async def begin(self, status: int, content_type: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends status and headers; the body follows. Raises ConnectionError where the client is gone, as `end`."""
        self.require_client()
        own = [(b"content-type", content_type), (b"x-request-id", self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": own + self.notes + headers})
        self.status = status

    async def end(self, body: bytes = b"") -> None:
        self.require_client()
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def require_client(self) -> None:
        """Raises ConnectionError where the client is gone: some event loops refuse writes to it."""
        if self.is_gone:
            raise ConnectionResetError

    async def respond(
        self, body: bytes, status: int = 200, content_type: bytes = JSON, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        length = (b"content-length", b"%d" % len(body))
        await self.begin(status, content_type, [length, *headers])
        await self.end(b"" if self.scope["method"] == "HEAD" else body)

    async def respond_json(self, value: Any, status: int = 200) -> None:
        await self.respond(msgspec.json.encode(value), status)
