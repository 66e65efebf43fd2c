"""The listening side: uvicorn's configuration and protocol, in an event loop of our own."""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn

from nanovllm.serve import limits
from nanovllm.serve.http.app import App
from nanovllm.serve.http.protocol import BoundedProtocol, SharedState
from nanovllm.serve.options import ServeOptions

_LAST_WORDS = 0.3  # seconds
_LOOK = 0.02  # seconds between two looks at what has not left


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
        asgi: Any = app
        if options.allowed_origins:
            from starlette.middleware.cors import CORSMiddleware

            origins = list(options.allowed_origins)
            asgi = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        self._config = uvicorn.Config(
            asgi,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=int(limits.KEEP_ALIVE_SECONDS),
        )
        self._config.load()
        self._state = SharedState(app.metrics)
        self._listener, self._tls = listener, _tls_context(options)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        create = loop.create_unix_server if self._listener.family == socket.AF_UNIX else loop.create_server
        self._server = await create(self._protocol, sock=self._listener, ssl=self._tls, backlog=2048)

    def _protocol(self) -> BoundedProtocol:
        loop = asyncio.get_running_loop()
        return BoundedProtocol(config=self._config, server_state=self._state, app_state={}, _loop=loop)

    @property
    def has_unsent(self) -> bool:
        """Whether something of an answer has not left."""
        return any(each.transport.get_write_buffer_size() for each in self._state.connections)

    async def finish(self) -> None:
        """Lets the last answers leave, which takes a moment at most."""
        deadline = time.monotonic() + _LAST_WORDS
        while (self._state.tasks or self.has_unsent) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK)

    async def stop(self) -> None:
        """Closes every connection, whatever it is doing."""
        assert self._server is not None
        self._server.close()
        for connection in list(self._state.connections):
            connection.transport.abort()
        for task in list(self._state.tasks):
            task.cancel()
        await asyncio.sleep(0)


def _tls_context(options: ServeOptions) -> ssl.SSLContext | None:
    """For the listening socket; None: plain HTTP."""
    if options.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    return context
