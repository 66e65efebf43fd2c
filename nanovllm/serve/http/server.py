"""The listening side, in an event loop of our own."""

import asyncio
import resource
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from typing import Any

from nanovllm.serve import limits
from nanovllm.serve.http.app import App
from nanovllm.serve.http.connection import Connection, Shared
from nanovllm.serve.options import ServeOptions

_BACKLOG = 2048
"""Connections that wait to be accepted."""
_ACCEPTS = 8
"""Connections that asyncio accepts in one turn: it takes some turns to close one that is refused, and the open ones
need descriptors, of which SPARE_DESCRIPTORS are left."""
_FLUSH_SECONDS = 0.3  # that the last answers get to leave
_POLL_SECONDS = 0.02  # seconds between two looks at what has not left


def run_loop(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Runs `main` in the fastest event loop that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


class HttpServer:
    """Accepts connections on one socket."""

    def __init__(self, app: App, options: ServeOptions, listener: socket.socket) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - limits.SPARE_DESCRIPTORS
        self._shared = Shared(app, max(most, 1))
        self._listener, self._tls = listener, _tls_context(options)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        create = loop.create_unix_server if self._listener.family == socket.AF_UNIX else loop.create_server
        options: dict[str, Any] = {"sock": self._listener, "backlog": _ACCEPTS}
        if self._tls is not None:
            options |= {"ssl": self._tls, "ssl_handshake_timeout": limits.HEADER_SECONDS}
        self._server = await create(lambda: Connection(self._shared), **options)
        self._listener.listen(_BACKLOG)

    @property
    def has_unsent(self) -> bool:
        """Whether something of an answer has not left."""
        return any(each.transport.get_write_buffer_size() for each in self._shared.connections)

    async def finish(self) -> None:
        """Lets the last answers leave, which takes a moment at most."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while (self._shared.tasks or self.has_unsent) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)

    async def stop(self) -> None:
        """Closes every connection, whatever it is doing."""
        assert self._server is not None
        self._server.close()
        for connection in list(self._shared.connections):
            connection.transport.abort()
        for task in list(self._shared.tasks):
            task.cancel()
        await asyncio.sleep(0)


def _tls_context(options: ServeOptions) -> ssl.SSLContext | None:
    """TLS context of the listening socket; None: plain HTTP."""
    if options.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except ssl.SSLError as error:
        files = f"ssl_certfile={options.ssl_certfile!r}, ssl_keyfile={options.ssl_keyfile!r}"
        raise ValueError(f"{files}: must be a certificate and its key, in PEM ({error.reason})") from None
    return context
