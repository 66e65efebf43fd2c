"""The server in the process of its tests: the real front with its HTTP and dialects, over an engine without a model."""

import asyncio
import gc
import io
import logging
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock, patch

import simulated_engine
from serving import DEMO, ENGINE, Served, simulated_options
from system import PATIENCE

from nanovllm.cli import serve
from nanovllm.host import handle
from nanovllm.host.engines import Engines
from nanovllm.serve.api.routes import ADMIN_ROUTES, ROUTES
from nanovllm.serve.front import Front
from nanovllm.serve.http.app import App
from nanovllm.serve.http.server import HttpServer, run_loop
from nanovllm.serve.lifecycle import bind


class InProcess(Served):
    """A server that runs in a thread, and its engine in another."""

    def __init__(self, url: str, lines: io.StringIO) -> None:
        self._url, self._lines = url, lines

    @property
    def url(self) -> str:
        return self._url

    @property
    def log(self) -> str:
        return self._lines.getvalue()


@contextmanager
def ready_front(*arguments: str, **environment: str) -> Iterator[InProcess]:
    """A server with these arguments of the command and variables of its environment."""
    command = [str(DEMO), "--served-model-name", "demo", "--port", "0", *ENGINE, *arguments]
    with patch.dict(os.environ, environment):
        model, engine, options = serve.parse(serve.make_parser(), command)
    engine |= simulated_options()
    is_ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def live() -> int:
        thread = threading.get_ident()
        handler.addFilter(lambda record: record.thread == thread)  # those of others log to the same logger
        with patch.object(handle, "_start_process", _start_thread):
            front = Front(model, options, Engines(model, engine))
        routes = ROUTES | ADMIN_ROUTES if options.admin_api_keys else ROUTES
        http = HttpServer(App(front, routes), options, listener)
        await http.start()
        front.engines.listen()
        await front.admission.changed.wait()
        assert front.admission.state == "ready", front.admission.failure
        is_over = asyncio.Event()
        is_ready.set_result((asyncio.get_running_loop(), is_over))
        await is_over.wait()
        await http.stop()
        front.engines.close()
        return 0

    logger, lines = logging.getLogger("nanovllm.serve"), io.StringIO()
    handler = logging.StreamHandler(lines)
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    with bind(options) as listener, ThreadPoolExecutor(1) as pool:
        life = pool.submit(run_loop, live)
        life.add_done_callback(lambda done: is_ready.done() or is_ready.set_exception(done.exception()))
        loop, is_over = is_ready.result(PATIENCE)
        try:
            yield InProcess("http://{}:{}".format(*listener.getsockname()), lines)
        finally:
            loop.call_soon_threadsafe(is_over.set)
            life.result(PATIENCE)
            logger.removeHandler(handler)
            logger.setLevel(level)
            gc.unfreeze()


def _start_thread(module: str, link: socket.socket) -> Any:
    """Runs an engine in a thread of this process; returns what stands for its process."""
    thread = threading.Thread(target=simulated_engine.simulate, args=(link,), daemon=True)
    thread.start()
    return Mock(wait=thread.join, poll=lambda: None if thread.is_alive() else 0)
