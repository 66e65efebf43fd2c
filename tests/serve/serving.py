"""Starts `nanovllm serve`, and looks at what it leaves."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "assets" / "demo-qwen3"
ENGINE = ("--device", "cpu", "--max-num-seqs", "32", "--num-kvcache-blocks", "1024")
PATIENCE = 60.0


def wait_for(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Polls until `condition` is true; returns what it returned."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.02)
    return found


def session_processes(leader: int) -> list[int]:
    """Processes alive in the session that a process leads or belongs to."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[3]) == leader:
            found.append(int(name))
    return found


class Server:
    """One run of the command."""

    def __init__(self, folder: Path, *arguments: str, model: Path | str = DEMO, env: dict[str, str] | None = None):
        self.log_file = folder / "server.log"
        command = [sys.executable, "-m", "nanovllm", "serve", str(model), "--served-model-name", "demo", "--port", "0"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        self.began = time.monotonic()
        with open(self.log_file, "wb") as log:
            self.process = subprocess.Popen(
                [*command, *ENGINE, *arguments], stdout=log, stderr=log, env=environment, start_new_session=True
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        found = wait_for(lambda: re.search(r"(https?://\S+) answers", self.log), "port", 20)
        return str(found[1])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def health(self) -> httpx.Response:
        return httpx.get(self.url + "/health", timeout=10)

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log
            return " ready: " in self.log

        wait_for(ready, "readiness")

    @property
    def engine(self) -> int:
        """Process id of the engine, which leads a session with its ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(wait_for(lambda: children, "engine")[0])

    def stop(self, number: int = signal.SIGTERM, seconds: float = 20) -> int:
        """Sends a signal and waits; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The chunks of a stream; checks that it ends as it should."""
    done = False
    for line in response.iter_lines():
        if not line or line.startswith(":"):
            continue
        assert not done and line.startswith("data: "), line
        if line == "data: [DONE]":
            done = True
        else:
            yield json.loads(line[6:])
    assert done, "the stream has no end"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
