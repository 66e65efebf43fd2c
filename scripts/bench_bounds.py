#!/usr/bin/env python
"""Delays and shares that the way to an engine adds, each beside its bound: run on an idle machine.

    python scripts/bench_bounds.py                    # all of them, about two minutes
    python scripts/bench_bounds.py way throughput     # some

way          one stream: from an engine's step to the program that reads its token, over HTTP and by the library
first-token  from a request to its first token, where the engine computes nothing
throughput   400 requests at once: the library's fleet and HTTP, over engines whose steps have a fixed length
replicas     the same over HTTP, with one engine and with two
health       from the command `nanovllm serve` to the first answer of /health

Engines are simulated (simulated_engine.py), but for the last: their steps sleep.
"""

import argparse
import asyncio
import http.client
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import bench_replicas
from bench_front import DEMO, ROOT, Counter, read_stream, request, start_front

from nanovllm import SamplingParams
from nanovllm.engine.prompt import Prompt

_REQUESTS, _TOKENS, _ROWS, _RATE = 400, 128, 128, 40.0


@contextmanager
def front(rate: float, **options: object) -> Iterator[str]:
    """The URL of a server over simulated engines."""
    process, url = start_front(rate, **options)
    try:
        yield url
    finally:
        process.terminate()
        process.wait(20)


def show(name: str, seconds: list[float], bound: str = "") -> None:
    """Prints p50 and p99."""
    p50, p99 = statistics.median(seconds), sorted(seconds)[int(0.99 * len(seconds))]
    print(f"{name}: p50 {1e3 * p50:.3f}, p99 {1e3 * p99:.3f} ms{bound}")


def connect(url: str) -> socket.socket:
    """A connection that blocks, which costs less than any client."""
    link = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def chunk_times(link: socket.socket, message: tuple[str, str, bytes]) -> list[float]:
    """The moments at which a request was sent and the chunks of its stream came."""
    method, path, body = message
    head = f"{method} {path} HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    data, found = b"", [time.monotonic()]
    link.sendall(head.encode() + body)
    while b"0\r\n\r\n" not in data:
        data = link.recv(1 << 16)
        if b"data: {" in data:
            found.append(time.monotonic())
    return found


def delays(came: list[float], stamps: Path) -> list[float]:
    """Seconds from the last step that was sent to each moment at which something came."""
    sent = [moment for (moment,) in struct.iter_unpack("<d", stamps.read_bytes())]
    return [moment - sent[bisect(sent, moment) - 1] for moment in came]


def way() -> None:
    tokens, rate = 1000, 100.0
    with tempfile.NamedTemporaryFile() as file:
        with front(rate, stamps=file.name) as url, connect(url) as link:
            came = chunk_times(link, request("completions", tokens, True, False))[1:]
        show("a token's way, HTTP", delays(came, Path(file.name)), " (bound 0.10)")
    with tempfile.NamedTemporaryFile() as file:
        engine, came = bench_replicas.start(1, rate=rate, stamps=file.name), []
        engine.add_request(Prompt([5] * 20), SamplingParams(max_tokens=tokens, ignore_eos=True))
        while engine.has_unfinished_requests():
            if engine.step():
                came.append(time.monotonic())
        engine.close()
        show("a token's way, library", delays(came, Path(file.name)))


def first_token() -> None:
    times = []
    with front(0.0) as url, connect(url) as link:
        for _ in range(500):
            begin, first, *_ = chunk_times(link, request("completions", 2, True, False))
            times.append(first - begin)
    show("a first token's way, HTTP", times[20:], " (bound 0.35 more than in the library)")
    engine, times = bench_replicas.start(1), []
    for _ in range(500):
        begin = time.monotonic()
        engine.add_request(Prompt([5] * 20), SamplingParams(max_tokens=2, ignore_eos=True))
        while not engine.step():
            pass
        times.append(time.monotonic() - begin)
        while engine.has_unfinished_requests():
            engine.step()
    engine.close()
    show("a first token's way, library", times[20:], " (bound 0.35 more than in the library)")


def answer(port: int) -> int | None:
    """Status of /health; None where nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def seconds_over_http(replicas: int) -> float:
    async def ask(url: str) -> float:
        message, counter = request("completions", _TOKENS, True, False), Counter()
        begin = time.monotonic()
        await asyncio.gather(*(read_stream(url, message, counter) for _ in range(_REQUESTS)))
        return time.monotonic() - begin

    with front(_RATE, rows=_ROWS, data_parallel_size=replicas) as url:
        return asyncio.run(ask(url))


def throughput() -> None:
    engine = bench_replicas.start(1, rate=_RATE, rows=_ROWS)
    begin = time.monotonic()
    for _ in range(_REQUESTS):
        engine.add_request(Prompt([5] * 60), SamplingParams(max_tokens=_TOKENS, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    library = time.monotonic() - begin
    engine.close()
    seconds = seconds_over_http(1)
    more = f"{seconds / library - 1:+.2%} (bound +1 %)"
    print(f"{_REQUESTS} requests at once: library {library:.2f} s, HTTP {seconds:.2f} s, {more}")


def replicas() -> None:
    one, two = seconds_over_http(1), seconds_over_http(2)
    print(f"{_REQUESTS} requests over HTTP: one engine {one:.2f} s, two {two:.2f} s, {one / two:.2f} x (bound 1.95)")


def health() -> None:
    times = []
    for _ in range(5):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        begin = time.monotonic()
        command = [sys.executable, "-m", "nanovllm", "serve", str(DEMO), "--port", str(port), "--device", "cpu"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT)
        while answer(port) is None:
            time.sleep(0.005)
        times.append(time.monotonic() - begin)
        process.terminate()
        process.wait(30)
    print(f"/health answers after {statistics.median(times):.2f} s, at most {max(times):.2f} (bound 1)")


MEASURES = {
    "way": way, "first-token": first_token, "throughput": throughput, "replicas": replicas, "health": health,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", metavar="measure", help=", ".join(MEASURES))
    measures = parser.parse_args().measures or [*MEASURES]
    if unknown := [name for name in measures if name not in MEASURES]:
        parser.error(f"{unknown[0]}: must be one of {', '.join(MEASURES)}")
    for name in measures:
        MEASURES[name]()


if __name__ == "__main__":
    main()
