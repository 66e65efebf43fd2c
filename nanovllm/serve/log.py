"""The server's log: one line an event on standard error, as text or as JSON."""

import atexit
import json
import logging
import os
import queue
import threading
import time
from typing import Any

_MOST_LINES = 10_000
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
    """Writes in a thread of its own: a pipe that nobody reads holds nothing up but itself. Lines beyond those that may
    wait are left out."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str] = queue.Queue(_MOST_LINES)
        self._num_left_out = 0
        threading.Thread(target=self._write, name="nanovllm-log", daemon=True).start()
        atexit.register(self._drain)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._num_left_out += 1

    def _write(self) -> None:
        descriptor = self.stream.fileno()
        while True:
            text = self._lines.get()
            if count := self._num_left_out:
                self._num_left_out = 0
                text = f"{text}\n{count} lines of the log were left out: nobody read it"
            left = memoryview(f"{text}\n".encode("utf-8", "backslashreplace"))
            try:
                while left:
                    left = left[os.write(descriptor, left) :]
            except OSError:
                pass  # nobody can read it any more
            self._lines.task_done()

    def _drain(self) -> None:
        """Waits for the last lines, but for no reader."""
        deadline = time.monotonic() + _LAST_SECONDS
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)


def set_up_logging(form: str) -> None:
    """`form`: "text" or "json"."""
    handler = _Handler()
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    logger = logging.getLogger("nanovllm.serve")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
