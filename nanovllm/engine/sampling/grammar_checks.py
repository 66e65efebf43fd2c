"""The process that checks constraints (grammar_server.py), as the engine sees it."""

import logging
import os
import signal
import socket
import struct
import threading
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from nanovllm.engine.sampling.grammar_server import Verdict
from nanovllm.processes.child import end, start_linked

logger = logging.getLogger(__name__)

_MODULE = "nanovllm.engine.sampling.grammar_server"
_PATIENCE = 120.0  # seconds for an answer; the process itself bounds each check, and how many wait
_SEND_SECONDS = 60
_TRIES = 2
_END_SECONDS = 1.0


class _Lost(Exception):
    """The process has ended before it answered."""


class _Server:
    """One such process."""

    def __init__(self, setup: tuple[Any, ...]) -> None:
        """`setup`: arguments of GrammarCompiler. Raises OSError."""
        self._process, ours = start_linked(_MODULE, str(os.getpid()))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        self._link = Connection(ours.detach())
        self._lock = threading.Lock()
        self._numbers = count()
        self._asked: dict[int, Future[Verdict]] = {}
        self.is_ready = self.is_lost = False
        """Whether it has begun to check; whether it is gone."""
        self._reader = threading.Thread(target=self._read, name="nanovllm-grammars", daemon=True)
        self._reader.start()
        with self._lock, suppress(OSError):  # it is gone: the reader finds out
            self._link.send(setup)

    def _read(self) -> None:
        try:
            self._link.recv()
            self.is_ready = True
            while True:
                verdict = Verdict(*self._link.recv())
                self._asked.pop(verdict.number).set_result(verdict)
        except (EOFError, OSError):
            pass
        finally:
            with self._lock:
                self.is_lost = True
                for future in self._asked.values():
                    future.set_exception(_Lost())

    def ask(self, kind: str, text: str) -> Verdict:
        """The answer to a check. Raises _Lost."""
        future: Future[Verdict] = Future()
        try:
            with self._lock:
                if self.is_lost:
                    raise _Lost
                number = next(self._numbers)
                self._asked[number] = future
                self._link.send((number, kind, text))
            return future.result(_PATIENCE)
        except (OSError, TimeoutError):  # it does not read, or does not answer
            self.end()
            raise _Lost from None

    def end(self) -> None:
        """Ends the process and its forks."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the leader of its own group, not waited for yet
        end(self._process, 0.0)
        self._reader.join(_END_SECONDS)
        if not self._reader.is_alive():
            self._link.close()


class GrammarChecks:
    """Checks constraints in a process of its own, which is started when it is needed, also in place of one that is
    lost. From any thread."""

    def __init__(self, *setup: Any) -> None:
        """`setup`: arguments of GrammarCompiler."""
        self._setup = setup
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._owner = os.getpid()
        self._is_closed = False

    def begin(self) -> None:
        """Starts the process, so that it is ready when it is needed."""
        with suppress(OSError):
            self._running()

    def check(self, kind: str, text: str) -> Verdict:
        """The verdict on a constraint: see GrammarCompiler.check. Where no such process can begin, all pass, with a
        line in the log."""
        try:
            for _ in range(_TRIES):
                server = self._running()
                with suppress(_Lost):
                    return server.ask(kind, text)
            if server.is_ready:
                return Verdict(0, f"the process that checks it was lost {_TRIES} times", False)
        except OSError as error:
            logger.warning("no process to check grammars: %s", error)
        logger.warning("a grammar is compiled without bounds on memory and time")
        return Verdict(0)

    def _running(self) -> _Server:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this engine is closed")
            if self._server is not None and self._server.is_lost:
                self._server.end()
                self._server = None
            if self._server is None:
                self._server = _Server(self._setup)
            return self._server

    def close(self) -> None:
        """Ends the process. Harmless when called again, or in a fork."""
        with self._lock:
            self._is_closed = True
            if self._server is not None and os.getpid() == self._owner:
                self._server.end()
            self._server = None
