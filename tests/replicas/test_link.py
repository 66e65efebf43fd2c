"""Messages between a front and its replicas: all arrive, in order, and nobody waits for each other."""

import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from processes.process_checks import wait_until
from replica_workload import DEMO

from nanovllm import SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.errors import ReplicaError
from nanovllm.models.registry import read_model_config
from nanovllm.processes.child import start_linked
from nanovllm.processes.framing import framed
from nanovllm.replicas import engine, link
from nanovllm.replicas.channel import Channel
from nanovllm.replicas.inbox import Inbox
from nanovllm.replicas.link import Lost, ProcessLink, ReplicaLink
from nanovllm.replicas.messages import Answer, Ready, Start
from nanovllm.tokenizer import Tokenizer


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


@pytest.mark.parametrize("spin", [0.0, 20.0])
def test_another_threads_event_ends_the_wait(spin: float) -> None:
    inbox = Inbox()
    threading.Timer(0.05, inbox.put, ["event"]).start()
    began = time.monotonic()
    assert inbox.take(timeout=20, spin_until=began + spin) == ["event"]
    assert time.monotonic() - began < 10
    assert inbox.take() == [] and not inbox.has_events()
    inbox.close()


@pytest.mark.parametrize("patience", [None, 0.1])
def test_front_and_replica_that_both_send_do_not_wait_for_each_other(
    patience: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica does not read while it cannot send, and nobody takes anything out meanwhile. `patience`: what the
    program gives its own sockets."""
    monkeypatch.setattr(link, "_MOST_UNSENT", 1 << 20)
    inbox = Inbox()
    socket.setdefaulttimeout(patience)
    try:
        echo = ProcessLink(0, cast(Start, "start"), inbox, "echo_replica")
    finally:
        socket.setdefaulttimeout(None)
    sent = [os.urandom(1 << 16) for _ in range(60)]
    for message in sent:
        echo.send(echo.pack(message))
    received: list[Any] = []
    deadline = time.monotonic() + 20
    while len(received) < 3 * (len(sent) + 1) and time.monotonic() < deadline:
        received += [message for _, message in inbox.take(timeout=1)]
    assert received[::3] == received[1::3] == received[2::3] == ["start", *sent]
    echo.close(patience=0)
    inbox.close()


def test_a_replica_whose_end_fails_is_lost_though_its_process_would_go_on() -> None:
    inbox = Inbox()
    stuck = ProcessLink(0, cast(Start, "start"), inbox, "stuck_replica")
    deadline, events = time.monotonic() + 20, []
    while not events and time.monotonic() < deadline:
        events = inbox.take(timeout=1)
    assert events == [(stuck, "ended with exit code 1")]
    stuck.close(patience=0)
    inbox.close()


def test_a_replica_of_a_program_without_output_ends_in_order() -> None:
    output = os.dup(1)
    os.close(1)
    try:
        replica, link = start_linked("nanovllm.replicas.replica")
    finally:
        os.dup2(output, 1)
        os.close(output)
    with link:
        for piece in framed(pickle.dumps(Start(cast(EngineConfig, "no config"), None, None))):
            link.sendall(piece)
        assert replica.wait(60) == 0, "it had said what is wrong"


def test_a_replica_ends_with_a_front_that_has_not_listened_though_a_fork_of_it_lives(tmp_path: Path) -> None:
    path = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (path, *path.parents[1:2])))}
    said = tmp_path / "pids"
    with said.open("w") as output:
        subprocess.run([sys.executable, path / "idle_replica.py"], env=environment, stdout=output, timeout=60)
    pid, fork = map(int, said.read_text().split())
    try:
        assert wait_until(lambda: not Path(f"/proc/{pid}").exists())
    finally:
        for left in (pid, fork):
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)


def front_of(links: list[Any], restart: Any, **options: Any) -> tuple[engine.ReplicatedEngine, Inbox]:
    config = EngineConfig(DEMO, max_model_len=64, kvcache_block_size=16, skip_tokenizer_init=True, **options)
    inbox, ready = Inbox(), [Ready(config, 64, {})] * len(links)
    args = (links, restart, inbox, ready, config, read_model_config(config), Tokenizer(config))
    return engine.ReplicatedEngine(*args), inbox


def test_no_step_waits_where_the_last_replica_was_lost_during_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MOST_RESTARTS", 0)
    only = Mock(ReplicaLink, number=0)
    front, inbox = front_of([only], Mock())
    inbox.put((only, Lost("died")))
    with pytest.raises(ReplicaError, match="no replica is left"):
        front.checksum()
    front.add_request([1, 2], SamplingParams())
    with pytest.raises(RuntimeError, match="cannot go on"):
        front.step()
    front.close()


def test_a_checksum_that_no_replica_answers_is_an_error_that_says_so() -> None:
    only = Mock(ReplicaLink, number=0)
    front, inbox = front_of([only], Mock())
    inbox.put((only, Lost("died")))
    with pytest.raises(ReplicaError, match="every replica was lost"):
        front.checksum()
    front.close()


def test_a_thread_whose_turn_comes_after_the_end_is_told_so() -> None:
    front, _ = front_of([Mock(ReplicaLink, number=0)], Mock())
    front.close()
    for late in (front.checksum, lambda: front.load_weights([], "recompute", None), front.step):
        with pytest.raises(RuntimeError, match="this engine is closed"):
            late()


def test_a_replica_that_is_lost_while_it_falls_asleep_starts_when_the_others_wake_up() -> None:
    links, restart = [Mock(ReplicaLink, number=number) for number in range(2)], Mock()
    front, inbox = front_of(links, restart, enable_sleep=True)
    inbox.put((links[1], Lost("died")))
    inbox.put((links[0], Answer(1, 100)))
    assert front.sleep(1, None) == 100
    assert not restart.called
    inbox.put((links[0], Answer(2, None)))
    front.wake_up(None)
    restart.assert_called_once_with(1, 64)
    front.close()


def test_a_replica_that_cannot_be_started_again_takes_no_other_along() -> None:
    links = [Mock(ReplicaLink, number=number) for number in range(2)]
    front, inbox = front_of(links, Mock(side_effect=BlockingIOError("no more processes")))
    inbox.put((links[0], Lost("died")))
    front.step()
    front.add_request([1, 2], SamplingParams())
    front.step()
    assert front._links == [None, links[1]] and links[1].send.call_count == 1
    inbox.put((links[1], Lost("died")))
    with pytest.raises(ReplicaError, match="no replica is left: replica 1: died"):
        front.step()
    front.close()


def test_requests_reach_a_replica_by_as_many_as_a_step_computes() -> None:
    """Messages that bring fewer would make the first steps as small as they are slow."""
    slow = Mock(ReplicaLink, number=0, pack=lambda message: message)
    front, _ = front_of([slow], Mock(), max_num_batched_tokens=64, max_num_seqs=16)
    ids = [front.add_request([7] * 8, SamplingParams()) for _ in range(12)]
    front.step()
    arrived = [[request_id for request_id, *_ in call.args[0][1]] for call in slow.send.call_args_list]
    assert arrived == [ids[:8], ids[8:]]
    front.close()
