#!/usr/bin/env python
"""Measures the server's front process: CPU a streamed token and an unstreamed request, with a simulated engine.

    python scripts/bench_front.py --streams 400 --rate 40        # 16,000 tokens a second
    python scripts/bench_front.py --api chat --streams 64 --rate 200

Real HTTP over the loopback: the front, the simulator and the clients are three processes. CPU time is the front's user
and system time as the kernel counts it, over the tokens that the clients received meanwhile.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nanovllm.cli.http_client import Client  # noqa: E402

DEMO = ROOT / "assets" / "demo-qwen3"
TEXT = "Once upon a time there was a small cat who lived in a house by the sea, and every day it said: good morning!"


def start_front(
    rate: float, template: str | None = None, **options: Any
) -> tuple["subprocess.Popen[bytes]", str]:
    """The front with simulators; returns its process and URL. `template`: a file, in place of the model's. `options`:
    more of simulated_engine.py, or data_parallel_size."""
    from nanovllm.text.checkpoint import CheckpointTokenizer

    options |= {"rate": rate, "text": CheckpointTokenizer(DEMO).encode(TEXT)}
    code = (
        "import sys; from nanovllm.host import handle; handle.MODULE = 'simulated_engine'\n"
        "from nanovllm.serve.lifecycle import serve; from nanovllm.serve.options import ServeOptions\n"
        f"sys.exit(serve({str(DEMO)!r}, {options!r}, ServeOptions(port=0, chat_template={template!r})))"
    )
    places = os.pathsep.join((str(ROOT), str(ROOT / "scripts")))
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (the front goes on writing to it)
    process = subprocess.Popen([sys.executable, "-c", code], stderr=log, env={**os.environ, "PYTHONPATH": places})
    while True:
        log.seek(0)
        text = log.read()
        if process.poll() is not None:
            raise SystemExit(text)
        if " ready: " in text:
            return process, re.findall(r"http://[\d.]+:\d+", text)[0]
        time.sleep(0.05)


def request(api: str, max_tokens: int, stream: bool, tools: bool) -> tuple[str, str, bytes]:
    """Method, path and body."""
    path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    prompt: dict[str, Any] = chat if api == "chat" else {"prompt": TEXT}
    if tools:
        prompt["tools"] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    body = {"model": str(DEMO), **prompt, "max_tokens": max_tokens, "stream": stream}
    return "POST", path, json.dumps(body).encode()


class Counter:
    """Chunks that all clients have received."""

    def __init__(self) -> None:
        self.chunks = 0


async def read_stream(url: str, message: tuple[str, str, bytes], counter: Counter) -> None:
    async with Client(url) as client, client.request(*message) as response:
        while not response.is_complete:
            await response.read()
            counter.chunks += response.take().count(b"data: {")


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def bench_streams(process: int, url: str, arguments: argparse.Namespace) -> None:
    counter = Counter()
    tokens = int(arguments.rate * (arguments.seconds + 4))
    message = request(arguments.api, tokens, True, arguments.chat_template is not None)
    streams = [asyncio.create_task(read_stream(url, message, counter)) for _ in range(arguments.streams)]
    await asyncio.sleep(2.0)  # all have begun
    chunks, cpu, begin = counter.chunks, cpu_seconds(process), time.monotonic()
    await asyncio.sleep(arguments.seconds)
    chunks, cpu, seconds = counter.chunks - chunks, cpu_seconds(process) - cpu, time.monotonic() - begin
    wanted = arguments.streams * arguments.rate
    print(
        f"{arguments.api}: {arguments.streams} streams, {chunks / seconds:,.0f} of {wanted:,.0f} tokens/s, "
        f"front {1e6 * cpu / max(1, chunks):.1f} us a token, {100 * cpu / seconds:.0f} % of a core"
    )
    await asyncio.gather(*streams)


async def bench_requests(process: int, url: str, arguments: argparse.Namespace) -> None:
    message = request(arguments.api, 1, False, False)
    async with Client(url) as client:
        cpu, begin = cpu_seconds(process), time.monotonic()
        for _ in range(arguments.requests):
            async with client.request(*message) as response:
                await response.body()
    cpu, seconds = cpu_seconds(process) - cpu, time.monotonic() - begin
    each = 1e3 / arguments.requests
    print(f"{arguments.api}: unstreamed, front {each * cpu:.2f} ms of CPU a request, {each * seconds:.2f} ms in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--api", choices=("completions", "chat"), default="completions")
    parser.add_argument("--streams", type=int, default=400)
    parser.add_argument("--rate", type=float, default=40.0, help="steps a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--chat-template", help="one with tools and reasoning: the chats then bring a tool")
    parser.add_argument("--requests", type=int, default=1000, help="unstreamed ones, one after another")
    arguments = parser.parse_args()
    for rate, bench in ((arguments.rate, bench_streams), (1e5, bench_requests)):
        process, url = start_front(rate, arguments.chat_template)
        try:
            asyncio.run(bench(process.pid, url, arguments))
        finally:
            process.terminate()
            process.wait(20)


if __name__ == "__main__":
    main()
