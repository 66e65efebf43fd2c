"""Messages between a front and its replicas: all arrive, in order, and nobody waits for each other."""

import os
import pickle
import random
import socket
import threading
import time
from typing import Any, cast

import pytest

from nanovllm.replicas import link
from nanovllm.replicas.channel import Channel, framed
from nanovllm.replicas.inbox import Inbox
from nanovllm.replicas.link import ProcessLink
from nanovllm.replicas.messages import Start


def test_a_channel_hands_out_whole_messages_however_they_are_cut() -> None:
    chance = random.Random(1)
    ours, theirs = socket.socketpair()
    messages = [chance.randbytes(chance.choice([0, 1, 90, 70_000])) for _ in range(60)]
    stream = b"".join(piece for message in messages for piece in framed(pickle.dumps(message)))
    channel, received = Channel(theirs), []
    while stream:
        size = min(len(stream), chance.choice([1, 7, 300, 50_000]))
        ours.sendall(stream[:size])
        stream = stream[size:]
        received += channel.receive()
        if chance.random() < 0.2:
            assert channel.receive() == []
    ours.close()
    while len(received) < len(messages):
        received += channel.receive()
    assert received == messages
    with pytest.raises(EOFError):
        channel.receive()
    channel.close()


def test_another_threads_event_ends_the_wait() -> None:
    inbox = Inbox()
    threading.Timer(0.05, inbox.put, ["event"]).start()
    began = time.monotonic()
    assert inbox.get(timeout=20) == "event"
    assert time.monotonic() - began < 10
    assert inbox.get() is None and not inbox.has_events()
    inbox.close()


def test_front_and_replica_that_both_send_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica does not read while it cannot send, and nobody takes anything out meanwhile."""
    monkeypatch.setattr(link, "_MOST_UNSENT", 1 << 20)
    inbox = Inbox()
    echo = ProcessLink(0, cast(Start, "start"), inbox, "echo_replica")
    sent = [os.urandom(1 << 16) for _ in range(60)]
    for message in sent:
        echo.send(echo.pack(message))
    received: list[Any] = []
    while len(received) < 3 * (len(sent) + 1):
        event = inbox.get(timeout=20)
        assert event is not None
        received.append(event[1])
    assert received[::3] == received[1::3] == received[2::3] == ["start", *sent]
    echo.close(patience=0)
    inbox.close()
