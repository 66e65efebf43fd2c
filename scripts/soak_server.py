#!/usr/bin/env python
"""Many short requests to the server, a third of them refused or left by their clients: does anything stay behind?

    python scripts/soak_server.py --requests 100000 --replicas 2

The server has the demo checkpoint, on the CPU. Prints, every --every requests, the resident memory of the
front, of an engine and of the processes that check its grammars (of several engines the mean), and the open descriptors
of front and engines. Exits with 1 where memory of one kind grew by 20 MB after the first --settled requests, where a
descriptor was left, or where a request got an answer that it should not have.
"""

import argparse
import asyncio
import json
import os
import random
import string
import sys
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from nanovllm.cli.http_client import Client  # noqa: E402
from nanovllm.cli.local_server import LocalServer  # noqa: E402

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MOST_GROWTH = 20.0  # MB
KINDS = ("front", "engine", "grammars")


class Ask(NamedTuple):
    """A request, and what it should get. `status` None: the client leaves before the answer is there."""

    path: str
    body: bytes
    status: int | None


def draw(rng: random.Random) -> Ask:
    text = "".join(rng.choices(string.ascii_lowercase + " ", k=rng.randint(1, 40)))
    body: dict[str, Any] = {"prompt": text, "max_tokens": rng.randint(1, 3), "seed": rng.randrange(1 << 30)}
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": rng.randint(1, 3)}
    kind = rng.random()
    if kind < 0.12:
        more = {"ignore_eos": True, "max_tokens": 500, "stream": rng.random() < 0.5, "n": rng.choice((1, 1, 2))}
        return Ask(COMPLETIONS, json.dumps(body | more).encode(), None)
    if kind < 0.33:
        wrong = rng.choice(({"top_p": 7}, {"n": 1000}, {"prompt": []}, {"prompt": "a b " * 3000}, {"stop": [""]}))
        bad = rng.choice((json.dumps(body | wrong).encode(), b"{", json.dumps(body).encode()[:-1]))
        return Ask(COMPLETIONS, bad, 400)
    if kind < 0.36:
        return Ask(COMPLETIONS, json.dumps(body | {"model": "another"}).encode(), 404)
    if kind < 0.42:
        schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [text]}}}}
        function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [text, 1]}}}}
        tools = {"tools": [{"type": "function", "function": function}], "tool_choice": rng.choice(("auto", "required"))}
        return Ask(CHAT, json.dumps(chat | rng.choice((schema, tools))).encode(), 200)
    if kind < 0.45:
        known = rng.choice(({"choice": ["a", "b"]}, {"regex": "[a-c]{1,9}"}, {"json_object": True}, {"choice": [text]}))
        return Ask(COMPLETIONS, json.dumps(body | {"structured_outputs": known}).encode(), 200)
    if kind < 0.46:
        wrong = rng.choice(({"regex": f"({text}"}, {"json": {"type": text}}, {"grammar": f"start: {len(text)}x"}))
        return Ask(COMPLETIONS, json.dumps(body | {"structured_outputs": wrong}).encode(), 400)
    if kind < 0.49:
        more = {"logprobs": True, "top_logprobs": rng.choice((0, 5)), "stream": rng.random() < 0.5}
        return Ask(CHAT, json.dumps(chat | more).encode(), 200)
    if kind < 0.6:
        return Ask(CHAT, json.dumps(chat | {"stream": rng.random() < 0.5}).encode(), 200)
    more = {"stream": rng.random() < 0.5, "logprobs": rng.choice((None, None, 3)), "n": rng.choice((1, 1, 1, 3))}
    return Ask(COMPLETIONS, json.dumps(body | more).encode(), 200)


def named(memory: list[float]) -> str:
    return ", ".join(f"{name} {each:.1f} MB" for name, each in zip(KINDS, memory, strict=True))


def children(process: int) -> list[int]:
    found = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            found += [int(child) for child in file.read_text().split()]
    return found


def descendants(process: int) -> list[int]:
    return [each for child in children(process) for each in (child, *descendants(child))]


def resident(process: int) -> float:
    """MB in memory; 0 for a process that has ended."""
    with suppress(OSError, IndexError):
        status = Path(f"/proc/{process}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024 / 1e6
    return 0.0


class Soak:
    """The clients of a server."""

    def __init__(self, given: argparse.Namespace, server: LocalServer) -> None:
        self._given, self._server, self._rng = given, server, random.Random(given.seed)
        self._left, self._done = given.requests, 0
        self.statuses: Counter[str] = Counter()
        self.mistakes: list[str] = []

    def resources(self) -> tuple[list[float], int]:
        """MB resident of each of KINDS, of several engines the mean; open descriptors of front and engines."""
        front = self._server.process.pid
        engines = children(front)
        grammars = [each for engine in engines for each in descendants(engine)]
        each = [sum(map(resident, processes)) / max(1, len(engines)) for processes in (engines, grammars)]
        return [resident(front), *each], sum(len(os.listdir(f"/proc/{process}/fd")) for process in (front, *engines))

    async def _client(self) -> None:
        async with Client(self._server.url) as client:
            while self._left > 0:
                self._left -= 1
                ask = draw(self._rng)
                try:
                    async with asyncio.timeout(120 if ask.status else self._rng.random() * 0.05):
                        async with client.request("POST", ask.path, ask.body) as response:
                            await response.body()
                except TimeoutError:
                    self.statuses["left"] += 1
                    if ask.status:
                        self.mistakes.append(f"no answer: {ask.path} {ask.body[:200]!r}")
                else:
                    self.statuses[str(response.status)] += 1
                    if response.status != (ask.status or 200):
                        self.mistakes.append(f"{response.status}, not {ask.status}: {ask.path} {ask.body[:200]!r}")
                self._done += 1

    async def run(self) -> bool:
        """All requests; returns whether all is well."""
        _, at_first = self.resources()
        begin = time.monotonic()
        clients = [asyncio.create_task(self._client()) for _ in range(self._given.clients)]
        settled: list[float] = []
        shown = 0
        while not all(client.done() for client in clients):
            await asyncio.sleep(0.2)
            memory, descriptors = self.resources()
            if not settled and self._done >= self._given.settled:
                settled = memory
            if self._done >= shown + self._given.every:
                shown = self._done // self._given.every * self._given.every
                rate = self._done / (time.monotonic() - begin)
                print(f"{shown} requests, {rate:.0f} a second: {named(memory)}, {descriptors} descriptors", flush=True)
        for client in clients:
            client.result()
        async with Client(self._server.url) as watcher:
            while (await watcher.get("/load"))["server_load"]:
                await asyncio.sleep(0.1)
        await asyncio.sleep(2)
        memory, descriptors = self.resources()
        growth = [now - then for now, then in zip(memory, settled or memory, strict=True)]
        print(
            f"{self._done} requests in {time.monotonic() - begin:.0f} s {dict(self.statuses)}: "
            f"grown since the first {self._given.settled}: {named(growth)}; "
            f"descriptors {at_first} before, {descriptors} after"
        )
        for mistake in self.mistakes[:10]:
            print(mistake)
        is_clean = not self.mistakes and "Traceback" not in self._server.log
        links = self._given.replicas  # of each engine to the process that checks its grammars
        return max(growth) < MOST_GROWTH and descriptors <= at_first + links and is_clean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=48, help="at a time")
    parser.add_argument("--every", type=int, default=5_000)
    parser.add_argument("--settled", type=int, default=20_000, help="requests after which memory must not grow")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    options = {"device": "cpu", "num_kvcache_blocks": 4096, "data_parallel_size": given.replicas}
    with closing(LocalServer(str(ROOT / "assets" / "demo-qwen3"), options)) as server:
        server.wait_until_ready()
        return 0 if asyncio.run(Soak(given, server).run()) else 1


if __name__ == "__main__":
    sys.exit(main())
