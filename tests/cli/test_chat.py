"""`chat` and `complete`: through pipes, and on a terminal."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import end_with_test_run
from running import nanovllm
from serve.serving import ROOT, Server
from system import wait_for

CAPITAL = "What is the capital of France?"


def test_pipe(server: Server) -> None:
    done = nanovllm("chat", "-q", "--url", server.url, "--temperature", "0", input=CAPITAL + "\n")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "\x1b" not in done.stdout and done.stderr == ""
    done = nanovllm("chat", "--url", server.url, "--max-tokens", "5", input=CAPITAL)
    assert "5 tokens" in done.stderr and "tok/s" in done.stderr


def test_complete(server: Server) -> None:
    done = nanovllm("complete", "--url", server.url, "--temperature", "0", "--max-tokens", "8", input="1 2 3 4 5\n")
    assert done.stdout.startswith("1 2 3 4 5 6 7 8")
    done = nanovllm("complete", "-q", "--url", server.url, "--temperature", "0", "-p", "1 2 3 4 5", "--stop", "8")
    assert done.stdout.strip() == "6 7"


def test_a_model_of_its_own_that_leaves_nothing(tmp_path: Path) -> None:
    command = ("chat", "-q", "--device", "cpu", "--temperature", "0", "--num-kvcache-blocks", "64")
    done = nanovllm(*command, input=CAPITAL, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert "Paris" in done.stdout, done.stderr
    assert list(tmp_path.glob("nanovllm-*")) == []


def test_mistakes(server: Server) -> None:
    for arguments, said in (
        (["--url", "http://localhost:1"], "no server"),
        (["--url", server.url, "--temperature", "-1"], "temperature"),
        (["--url", server.url, "some-model"], "not together"),
        (["--url", server.url, "-tp", "2"], "--tensor-parallel-size"),
        (["--device", "cpu", "/no/such/folder"], "no such folder"),
        (["--url", "nowhere"], "http://host:port"),
    ):
        done = nanovllm("chat", *arguments, input="hi")
        assert done.returncode == 2, arguments
        assert said in done.stderr and "Traceback" not in done.stderr


def _before_it_runs() -> None:
    """Tests may run in the background of a shell, where Ctrl-C is ignored."""
    end_with_test_run()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """The command as somebody sees it who sits before it."""

    def __init__(self, *arguments: str) -> None:
        self._main, side = pty.openpty()
        command = [sys.executable, "-m", "nanovllm", *arguments]
        self.process = subprocess.Popen(
            command, stdin=side, stdout=side, stderr=side, cwd=ROOT, start_new_session=True,
            env={**os.environ, "TERM": "dumb"}, preexec_fn=_before_it_runs,
        )  # fmt: skip
        os.close(side)
        self.seen = ""

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self._main, text.encode())

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """Reads until a text has come; returns what came since the last `type`."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            if select.select([self._main], [], [], 0.1)[0]:
                self.seen += os.read(self._main, 4096).decode("utf-8", "replace")
        return self.seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._main)


@pytest.fixture
def terminal(server: Server) -> Iterator[Terminal]:
    made = Terminal("chat", "--url", server.url, "--temperature", "0", "--extra-body", '{"ignore_eos": true}')
    yield made
    made.close()


def test_terminal(terminal: Terminal, server: Server, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"

    def say(text: str, until: str = "\n> ") -> None:
        terminal.type(text + "\n")
        terminal.wait_for(until)

    terminal.wait_for("> ")
    say("Once upon a time", " ")
    wait_for(server.num_running, "answer")
    terminal.wait_for("\x1b[0m")
    terminal.process.send_signal(signal.SIGINT)  # stops the answer, not the program
    found = re.search(r"([\d,]+) tokens", terminal.wait_for("tok/s"))
    assert found and int(found[1].replace(",", "")) < 1000, terminal.seen
    terminal.wait_for("\n> ")
    wait_for(lambda: server.num_running() == 0, "abort")
    say(f"/save {saved}")
    assert [each["role"] for each in json.loads(saved.read_text())] == ["user", "assistant"]
    say("/system Be brief.")
    say(f"/save {saved}")
    assert json.loads(saved.read_text()) == [{"role": "system", "content": "Be brief."}]
    say("/help", "/reset")
    terminal.type("/exit\n")
    assert terminal.process.wait(20) == 0
