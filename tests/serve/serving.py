"""Starts `nanovllm serve`, and looks at what it leaves."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from programs import end_with_test_run

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "assets" / "demo-qwen3"
ENGINE = ("--device", "cpu", "--max-num-seqs", "32", "--num-kvcache-blocks", "1024")
PATIENCE = 60.0
SOON_SILENT = {"nanovllm.host.handle:SILENCE": 10.0, "nanovllm.serve.api.basics:_SILENT_SECONDS": 2.0}
"""Limits under which an engine that stands still is noticed within seconds."""


def wait_for(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Polls until `condition` is true; returns what it returned."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.02)
    return found


def alive(processes: set[int]) -> set[int]:
    """Processes of these that run."""
    found = set()
    for process in processes:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.add(process)
    return found


def _before_it_runs() -> None:
    """Sets as many descriptors as most systems give at first, and an end with the test run."""
    end_with_test_run()
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


class Server:
    """One run of the command."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        model: Path | str = DEMO,
        env: dict[str, str] | None = None,
        limits: dict[str, Any] | None = None,
        first: str = "",
    ) -> None:
        """`limits`: bounds of nanovllm/serve/limits.py, or of a module that is named before a colon, that take other
        values, so that a test need not wait as long. `first`: what the process runs before it takes them over."""
        self.log_file = folder / "server.log"
        command = [sys.executable, "-m", "nanovllm", "serve", str(model), "--served-model-name", "demo", "--port", "0"]
        if limits:
            named = [(("nanovllm.serve.limits:" + name).rsplit(":", 2)[-2:], value) for name, value in limits.items()]
            patches = "; ".join(f"setattr(import_module({m!r}), {name!r}, {value!r})" for (m, name), value in named)
            code = f"import sys; from importlib import import_module; {patches}; from nanovllm.cli.main import main"
            command[1:3] = ["-c", f"{first}{code}; sys.exit(main())"]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})}
        self.began = time.monotonic()
        with open(self.log_file, "wb") as log:
            self.process = subprocess.Popen(
                [*command, *ENGINE, *arguments], stdout=log, stderr=log, env=environment, start_new_session=True,
                preexec_fn=_before_it_runs,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        found = wait_for(lambda: re.search(r"((?:https?|unix)://\S+) answers", self.log), "port")
        return str(found[1])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def health(self) -> httpx.Response:
        return httpx.get(self.url + "/health", timeout=PATIENCE)

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log
            return " ready: " in self.log

        wait_for(ready, "readiness")

    @property
    def engine(self) -> int:
        """Process id of the engine, which leads a session with its ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(wait_for(lambda: children.read_text().split(), "engine")[0])

    @property
    def ranks(self) -> list[int]:
        """Process ids of the ranks but the first, and of other helpers of the engine."""
        engine = self.engine
        children = Path(f"/proc/{engine}/task/{engine}/children")
        return [int(each) for each in wait_for(lambda: children.read_text().split(), "rank")]

    def everything(self) -> set[int]:
        """All processes of this server."""
        found = {self.process.pid}
        todo = [self.process.pid]
        while todo:
            parent = todo.pop()
            for task in Path(f"/proc/{parent}/task").glob("*/children"):
                todo += [child for child in map(int, task.read_text().split()) if child not in found]
            found.update(todo)
        return found

    def num_running(self) -> int:
        """Completions in flight."""
        return int(httpx.get(self.url + "/load", timeout=PATIENCE).json()["server_load"])

    def stop(self, number: int = signal.SIGTERM, seconds: float = PATIENCE) -> int:
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
