"""Life of the server process, from the command to the exit code: bind, start the engine, serve, drain, clean up."""

import asyncio
import ctypes
import errno
import logging
import os
import resource
import signal
import socket
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanovllm.host.engines import Engines
from nanovllm.host.handle import Lost
from nanovllm.serve import errors
from nanovllm.serve.loading import Loading
from nanovllm.serve.log import set_up_logging
from nanovllm.serve.options import ServeOptions

logger = logging.getLogger("nanovllm.serve")
_DESCRIPTORS = 65536
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of malloc.h
_LARGE_BYTES = 1 << 20
_POLL_SECONDS = 0.02  # seconds between two looks at what still runs


def bind(options: ServeOptions) -> socket.socket:
    """The listening socket. Raises OSError naming what is taken, and by which process where that can be seen, or what
    cannot be listened on."""
    if options.uds is not None:
        return _listen(socket.socket(socket.AF_UNIX), _free_path(options.uds), f"uds={options.uds!r}")
    name = f"port {options.port} of {options.host}"
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(f"{name}: {error.strerror}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _listen(listener, address, name)


def _listen(listener: socket.socket, address: Any, name: str) -> socket.socket:
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise OSError(f"{name}: {error.strerror or error}") from None
        owner = _owner_of(address[1])
        by = f" by process {owner}" if owner else ""
        raise OSError(f"{name} is taken{by} ({error.strerror})") from None
    return listener


def _free_path(path: str) -> str:
    """An earlier server may have left its socket: it goes. A file of another kind stays."""
    if os.path.exists(path):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(f"{path} exists and is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(path) != errno.ECONNREFUSED:  # somebody listens, perhaps with a full queue
                raise OSError(f"socket {path} is taken")
        os.unlink(path)
    return path


def _owner_of(port: int) -> int | None:
    """The process of ours that listens on a TCP port."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as lines:
                rows = [line.split() for line in list(lines)[1:]]
        except OSError:
            continue
        listening = (row for row in rows if row[3] == "0A")
        inodes |= {f"socket:[{row[9]}]" for row in listening if int(row[1].rpartition(":")[2], 16) == port}
    for process in filter(str.isdigit, os.listdir("/proc") if inodes else ()):
        try:
            folder = f"/proc/{process}/fd"
            if any(os.readlink(f"{folder}/{fd}") in inodes for fd in os.listdir(folder)):
                return int(process)
        except OSError:
            continue
    return None


def serve(model: str, engine_options: dict[str, Any], options: ServeOptions) -> int:
    """Runs the server until it is told to end; returns the exit code."""
    begin = time.monotonic()
    set_up_logging(options.log_format)
    try:
        listener = bind(options)
    except OSError as error:
        print(f"nanovllm: {error}", file=sys.stderr)
        return 1
    engines = Engines(model, engine_options)
    _allow_descriptors()
    _return_memory()
    try:
        from nanovllm.serve.http.server import run_loop  # while the engine imports

        return run_loop(_Life(model, options, listener, engines, begin).run)
    finally:
        listener.close()
        engines.close()
        if options.uds is not None:
            Path(options.uds).unlink(missing_ok=True)


def _allow_descriptors() -> None:
    """Raises the limit of open files: each connection takes one, and most systems give a process 1,024 unless it asks
    for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _return_memory() -> None:
    """The C library gives memory of large bodies back when they are freed: its own rule keeps up to 32 MiB of each, and
    has memory of its own for each thread."""
    with suppress(AttributeError, OSError):  # another library
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_M_ARENA_MAX, 1)


class _Life:
    """One run of the server."""

    def __init__(
        self, model: str, options: ServeOptions, listener: socket.socket, engines: Engines, begin: float
    ) -> None:
        self._model, self._options, self._listener, self._engines = model, options, listener, engines
        self._begin, self._loading = begin, Loading(options.log_format)
        self._num_signals = 0

    async def run(self) -> int:
        with self._loading:
            return await self._run()

    async def _run(self) -> int:
        from nanovllm.serve.api.routes import ADMIN_ROUTES, ROUTES
        from nanovllm.serve.front import Front
        from nanovllm.serve.http.app import App
        from nanovllm.serve.http.server import HttpServer

        loop = asyncio.get_running_loop()
        front = self._front = Front(self._model, self._options, self._engines, self._loading.show)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        operations = ROUTES | ADMIN_ROUTES if self._options.admin_api_keys else ROUTES
        app = App(front, operations)
        http = self._http = HttpServer(app, self._options, self._listener)
        await http.start()
        logger.info("%s answers; the model is loading", self._url())
        self._loading.show(*front.admission.progress)
        try:
            await self._launch_engines()
            return await self._live()
        finally:
            await http.stop()
            front.engines.close()
            front.log.close()

    async def _launch_engines(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._engines.start)
        except (ValueError, ImportError) as error:
            self._front.on_engine_end(Lost(str(error), type(error)))
        else:
            self._front.engines.listen()

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._front.admission.changed.set()

    async def _live(self) -> int:
        admission = self._front.admission
        while not self._num_signals:
            await admission.changed.wait()
            admission.changed.clear()
            self._loading.close()
            if admission.state == "failed":
                return await self._report_failure()
            if admission.state == "ready" and not self._num_signals:
                self._log_ready()
        return await self._drain()

    def _url(self) -> str:
        options = self._options
        if options.uds is not None:
            return f"unix:{options.uds}"
        host, port, *_ = self._listener.getsockname()
        scheme = "https" if options.ssl_certfile else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def _log_ready(self) -> None:
        model, options = self._front.model, self._options
        if facts := self._engines.ready[0].facts:
            logger.info("attention backend: %s (%s)", facts["attention_backend"], facts["attention_backend_reason"])
        if model.defaults:
            logger.info("sampling defaults of the model: %s", model.defaults)
        local = options.uds is not None or options.host in ("127.0.0.1", "localhost", "::1")
        if not local and not options.api_keys:
            logger.warning("no --api-key is set: anyone who reaches %s can use it", options.host)
        logger.info(
            "ready: %s serves %s, context %d tokens, KV cache %d tokens, after %.1f s",
            *(self._url(), model.name, model.info["max_model_len"], model.info["num_kv_tokens"]),
            time.monotonic() - self._begin,
        )

    async def _report_failure(self) -> int:
        failure = self._front.admission.failure
        assert failure is not None
        logger.error("%s%s", "" if failure.kind is not None else "the engine has failed: ", failure.reason)
        await self._http.finish()
        return 1

    async def _drain(self) -> int:
        front, patience = self._front, self._options.shutdown_timeout
        end = front.now() + patience
        front.admission.become("draining")
        if count := len(front.book.requests):
            logger.info("shutting down: %d requests get %.0f s to finish (a second signal ends them)", count, patience)
        while front.now() < end and self._num_signals < 2:
            if not (front.book.requests or front.pool.requests.total() or self._http.has_unsent):
                break
            await asyncio.sleep(_POLL_SECONDS)
        front.fail(errors.shutting_down())
        await self._http.finish()
        if front.admission.state == "failed":
            return await self._report_failure()
        logger.info("bye")
        return 0
