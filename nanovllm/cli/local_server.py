"""A server of our own for one command: `nanovllm serve` in a child process, on a Unix socket in a folder of its own.

The child (`python -m nanovllm.cli.local_server FD`) ends with the socket that it was started with, so it goes when the
command goes, however that ends.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.cli.http_client import Client
from nanovllm.processes.child import LEFT_TO_PARENT, end, start_linked

_POLL = 0.05  # seconds between two looks at /health
_EXIT_PATIENCE = 15.0
_LONGEST_FOLDER = 80
"""Bytes of TMPDIR's path: with the names below it, that of a socket has at most 107."""


class LocalServer:
    """A server for `model`, with the engine's options, until `close`."""

    def __init__(self, model: str, engine_options: dict[str, Any], options: Mapping[str, Any] = {}) -> None:
        """options: more of ServeOptions, in JSON's types."""
        fits = len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_FOLDER
        self._folder = Path(tempfile.mkdtemp(prefix="nanovllm-", dir=None if fits else "/tmp"))
        self._log = self._folder / "log"
        uds = str(self._folder / "socket")
        self.url = f"unix:{uds}"
        server = {"uds": uds, "ui": False, "shutdown_timeout": 0.0, **options}
        told = json.dumps([model, engine_options, server]).encode() + b"\n"
        try:
            self.process, self._link = start_linked("nanovllm.cli.local_server", str(self._log))
            self._link.sendall(told)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def wait_until_ready(self, quiet: bool = False) -> None:
        """Waits for the model; shows how far it is on a terminal's standard error. Raises OSError where it fails."""
        asyncio.run(self._wait(not quiet and sys.stderr.isatty()))

    async def _wait(self, shown: bool) -> None:
        begin = time.monotonic()
        async with Client(self.url) as client:
            while True:
                if self.process.poll() is not None:
                    raise OSError("\n".join(["the server has ended:", *self.log.splitlines()[-20:]]))
                with contextlib.suppress(OSError):
                    async with client.request("GET", "/health") as response:
                        health = await response.json()
                    if health["status"] == "ok":
                        break
                    if shown and "stage" in health:
                        seconds = time.monotonic() - begin
                        print(f"\r\x1b[K{health['stage']} ({seconds:.0f} s)", end="", file=sys.stderr, flush=True)
                await asyncio.sleep(_POLL)
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def close(self) -> None:
        """Ends the server and waits for its end."""
        self._link.close()
        try:
            end(self.process, _EXIT_PATIENCE)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def main(fd: int, log: str) -> int:
    """Entry point of the child process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_PARENT)  # they end this server
    number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(number, 1)
    os.dup2(number, 2)
    link = socket.socket(fileno=fd)
    reader = link.makefile("rb")
    if not (told := reader.readline()):  # the command is gone already
        shutil.rmtree(Path(log).parent, ignore_errors=True)
        return 1
    model, engine, server = json.loads(told)
    server = {name: tuple(value) if isinstance(value, list) else value for name, value in server.items()}

    def watch() -> None:
        reader.read()  # returns when the command is gone
        for _ in range(2):  # the server may be making its socket there; before the signal, which may end us at once
            shutil.rmtree(Path(log).parent, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)

    from nanovllm.serve.lifecycle import serve
    from nanovllm.serve.options import ServeOptions

    threading.Thread(target=watch, daemon=True).start()
    return serve(model, engine, ServeOptions(**server))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
