"""A replica as an actor of a Ray cluster, and the front's hold on it."""

import os
import pickle
import queue
import threading
import time
import traceback
from collections import deque
from typing import Any

import ray

from nanovllm.replicas.inbox import Inbox
from nanovllm.replicas.link import EXIT_GRACE, SILENCE, Lost, ReplicaLink
from nanovllm.replicas.messages import Start
from nanovllm.replicas.ray_cluster import Placement
from nanovllm.replicas.replica import Replica

_LARGE = 1 << 16  # bytes of a message that all replicas fetch from one place, and that the front waits for
_LARGE_AHEAD = 2
_POLL_SECONDS = 1.0


class HandedIntake:
    """The intake of a replica to which another thread hands what comes."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def next(self, seconds: float) -> None:
        if seconds:
            self._rung.wait(seconds)
            self._rung.clear()

    def wake(self) -> None:
        self._rung.set()


class ReplicaActor:
    """An engine beside its ranks, in an actor's process."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._intake = HandedIntake()
        self._replica = Replica(self._said.put, self._intake)

    @ray.method(concurrency_group="down")
    def begin(self, packed: bytes) -> None:
        """`packed`: Start."""
        threading.Thread(target=self._run, args=(packed,), name="nanovllm-replica", daemon=True).start()

    def _run(self, packed: bytes) -> None:
        try:
            self._replica.run(pickle.loads(packed))
        finally:
            self._said.put(Lost("ended"))

    @ray.method(concurrency_group="down")
    def handle(self, packed: bytes) -> None:
        """A message of the front."""
        try:
            self._replica.handle(pickle.loads(packed))
        except Exception as error:
            traceback.print_exc()
            self._said.put(Lost(f"{type(error).__name__}: {error}"))
        self._intake.wake()

    @ray.method(concurrency_group="up")
    def poll(self) -> bytes:
        """All that the replica has said since the last call; waits a moment for it."""
        said = []
        try:
            said.append(self._said.get(timeout=_POLL_SECONDS))
            while True:
                said.append(self._said.get_nowait())
        except queue.Empty:
            pass
        return pickle.dumps(said, pickle.HIGHEST_PROTOCOL)

    def pid(self) -> int:
        return os.getpid()


class RayLink(ReplicaLink):
    """A replica in an actor, on the node of its bundle."""

    def __init__(self, number: int, start: Start, inbox: Inbox, placement: Placement) -> None:
        super().__init__(number, inbox)
        options = {"concurrency_groups": {"down": 1, "up": 1}, "max_restarts": 0, "max_task_retries": 0}
        actor: Any = ray.remote(**options, **placement.options(number, **placement.share()))(ReplicaActor)
        self._actor = actor.remote()
        self._large: deque[Any] = deque()
        """Answers to large messages that the actor may not have taken in."""
        self._ended = threading.Event()
        self._actor.begin.remote(self.pack(start))
        self._listener = threading.Thread(target=self._listen, name=f"nanovllm-replica-{number}", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """On its node."""
        return ray.get(self._actor.pid.remote(), timeout=SILENCE)

    def pack(self, message: Any) -> Any:
        packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        return packed if len(packed) < _LARGE else ray.put(packed)

    def send(self, packed: Any) -> None:
        if self._ended.is_set():
            return
        taken = self._actor.handle.remote(packed)
        if isinstance(packed, bytes):
            return
        self._large.append(taken)
        while len(self._large) > _LARGE_AHEAD and not self._ended.is_set():
            if ray.wait([self._large[0]], timeout=_POLL_SECONDS)[0]:
                self._large.popleft()

    def rouse(self) -> None:
        """It would take as long as the request itself."""

    def _listen(self) -> None:
        reason: str | None = None
        while reason is None:
            try:
                for message in pickle.loads(ray.get(self._actor.poll.remote(), timeout=SILENCE)):
                    if isinstance(message, Lost):
                        reason = str(message)
                    else:
                        self._take(message)
            except ray.exceptions.GetTimeoutError:
                reason = f"gave no sign of life for {SILENCE:.0f} s"
            except Exception as error:  # ActorDiedError, and what Ray raises where a node is lost
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self._ended.set()
        self._inbox.put((self, Lost(self._failure or reason)))

    def close(self, patience: float = EXIT_GRACE) -> None:
        deadline = time.monotonic() + patience
        self._listener.join(max(0.0, deadline - time.monotonic()))
        ray.kill(self._actor)
        self._listener.join(5.0)
