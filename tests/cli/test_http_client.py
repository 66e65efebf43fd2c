"""Commands as clients: what they read from a server, and how they let go of their own."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from serve.serving import ROOT
from system import wait_for

from nanovllm.cli import local_server
from nanovllm.cli.http_client import Client
from nanovllm.processes.child import end, start_linked

LATE_SOCKET = """
import os
def rmdir(path, *, dir_fd=None, real=os.rmdir):
    os.rmdir = real
    open(f"{path}/socket", "w").close()
    real(path, dir_fd=dir_fd)
os.rmdir = rmdir
"""


def asked(read: Callable[[Client], Awaitable[Any]], *pieces: bytes) -> Any:
    """Result of `read` at a server that answers each request by these pieces, and then closes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()

    async def ask() -> Any:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server, Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            return await read(client)

    return asyncio.run(ask())


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_events_cut_at_every_byte(newline: str) -> None:
    """With both kinds of line ends."""
    body = "".join(f"data: {event}{newline}{newline}" for event in ('{"a": 1}', '{"a": 2}', "[DONE]")).encode()

    async def read(client: Client) -> list[dict[str, int]]:
        async with client.stream("/", {}) as events:
            return [event async for _, event in events]

    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert asked(read, head, *(bytes([byte]) for byte in body)) == [{"a": 1}, {"a": 2}]


def test_an_answer_that_ends_with_its_connection() -> None:
    """It has neither a length nor chunks, and its connection is not used again."""

    async def read(client: Client) -> list[Any]:
        return [await client.get("/"), await client.get("/")]

    assert asked(read, b'HTTP/1.1 200 OK\r\n\r\n{"a"', b": 1}") == [{"a": 1}, {"a": 1}]


def test_a_server_whose_command_is_killed_at_its_start_leaves_nothing(tmp_path: Path) -> None:
    """Before it listens to signals, too, and while it makes its socket."""
    (tmp_path / "code").mkdir()
    (tmp_path / "temporary").mkdir()
    (tmp_path / "code" / "sitecustomize.py").write_text(LATE_SOCKET)
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": str(tmp_path / "code")}
    code = "import os; from nanovllm.cli.local_server import LocalServer as S; S('none', {}); os._exit(0)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    wait_for(lambda: not list((tmp_path / "temporary").iterdir()), "end of its folder", 10)


def test_a_server_of_a_command_whose_folder_for_temporary_files_has_a_long_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's path has at most 107 bytes."""
    long = tmp_path / ("a" * 107)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    server = local_server.LocalServer("none", {})
    try:
        path = server.url.removeprefix("unix:")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path + "-of-a-test")
    finally:
        server.close()
    assert not list(long.iterdir()) and not Path(path).parent.exists()


@pytest.mark.parametrize("is_started", [False, True])
def test_a_command_that_cannot_say_what_to_serve_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_started: bool
) -> None:
    processes = []

    def start(*args: str) -> Any:
        if not is_started:
            raise OSError("no more processes")
        process, link = start_linked(*args)
        link.shutdown(socket.SHUT_WR)
        processes.append(process)
        return process, link

    monkeypatch.setattr(local_server, "start_linked", start)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError):
        local_server.LocalServer("none", {})
    assert [process.wait(20) for process in processes] == [1] * is_started and not list(tmp_path.iterdir())


def test_a_child_that_does_not_end_is_killed() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        end(process, 0.05)
        assert process.poll() is not None
