"""The engine's process around an engine that does nothing: what it says when something dies."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from nanovllm.serve import frames
from nanovllm.serve.engine_process import EngineProcess

ROOT = Path(__file__).resolve().parents[2]
_CODE = """
import os, socket, sys, time
from types import SimpleNamespace
from nanovllm.serve import engine_process

class Executor:
    begin = time.monotonic()
    @property
    def failed(self):
        return {fails} and time.monotonic() > self.begin + 0.2
    def check(self):
        raise RuntimeError("rank 1 died")

config = SimpleNamespace(device="cpu")
idle = {{"is_busy": lambda: False, "wait_for_work": lambda seconds, until: time.sleep(0.05)}}
nothing = dict.fromkeys(("close", "wake"), lambda *_: None)
engine = SimpleNamespace(config=config, executor=Executor(), **idle, **nothing)
engine_process.describe = lambda engine: {{}}
engine_process.EngineProcess._load = lambda self, start: engine
os._exit(engine_process.EngineProcess(socket.socket(fileno=int(sys.argv[1]))).run())
"""


@contextmanager
def process(fails: bool) -> Iterator[tuple["subprocess.Popen[bytes]", socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    command = [sys.executable, "-c", _CODE.format(fails=fails), str(theirs.fileno())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stderr=subprocess.DEVNULL) as child:
        theirs.close()
        try:
            ours.sendall(frames.pack(frames.Start("model", {})))
            yield child, ours
        finally:
            ours.close()
            child.kill()


def replies(link: socket.socket) -> Iterator[frames.UpFrame]:
    buffer = frames.FrameBuffer()
    while data := link.recv(1 << 16):
        yield from map(frames.up_decoder.decode, buffer.feed(data))


def failure(link: socket.socket) -> str:
    return next(frame.message for frame in replies(link) if isinstance(frame, frames.Failed))


def test_rank_that_dies_while_nothing_runs() -> None:
    with process(fails=True) as (child, link):
        assert "rank 1 died" in failure(link)
        assert child.wait(10) == 1


def test_frame_that_nobody_understands() -> None:
    """The thread that takes requests in does not end in silence."""
    with process(fails=False) as (child, link):
        assert isinstance(next(replies(link)), frames.Ready)
        link.sendall(b"\x04\x00\x00\x00\xffabc")
        assert "ValidationError" in failure(link)
        child.wait(10)


def test_refused_request_leaves_nothing() -> None:
    def refuse(*_: object) -> None:
        raise ValueError("too long")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = EngineProcess(theirs)
        process._engine = SimpleNamespace(check_request=print, add_request=refuse)  # type: ignore[assignment]
        process._add(frames.Add(7, b"", {"prompt_logprobs": 1}))
        [said] = map(frames.up_decoder.decode, frames.FrameBuffer().feed(ours.recv(1 << 16)))
        assert said == frames.Refused(7, "too long") and not process._prompts_due
