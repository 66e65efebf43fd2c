"""The start of a server: what it says meanwhile, and what it refuses to serve or to open."""

import asyncio
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import cast

import httpx
import pytest
from serving import ASK, CHAT, DEMO, ROOT, Server, read_until
from system import alive, cpu_seconds, wait_for

from nanovllm.host import wire
from nanovllm.host.engines import Engines
from nanovllm.serve.errors import ApiError
from nanovllm.serve.front import Front
from nanovllm.serve.lifecycle import bind
from nanovllm.serve.options import ServeOptions


def test_start(tmp_path: Path) -> None:
    with Server(tmp_path, executed=True) as server:
        wait_for(lambda: " answers" in server.log, "port")
        assert cpu_seconds({server.process.pid}) < 2.0, "the front answers soon; others may have the cores meanwhile"
        stages, percents = set(), []
        while (health := server.health()).status_code == 503:
            assert health.json()["status"] == "loading"
            stages.add(health.json()["stage"])
            percents.append(health.json()["percent"])
            refused = httpx.post(server.url + CHAT, json=ASK)
            if refused.status_code != 503:  # it has just become ready
                break
            assert refused.json()["error"]["code"] == "model_loading" and int(refused.headers["retry-after"]) >= 1
            time.sleep(0.05)
        assert percents == sorted(percents) and stages & {"loading weights", "warming up"}
        server.wait_until_ready()
        assert server.health().json() == {"status": "ok"}
        said = [line.partition(" info ")[2] for line in server.log.splitlines()]
        assert len(said) <= 12 and "\x1b" not in server.log
        assert "loading weights" in said and any("importing" in line for line in said)
        [ready] = [line for line in said if line.startswith("ready: ")]
        assert "context 2048 tokens" in ready and server.url in ready
        assert "attention backend: torch (the fastest on cpu)" in said
        front = Path(f"/proc/{server.process.pid}")
        memory = int((front / "status").read_text().split("VmRSS:")[1].split()[0])
        assert memory < 120_000, "the front's memory in KiB"
        assert "libtorch" not in (front / "maps").read_text()
        assert server.stop() == 0


@pytest.mark.slow
def test_bar_on_a_terminal(tmp_path: Path) -> None:
    """Taken away when the model is there; log lines stand above it."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    with Server(tmp_path, output=theirs, env={"TERM": "xterm"}) as server:
        shown = read_until(ours, b" ready: ")
        assert server.stop() == 0
    os.close(ours)
    assert b"loading weights" in shown and "█".encode() in shown
    assert shown.rindex(b"answers; the model is loading") < shown.rindex(b"% ") < shown.rindex(b" ready: ")
    last = shown[shown.rindex(b"% ") : shown.rindex(b" attention backend: ")]
    assert not last.rpartition(b"\r")[0].rpartition(b"\r")[2].strip()


def test_front_imports_no_large_libraries() -> None:
    code = (
        "import sys, nanovllm.serve.api.routes, nanovllm.serve.lifecycle, nanovllm.serve.http.server;"
        "print({'torch', 'numpy', 'transformers', 'opentelemetry'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_port_that_is_taken(server: Server, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with Server(tmp_path, "--port", str(server.port)) as second:
        assert second.process.wait(100) == 1
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0, "before anything is loaded"
    [line] = second.log.splitlines()
    assert str(server.port) in line and str(server.process.pid) in line


def test_what_cannot_be_served_is_named(tmp_path: Path) -> None:
    """A parser while the engine still loads, which may take minutes."""
    for folder, arguments, code, said in (
        ("nothing", (), 2, "no such folder"), ("", (), 1, "': config.json is missing"),
        (DEMO, ("--tool-call-parser", "none-such"), 1, "tool_call_parser='none-such': must be"),
    ):  # fmt: skip
        with Server(tmp_path, *arguments, model=tmp_path / folder) as server:
            assert server.process.wait(60) == code
        assert said in server.log and "Traceback" not in server.log and "ready: " not in server.log


def test_sampling_defaults_that_no_request_can_have() -> None:
    """Said at the start; and an engine that is there before the tokenizer is asked for nothing."""

    async def started() -> Front:
        front = Front("demo", ServeOptions(override_generation_config={"top_p": 3}), cast(Engines, None))
        for frame in (wire.Progress("importing", 10, str(DEMO)), wire.Ready({"vocab_size": 5})):
            front.on_frame(frame)
        with pytest.raises(ApiError, match="loading"):
            front.admission.admit()
        await front.admission.changed.wait()
        return front

    front = asyncio.run(started())
    assert front.admission.state == "failed" and (failure := front.admission.failure) is not None
    assert failure.kind is ValueError and "top_p=3" in failure.reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "192.0.2.1"}, r"port 8000 of 192\.0\.2\.1: (?!taken).+"),
        ({"host": "no host"}, "port 8000 of no host: .+"),
        ({"uds": "/no/folder/socket"}, "uds='/no/folder/socket': .+"),
        ({"chat_template": "/no/file"}, "chat_template='/no/file': must be a file"),
        ({"ssl_keyfile": "/no/file", "ssl_certfile": __file__}, "ssl_keyfile='/no/file': must be a file"),
        ({"generation_config": "/no/folder"}, "generation_config='/no/folder': must be .* a folder with"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_opened_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises((OSError, ValueError), match=f"^{message}"):
        bind(ServeOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_end_while_the_engine_loads(tmp_path: Path, number: int) -> None:
    """However it ends, the engine ends too: before it where it has a say in that."""
    with Server(tmp_path, "--log-format", "json") as server:
        wait_for(lambda: " answers" in server.log, "port")
        wait_for(lambda: len(server.everything()) >= 2, "the engine's process")
        processes = server.everything()
        if number == signal.SIGKILL:
            assert server.stop(number) == -number
            wait_for(lambda: not alive(processes), "end of all processes")
        else:
            assert server.stop(number) == 0 and not alive(processes)
        assert all(json.loads(line)["level"] for line in server.log.splitlines())


def test_unix_socket_of_others(tmp_path: Path) -> None:
    """A socket that nobody listens at is taken over, and nothing else."""
    path, options = tmp_path / "socket", ServeOptions(uds=str(tmp_path / "socket"))
    path.write_text("letters")
    with pytest.raises(OSError, match="not a socket"):
        bind(options)
    assert path.read_text() == "letters"
    path.unlink()
    with bind(options), pytest.raises(OSError, match="taken"):
        bind(options)
    bind(options).close()
