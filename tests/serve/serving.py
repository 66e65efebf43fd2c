"""Starts `nanovllm serve`, and looks at what it leaves."""

import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import fork_server
import httpx
import pytest
import simulated_engine
from programs import end_with_test_run
from prometheus_client.parser import text_string_to_metric_families
from system import PATIENCE, wait_for

from nanovllm.text.checkpoint import CheckpointTokenizer

# Each client and each call of httpx would read the certificates of all authorities: 20 ms, as long as a quick test.
httpx._transports.default.create_ssl_context = cache(httpx.create_ssl_context)
ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "assets" / "demo-qwen3"
ENGINE = ("--device", "cpu", "--max-num-seqs", "32", "--num-kvcache-blocks", "1024")
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
JSON = {"content-type": "application/json"}
OPENING = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
"""Headers of a chat but for those of its body."""
QUESTION, ANSWER = "What is the capital of Italy?", "The capital of Italy is Rome."
"""A question, and the demo model's answer where nothing is sampled."""
MOST_FILES = 256
"""Descriptors that a server may open at first, as most systems let it."""
SOON_SILENT = {"nanovllm.host.handle:SILENCE": 10.0, "nanovllm.serve.api.basics:_SILENT_SECONDS": 2.0}
"""Limits under which an engine that stands still is noticed within seconds."""


def user(text: str) -> list[dict[str, str]]:
    """Messages of a chat that says one thing."""
    return [{"role": "user", "content": text}]


ASK: dict[str, Any] = {"messages": user(QUESTION), "temperature": 0}
LONG: dict[str, Any] = {
    "messages": user("Once upon a time"), "max_tokens": 1900, "ignore_eos": True, "temperature": 1.0, "seed": 1,
}  # fmt: skip
"""Chats: a short one, whose answer is known, and one that takes until it is left."""


def _before_it_runs() -> None:
    """Sets a bound of descriptors, and an end with the test run."""
    end_with_test_run()
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _children(process: int) -> list[int]:
    """Processes that this one has started, from any of its threads; not the one that forks them in tests."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    found = [int(child) for task in tasks for child in task.read_text().split()]
    return [child for child in found if not fork_server.is_server(child)]


def simulated_options() -> dict[str, Any]:
    """Options of simulated_engine.py: it answers each prompt with ANSWER, over and over if the end is ignored."""
    text = [*CheckpointTokenizer(DEMO).encode(ANSWER), simulated_engine.END]
    return {"text": text, "rate": 500, "shift": 0, "max_model_len": 2048}


class Served(ABC):
    """A server that answers, in whichever process."""

    @property
    @abstractmethod
    def url(self) -> str: ...

    @property
    @abstractmethod
    def log(self) -> str:
        """Lines that it has logged."""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def health(self) -> httpx.Response:
        return httpx.get(self.url + "/health", timeout=PATIENCE)

    def num_running(self, key: str | None = None) -> int:
        """Completions in flight."""
        with self.client(key) as client:
            return int(client.get("/load").json()["server_load"])

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, timeout=PATIENCE, headers=headers)

    def connect(self, read_buffer: int | None = None, seconds: float = PATIENCE) -> socket.socket:
        """A connection of a client that takes at most so many bytes before it reads them."""
        connection = socket.socket()
        if read_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_buffer)
        connection.settimeout(seconds)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def send(self, *pieces: bytes, seconds: float = 20.0) -> bytes:
        """Sends bytes as they are; returns all that comes until the server closes."""
        found = b""
        with self.connect(seconds=seconds) as connection:
            with suppress(OSError):  # refused before all of it was sent
                for piece in pieces:
                    connection.sendall(piece)
            with suppress(ConnectionResetError):
                while data := connection.recv(1 << 16):
                    found += data
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name and these labels."""
        families = text_string_to_metric_families(httpx.get(self.url + "/metrics", timeout=PATIENCE).text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


class Server(Served):
    """One run of the command."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        model: Path | str = DEMO,
        env: dict[str, str] | None = None,
        limits: dict[str, Any] | None = None,
        first: str = "",
        output: int | None = None,
        simulated: bool = False,
        executed: bool = False,
    ) -> None:
        """`limits`: bounds of nanovllm/serve/limits.py, or of a module that is named before a colon, that take other
        values, so that a test need not wait as long. `first`: what the process runs before it takes them over.
        `output`: descriptor that it writes to and that is closed here, by default a file. `simulated`: its engine is a
        process without a model, which is ready at once. `executed`: it starts as a user starts it, where that is
        what is tested."""
        if simulated:
            limits = {"nanovllm.host.handle:MODULE": "simulated_engine", **(limits or {})}
            more = {"SIMULATED_ENGINE": json.dumps(simulated_options()), "PYTHONPATH": str(ROOT / "scripts")}
            env = more | (env or {})
        self.log_file = folder / "server.log"
        command = [sys.executable, "-m", "nanovllm", "serve", str(model), "--served-model-name", "demo", "--port", "0"]
        if limits:
            named = [(("nanovllm.serve.limits:" + name).rsplit(":", 2)[-2:], value) for name, value in limits.items()]
            patches = "; ".join(f"setattr(import_module({m!r}), {name!r}, {value!r})" for (m, name), value in named)
            code = f"import sys; from importlib import import_module; {patches}; from nanovllm.cli.main import main"
            command[1:3] = ["-c", f"{first}{code}; sys.exit(main())"]
        env = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **(env or {})}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env["PYTHONPATH"]]))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        self.began = time.monotonic()
        command += [*ENGINE, *arguments]
        with open(self.log_file if output is None else output, "wb") as log:
            if fork_server.is_fit() and not (simulated or executed):
                self.process = fork_server.ForkedCommand(command, log.fileno(), environment, MOST_FILES)
                return
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True, preexec_fn=_before_it_runs
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        found = wait_for(lambda: re.search(r"((?:https?|unix)://\S+) answers", self.log), "port")
        return str(found[1])

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log
            return " ready: " in self.log

        wait_for(ready, "readiness")

    @property
    def engines(self) -> list[int]:
        """Process ids of the engines, each of which leads a session with its ranks."""
        return list(wait_for(lambda: _children(self.process.pid), "engine"))

    @property
    def ranks(self) -> list[int]:
        """Process ids of the first engine's ranks but the first, and of its other helpers."""
        return list(wait_for(lambda: _children(self.engines[0]), "rank"))

    def everything(self) -> set[int]:
        """All processes of this server."""
        found, todo = set(), [self.process.pid]
        while todo:
            found.add(process := todo.pop())
            todo += _children(process)
        return found

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


@contextmanager
def ready_server(folder: Path, *arguments: str, **options: Any) -> Iterator[Server]:
    """A server that has loaded its model. Takes what Server takes."""
    with Server(folder, *arguments, **options) as started:
        started.wait_until_ready()
        yield started


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests that only ask questions, in folders whose conftest.py imports this."""
    with ready_server(tmp_path_factory.mktemp("server")) as started:
        yield started
        assert "Traceback" not in started.log


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


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Chunks of a request's stream."""
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        return list(events(response))


class Stream:
    """A long chat that is streamed, and read by a thread of its own; it has begun."""

    def __init__(self, client: httpx.Client, **changes: Any) -> None:
        self.events: list[dict[str, Any]] = []
        pool = ThreadPoolExecutor(1)
        self._end = pool.submit(self._read, client, LONG | {"stream": True} | changes)
        pool.shutdown(wait=False)
        wait_for(lambda: len(self.events) > 3 or self.is_over, "stream")

    def _read(self, client: httpx.Client, body: dict[str, Any]) -> None:
        with client.stream("POST", CHAT, json=body) as response:
            self.events.extend(events(response))

    @property
    def is_over(self) -> bool:
        return self._end.done()

    def last(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """The last event, when it has come."""
        self._end.result(seconds)
        return self.events[-1]

    def text_and_end(self) -> tuple[str, str]:
        """The text of one completion, when it has ended, and why it has."""
        reason = self.last()["choices"][0]["finish_reason"]
        return "".join(event["choices"][0]["delta"].get("content", "") for event in self.events), reason


def message(path: str, body: dict[str, Any] | bytes) -> bytes:
    """A request as it goes over a connection."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n%b" % (len(content), content)


def read_until(descriptor: int, end: bytes) -> bytes:
    """Bytes that come from a pipe, a terminal or a socket, until `end` is in it."""
    found = b""
    while end not in found:
        assert select.select([descriptor], [], [], PATIENCE)[0], found
        data = os.read(descriptor, 1 << 16)
        assert data, found[-300:]
        found += data
    return found


def refusal(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of a raw answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]
