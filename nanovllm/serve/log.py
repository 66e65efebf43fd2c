"""The server's log: one line an event on standard error, as text or as JSON."""

import atexit
import json
import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

_MOST_LINES = 10_000
_GATHER_SECONDS = 0.02
_LAST_SECONDS = 1.0


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": record.created, "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{moment} {record.levelname.lower()} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Handler(logging.StreamHandler[Any]):
    """Writes in a thread of its own: a pipe that nobody reads holds nothing up but itself. Lines that come within a
    moment are written together, since to wake the thread costs more than a line. Lines beyond those that may wait are
    left out."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque()
        self._num_left_out = 0
        self._has_lines, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._write, name="nanovllm-log", daemon=True)
        self._thread.start()
        atexit.register(self._drain)

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._lines) >= _MOST_LINES:
            self._num_left_out += 1
            return
        self._lines.append(self.format(record))
        if not self._has_lines.is_set():
            self._has_lines.set()

    def _write(self) -> None:
        descriptor = self.stream.fileno()
        while self._has_lines.wait() and (self._lines or not self._is_over.is_set()):
            self._is_over.wait(_GATHER_SECONDS)
            self._has_lines.clear()
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            if count := self._num_left_out:
                self._num_left_out = 0
                lines.append(f"{count} lines of the log were left out: nobody read it")
            left = memoryview("".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))
            with suppress(OSError):  # nobody can read it any more
                while left:
                    left = left[os.write(descriptor, left) :]
            if self._is_over.is_set():
                self._has_lines.set()

    def _drain(self) -> None:
        """Waits for the last lines, but for no reader."""
        self._is_over.set()
        self._has_lines.set()
        self._thread.join(_LAST_SECONDS)


def set_up_logging(form: str) -> None:
    """`form`: "text" or "json"."""
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # no line shows them
    handler = _Handler()
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    logger = logging.getLogger("nanovllm.serve")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
