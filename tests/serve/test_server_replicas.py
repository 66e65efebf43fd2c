"""A server over two replicas, which it holds itself: one that is killed or stands still loses no request, and calls
reach both."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from front import ready_front
from serving import CHAT, LONG, OPENING, SOON_SILENT, ready_server
from system import wait_for

KEY = {"authorization": "Bearer admin"}


def text(url: str, seed: int) -> str:
    answer = httpx.post(url + CHAT, json=LONG | {"seed": seed, "max_tokens": 100}, headers=KEY, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "died by signal 9"), (signal.SIGSTOP, "gave no sign of life for 10 s")]
)
def test_two_replicas(number: int, reason: str, tmp_path: Path) -> None:
    options = ("--data-parallel-size", "2", "--admin-api-key", "admin", "--max-num-seqs", "4")
    with ready_server(tmp_path, *options, limits=SOON_SILENT) as server, ThreadPoolExecutor(6) as pool:
        engines = server.engines
        assert len(engines) == 2, "no process in between"
        expected = [*pool.map(lambda seed: text(server.url, seed), range(6))]
        again = [pool.submit(text, server.url, seed) for seed in range(6)]
        with httpx.Client(base_url=server.url, headers=KEY, timeout=60) as client:
            wait_for(lambda: client.get("/load").json()["running"], "request")
        os.kill(engines[0], number)
        assert not all(each.done() for each in again)
        assert [each.result() for each in again] == expected
        wait_for(lambda: f"is being restarted: {reason}" in server.log, "line of the log")
        assert httpx.post(f"{server.url}/pause", headers=KEY, timeout=60).json() == {"status": "paused"}
        assert httpx.get(f"{server.url}/is_paused", headers=KEY, timeout=60).json() == {"is_paused": True}
        assert httpx.post(f"{server.url}/resume", headers=KEY, timeout=60).json() == {"status": "resumed"}
        assert text(server.url, 0) == expected[0]
        assert server.stop() == 0


def test_requests_that_wait_for_a_replica_are_counted_until_they_leave() -> None:
    """Also while no replica says anything of itself."""
    body = json.dumps(LONG).encode()
    with ready_front("--data-parallel-size", "2", "--max-num-seqs", "1") as front, ExitStack() as clients:
        for _ in range(8):  # each replica takes 3
            client = clients.enter_context(front.connect())
            client.sendall(OPENING + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: front.num_running() == 8, "requests")
        assert front.metric("vllm:num_requests_waiting") == 2
        clients.close()
        wait_for(lambda: not front.num_running(), "end")
        assert front.metric("vllm:num_requests_waiting") == 0
