"""A server's life from its start to its exit code: clients that leave, overload, drain, deaths; nothing is left."""

import asyncio
import fcntl
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from front import ready_front
from serving import CHAT, COMPLETIONS, LONG, SOON_SILENT, Server, Stream, message, read_until, ready_server, user
from system import alive, cpu_seconds, wait_for

from nanovllm.serve.lifecycle import _Life
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.text_pool import TextPool

ENDED = "vllm:request_success_total"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two rows at a time, four in flight."""
    with ready_server(tmp_path_factory.mktemp("small"), "--max-num-seqs", "2", "--max-num-queued-reqs", "4") as started:
        yield started


def test_a_log_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    """Once the pipe was full each line waited for a reader, and with it everything."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    with Server(tmp_path, output=theirs, simulated=True) as server:
        url = re.findall(rb"http://[\d.]+:\d+", read_until(ours, b" ready: "))[0].decode()
        with httpx.Client(base_url=url, timeout=20) as client:
            for _ in range(100):
                assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200
            assert client.get("/health").status_code == 200
        assert server.stop() == 0
    os.close(ours)


@pytest.mark.parametrize(("stream", "n"), [(True, 1), (False, 1), (True, 4), (False, 4)])
def test_client_that_leaves_is_aborted(small: Server, stream: bool, n: int) -> None:
    """Also where some completions still wait: two run at a time. One closes its sending side alone."""
    wait_for(lambda: small.num_running() == 0, "rest")
    before = small.metric(ENDED, finished_reason="abort")
    computed = small.metric("vllm:iteration_tokens_total_sum")
    with small.connect() as connection:
        connection.sendall(message(CHAT, LONG | {"stream": stream, "n": n}))
        wait_for(lambda: small.num_running() == n, "request")
        if stream:
            assert connection.recv(10).startswith(b"HTTP/1.1 2")
        if n == 1:
            connection.shutdown(socket.SHUT_WR)
            wait_for(lambda: small.num_running() == 0, "abort")
    wait_for(lambda: small.num_running() == 0, "abort")
    wait_for(lambda: httpx.get(small.url + "/load").json()["running"] == 0, "end in the engine")
    assert small.metric(ENDED, finished_reason="abort") - before == n
    assert small.metric("vllm:iteration_tokens_total_sum") - computed < 1900 * n, "the engine went on to the end"


def test_client_that_leaves_while_its_prompt_is_tokenized(small: Server) -> None:
    """Nothing of it reaches the engine. On a busy machine a client may leave too late; then others are asked."""
    long = message(CHAT, LONG | {"messages": user("the cat " * 700), "max_tokens": 600})
    asked_for = partial(small.metric, "vllm:prefix_cache_queries_total")

    def found() -> float:
        """Prompt tokens that reached the engine, of eight clients that left and one that stayed."""
        wait_for(lambda: small.num_running() == 0, "rest")
        before = asked_for()
        for _ in range(8):
            with small.connect() as connection:
                connection.sendall(long)
                linger = struct.pack("ii", 1, 0)  # a reset, which comes as fast as the body
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        # Until they are noticed they hold all places.
        wait_for(lambda: httpx.post(small.url + CHAT, json=LONG | {"max_tokens": 1}).status_code == 200, "a place")
        return asked_for() - before

    assert any(0 < found() < 100 for _ in range(8)), "prompts of clients that are gone"


def test_a_key_cannot_take_all_places_that_wait() -> None:
    """Two rows and six in flight: one key of two may have half of the four that wait."""
    keys = ("--api-key", "greedy", "--api-key", "patient")
    with (
        ready_front("--max-num-seqs", "2", "--max-num-queued-reqs", "6", *keys) as server,
        ThreadPoolExecutor(1) as pool, server.client("greedy") as greedy, server.client("patient") as patient,
    ):  # fmt: skip
        in_flight = partial(server.num_running, "patient")
        with greedy.stream("POST", CHAT, json=LONG | {"n": 4, "stream": True}):
            wait_for(lambda: in_flight() == 4, "requests")
            refused = greedy.post(CHAT, json=LONG | {"max_tokens": 1})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            told = greedy.post("/v1/messages", json={"messages": user("a"), "max_tokens": 1}).json()["error"]
            assert told["type"] == "rate_limit_error"
            waiting = pool.submit(patient.post, CHAT, json=LONG | {"max_tokens": 1})
            wait_for(lambda: in_flight() == 5 or waiting.done(), "request")
        assert waiting.result().status_code == 200
        wait_for(lambda: in_flight() == 0, "abort")
        assert greedy.post(CHAT, json=LONG | {"max_tokens": 1}).status_code == 200
        assert server.metric("vllm:admission_rejections_total", reason="key_full") == 2


def test_overload() -> None:
    """Four rows in flight."""
    with (
        ready_front("--max-num-seqs", "2", "--max-num-queued-reqs", "4") as server, server.client() as client,
        client.stream("POST", CHAT, json=LONG | {"stream": True, "n": 4}) as running,
    ):  # fmt: skip
        stream = running.iter_bytes()  # kept: httpx closes the response with it
        next(stream)
        refused = client.post(CHAT, json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert client.get("/health").status_code == 200
        assert server.metric("vllm:admission_rejections_total", reason="queue_full") == 1


def test_slow_client_is_let_go_and_a_second_signal_ends_it(tmp_path: Path) -> None:
    with ready_server(tmp_path, limits={"SLOW_SECONDS": 1.0, "WRITE_BUFFER": 16384}) as server:
        with server.connect(4096) as slow:
            slow.sendall(message(CHAT, LONG | {"stream": True, "n": 8, "logprobs": True, "top_logprobs": 20}))
            wait_for(lambda: server.num_running() == 8, "request")
            answer = httpx.post(server.url + CHAT, json=LONG | {"max_tokens": 8}, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 8, "others do not notice"
            wait_for(lambda: server.num_running() == 0, "end of the slow stream", 40)
        assert server.metric("vllm:slow_clients_closed_total") == 1
        stream = Stream(server.client())
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: server.health().status_code == 503, "draining")
        server.process.send_signal(signal.SIGINT)  # the second ends it at once
        assert server.process.wait(60) == 0
        assert stream.last()["error"]["code"] == "shutting_down"


def test_silent_streams_get_comments_and_sigterm_drains(tmp_path: Path) -> None:
    """Also one that waits for its first token: a proxy must not take it for dead. All processes get the signal, as from
    systemd."""
    arguments = ("--max-num-seqs", "1", "--tensor-parallel-size", "2", "--shutdown-timeout", "300")
    with ready_server(tmp_path, *arguments, limits={"PING_SECONDS": 0.1}) as server:
        processes = server.everything()
        stream = Stream(server.client(), max_tokens=200)
        with httpx.stream("POST", server.url + CHAT, json=LONG | {"stream": True}, timeout=60) as waiting:
            assert waiting.status_code == 200
            pieces = waiting.iter_text()
            assert next(pieces).startswith(":")
            assert not stream.is_over
        for process in processes:
            os.kill(process, signal.SIGTERM)
        wait_for(lambda: server.health().status_code == 503, "draining")
        assert server.health().json()["status"] == "draining"
        refused = httpx.post(server.url + CHAT, json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert stream.last(200)["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(60) == 0
        wait_for(lambda: not alive(processes), "end of all processes")


def test_an_answer_that_is_being_written_when_the_server_ends_is_sent() -> None:
    """A large one takes seconds, in which its request is no longer in the book."""

    async def end() -> None:
        life, pool, is_written = _Life("", ServeOptions(), Mock(), Mock(), 0.0), TextPool(Metrics()), threading.Event()
        life._front = Mock(now=time.monotonic, book=Mock(requests={}), pool=pool)
        life._http = Mock(has_unsent=False, finish=AsyncMock())
        writing = asyncio.create_task(pool.in_thread(Mock(key=None), partial(is_written.wait, 5), 1))
        await asyncio.sleep(0)
        ending = asyncio.create_task(life._drain())
        await asyncio.sleep(0.1)
        assert not ending.done()
        is_written.set()
        assert await writing and await asyncio.wait_for(ending, 20) == 0

    asyncio.run(end())


def test_shutdown_does_not_wait_for_ever(tmp_path: Path) -> None:
    """After --shutdown-timeout streams end with an error."""
    with ready_server(tmp_path, "--shutdown-timeout", "0.5", simulated=True) as server:
        stream = Stream(server.client(), n=16)
        assert server.stop(signal.SIGINT) == 0
        assert stream.last()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize("victim", ["engine", "engine that drains", "engine that stands still", "rank"])
def test_death_of_the_engine_ends_everything(tmp_path: Path, victim: str) -> None:
    """Also where its process is stopped, and not dead: its socket stays open."""
    ranks = ("--tensor-parallel-size", "2") if victim == "rank" else ()
    stands_still = victim == "engine that stands still"
    limits = SOON_SILENT if stands_still else None
    with (
        ready_server(tmp_path, *ranks, limits=limits, simulated=not ranks) as server, ThreadPoolExecutor(1) as pool
    ):
        processes = server.everything()
        stream = Stream(server.client(), n=8)
        whole = pool.submit(httpx.post, server.url + CHAT, json=LONG | {"n": 8}, timeout=60)
        wait_for(lambda: server.num_running() == 16, "both requests")
        if victim == "engine that drains":
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: server.health().status_code == 503, "draining")
        killed = server.ranks[0] if victim == "rank" else server.engines[0]
        os.kill(killed, signal.SIGSTOP if stands_still else signal.SIGKILL)
        if stands_still:
            health = wait_for(lambda: (said := server.health()).status_code == 503 and said, "word of it")
            assert health.json() == {"status": "silent"}
        error = stream.last()["error"]
        assert error["type"] == "server_error" and (error["code"] == "engine_dead" or victim == "engine that drains")
        assert whole.result(60).status_code == 500
        assert server.process.wait(60) == 1 and stands_still == ("gave no sign of life for 10 s" in server.log)
        wait_for(lambda: not alive(processes), "end of all processes")


def test_death_of_the_front_ends_everything(tmp_path: Path) -> None:
    with ready_server(tmp_path, "--tensor-parallel-size", "2") as server:
        processes = server.everything()
        assert len(processes) >= 3
        stream = Stream(server.client())
        server.process.kill()
        with pytest.raises(httpx.TransportError):
            stream.last()
        wait_for(lambda: not alive(processes), "end of all processes")


def test_idle_costs_nothing(server: Server) -> None:
    wait_for(lambda: server.num_running() == 0, "rest")
    processes = server.everything()

    def rest() -> bool:
        before = cpu_seconds(processes)
        time.sleep(3)
        return cpu_seconds(processes) - before <= 0.02

    wait_for(rest, "rest")


def test_unix_socket_and_request_timeout(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with ready_server(tmp_path, "--uds", str(path), "--request-timeout", "1", simulated=True) as server:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://server", timeout=30) as client:
            assert client.get("/health").status_code == 200
            answer = client.post(CHAT, json=LONG | {"n": 16})
            assert answer.status_code == 408, answer.text
            assert answer.headers["x-should-retry"] == "false", "OpenAI's clients would treble a load that is too high"
            wait_for(lambda: client.get("/load").json()["server_load"] == 0, "abort")
        assert server.stop() == 0
        assert not path.exists()
