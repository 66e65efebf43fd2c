"""Shares of one client in what all use, connections and text threads: others are served meanwhile."""

import asyncio
import threading
from unittest.mock import MagicMock

import pytest

from nanovllm.serve import limits
from nanovllm.serve.http.call import Call
from nanovllm.serve.http.connection import Connection, Shared
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.text_pool import TextPool

QUESTION = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
POSTED = b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\n"


@pytest.mark.parametrize(
    ("clients", "given_up"),
    [
        ([("1.1.1.1", b""), ("2.2.2.2", b""), ("2.2.2.2", b"")], 1),
        ([("1.1.1.1", b""), ("2.2.2.2", QUESTION), ("2.2.2.2", b"GET / HT")], 2),
        ([("1.1.1.1", b""), ("2.2.2.2", POSTED + b"123456789"), ("2.2.2.2", POSTED + b"1")], 2),
        ([("1.1.1.1", b""), ("a:b:c:d::1", b""), ("a:b:c:d:e::2", b"")], 1),
        ([("a:b:c:d::1", b""), ("::ffff:1.1.1.1", b""), ("::ffff:1.1.1.1", b"")], 1),
        ([("1.1.1.1", b""), ("2.2.2.2", b""), ("3.3.3.3", b"")], 0),
        ([("1.1.1.1", b""), ("2.2.2.2", QUESTION), ("2.2.2.2", QUESTION)], None),
        ([(None, QUESTION), (None, b""), (None, b"")], 1),
    ],
    ids=["silent", "headers", "body", "IPv6", "IPv4 in IPv6", "one each", "all are served", "Unix socket"],
)
def test_the_address_with_most_connections_gives_one_up(
    clients: list[tuple[str | None, bytes]], given_up: int | None
) -> None:
    """Which is not being served, and where all are open; others would be kept out."""

    async def ask() -> None:
        never = asyncio.get_running_loop().create_future()

        async def answer(call: Call) -> None:
            await never

        shared, transports = Shared(MagicMock(answer=answer), 3), []
        for address, sent in [*clients, ("9.9.9.9", b"")]:
            peer = "" if address is None else (address, 80)
            transports.append(MagicMock(is_closing=lambda: False, get_extra_info=lambda _, peer=peer: peer))
            connection = Connection(shared)
            connection.connection_made(transports[-1])
            connection.data_received(sent)
        assert [index for index, each in enumerate(transports) if each.abort.called] == (
            [] if given_up is None else [given_up]
        )
        assert transports[-1].close.called == (given_up is None) and len(shared.connections) == 3
        for each in [*shared.connections]:
            each.connection_lost(None)
        assert not shared._by_address
        never.cancel()

    asyncio.run(ask())


LARGE, SMALL = limits.BODY_BYTES, 2000


@pytest.mark.parametrize(
    ("num_keys", "sizes", "statuses"),
    [
        (0, [(None, LARGE), (None, LARGE), (None, LARGE), (None, SMALL)], [0, 0, 503, 0]),
        (1, [(0, LARGE), (0, LARGE), (0, LARGE), (0, SMALL)], [0, 0, 503, 0]),
        (2, [(0, LARGE), (0, LARGE), (1, LARGE), (0, SMALL), (1, SMALL), (2, SMALL)], [0, 429, 0, 0, 0, 0]),
        (2, [(0, limits.SMALL_BODY)] * 2500 + [(1, SMALL)], [0] * 2048 + [429] * 452 + [0]),
    ],
    ids=["no key", "one key", "two keys", "many small ones"],
)
def test_one_key_leaves_the_threads_to_others(
    num_keys: int, sizes: list[tuple[int | None, int]], statuses: list[int]
) -> None:
    """Texts wait for the threads within bounds, which two bodies of one user once filled for all."""

    async def ask() -> list[int]:
        pool, is_over = TextPool(Metrics(), num_keys), threading.Event()
        asked = [asyncio.ensure_future(pool.in_thread(MagicMock(key=key), is_over.wait, size)) for key, size in sizes]
        await asyncio.sleep(0)
        found = [getattr(each.exception(), "status", -1) if each.done() else 0 for each in asked]
        is_over.set()
        await asyncio.gather(*asked, return_exceptions=True)
        assert not pool.requests.total() and not pool._bytes.total()
        return found

    assert asyncio.run(ask()) == statuses
