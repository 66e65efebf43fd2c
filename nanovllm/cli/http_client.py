"""A small HTTP client for OpenAI servers: streams with the time of each event, connections used again, Unix sockets.

Less than a general client does, and cheap for each event, so that a benchmark measures the server.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httptools

_PIECE = 1 << 16  # bytes read at once


class ServerError(OSError):
    """The server answers with an error, or not at all. `status`: of HTTP; 0 where there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NoServer(ServerError):
    """Nothing listens where the server is to be."""


class Response:
    """Answer to one request, as it comes on a connection; also the parser's listener."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.parser = httptools.HttpResponseParser(self)
        self.pieces: list[bytes] = []
        self.headers: dict[str, str] = {}
        self.status = 0
        self.has_headers = self.is_complete = self.is_closed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status, self.has_headers = self.parser.get_status_code(), True

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True

    async def read(self) -> None:
        """Waits for more of the response. Raises ServerError."""
        data = await self.reader.read(_PIECE)
        if not data and self.has_headers and not {"content-length", "transfer-encoding"} & self.headers.keys():
            self.is_complete = self.is_closed = True  # such an answer ends with its connection
            return
        if not data:
            raise ServerError("the server closed the connection in the middle of an answer", self.status)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ServerError(f"the server's answer is not HTTP: {error}") from None

    def take(self) -> bytes:
        body = b"".join(self.pieces)
        self.pieces.clear()
        return body

    async def body(self) -> bytes:
        while not self.is_complete:
            await self.read()
        return self.take()

    async def json(self) -> Any:
        return json.loads(await self.body())

    async def events(self) -> AsyncIterator[tuple[float, dict[str, Any]]]:
        """(time.perf_counter() at arrival, event) of a stream, up to [DONE]. Raises ServerError for an error event, and
        where the end is missing."""
        rest = b""
        while True:
            if not self.pieces:
                if self.is_complete:
                    raise ServerError("the stream has no [DONE] at its end", self.status)
                await self.read()
            now = time.perf_counter()
            *whole, rest = (rest + self.take()).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in whole:
                data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
                if data == b"[DONE]":
                    await self.body()
                    return
                if data:
                    said = json.loads(data)
                    if isinstance(said, dict) and said.get("error"):
                        raise ServerError(_message(said), self.status)
                    yield now, said

    async def raise_for_status(self) -> None:
        """Raises ServerError with the server's own words where it did not answer 200."""
        if self.status != 200:
            raise error_of(self.status, await self.body())


def error_of(status: int, body: bytes) -> ServerError:
    """Error that says what a response without status 200 says."""
    try:
        message = _message(json.loads(body))
    except ValueError:
        message = body[:500].decode("utf-8", "replace")
    return ServerError(f"the server answers {status}: {message}", status)


def _message(said: Any) -> str:
    """An error's own words, in OpenAI's envelope or in none."""
    error = said.get("error") or said if isinstance(said, dict) else said
    return str(error.get("message", error) if isinstance(error, dict) else error)[:1000]


class Client(AbstractAsyncContextManager["Client"]):
    """Client of one server. Use it in an `async with`."""

    def __init__(self, url: str, api_key: str | None = None, headers: dict[str, str] | None = None) -> None:
        """`url`: http://host:port, https://..., with a path before /v1 or none, or unix:/path/of/socket."""
        self._socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        parts = urlsplit("http://local" if self._socket else url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={url[:200]!r}: must be http://host:port or unix:/path")
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        own = {"host": parts.netloc.rpartition("@")[2], "content-type": "application/json", **(headers or {})}
        if api_key:
            own["authorization"] = f"Bearer {api_key}"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in own.items())
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"", headers: str = "") -> AsyncIterator[Response]:
        """Sends a request; gives its response once the headers are there. Leaving it early closes the connection, which
        ends the request on the server. `headers`: more lines, each with its end. Raises ServerError."""
        connection = None
        try:
            connection = await self._send(method, path, body, headers)
            yield connection
        finally:
            if connection is not None:
                ends = connection.is_closed or connection.headers.get("connection", "").lower() == "close"
                if connection.is_complete and not ends:
                    self._idle.append((connection.reader, connection.writer))
                else:
                    connection.writer.transport.abort()

    async def _send(self, method: str, path: str, body: bytes, headers: str) -> Response:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{headers}content-length: {len(body)}\r\n\r\n"
        while True:
            is_used = bool(self._idle)
            connection = Response(*(self._idle.pop() if is_used else await self._connect()))
            try:
                connection.writer.write(head.encode() + body)
                while not connection.has_headers:
                    await connection.read()
                return connection
            except (ServerError, OSError) as error:
                connection.writer.transport.abort()
                if not is_used or connection.has_headers:  # an idle connection may have been closed: another one
                    raise ServerError(str(error)) from None
            except BaseException:
                connection.writer.transport.abort()
                raise

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            if self._socket:
                return await asyncio.open_unix_connection(self._socket)
            context = ssl.create_default_context() if self._tls else None
            return await asyncio.open_connection(self._host, self._port, ssl=context)
        except OSError as error:
            place = self._socket or f"{self._host}:{self._port}"
            raise NoServer(f"no server at {place}: {error.strerror or error}") from None

    async def get(self, path: str) -> Any:
        """The JSON of a GET. Raises ServerError."""
        async with self.request("GET", path) as response:
            await response.raise_for_status()
            return await response.json()

    @asynccontextmanager
    async def stream(self, path: str, value: Any) -> AsyncIterator[AsyncIterator[tuple[float, dict[str, Any]]]]:
        """The events that answer a POST. Raises ServerError."""
        async with self.request("POST", path, json.dumps(value).encode()) as response:
            await response.raise_for_status()
            yield response.events()

    async def model(self) -> str:
        """The first model's name. Raises ServerError."""
        return str((await self.get("/v1/models"))["data"][0]["id"])

    async def __aexit__(self, *_: object) -> None:
        """Closes its connections."""
        for _reader, writer in self._idle:
            writer.transport.abort()
        self._idle.clear()
