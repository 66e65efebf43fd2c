"""A replica as an actor of a Ray cluster, and the front's hold on it."""

import pickle
import queue
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

import ray

from nanovllm.replicas.inbox import Inbox
from nanovllm.replicas.link import EXIT_GRACE, SILENCE, Lost, ReplicaLink
from nanovllm.replicas.messages import Start
from nanovllm.replicas.ray_cluster import Placement
from nanovllm.replicas.replica import run

_LARGE = 1 << 16  # bytes of a message that all replicas fetch from one place, and that the front waits for
_LARGE_AHEAD = 2
_AHEAD = 2  # messages that an actor holds while its engine steps
_POLL_SECONDS = 1.0


class QueueIntake:
    """Messages that another thread hands on; it waits where too many have not been taken out."""

    def __init__(self) -> None:
        self._packed: queue.Queue[bytes | None] = queue.Queue(_AHEAD)

    def put(self, packed: bytes) -> None:
        self._packed.put(packed)

    def next(self, seconds: float) -> Any:
        try:
            packed = self._packed.get(timeout=seconds)
        except queue.Empty:
            return None
        return None if packed is None else pickle.loads(packed)

    def wake(self) -> None:
        with suppress(queue.Full):  # then it has something to take out
            self._packed.put_nowait(None)


class ReplicaActor:
    """An engine beside its ranks, in an actor's process."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._intake = QueueIntake()
        threading.Thread(target=self._run, name="nanovllm-replica", daemon=True).start()

    def _run(self) -> None:
        try:
            run(self._said.put, self._intake)
        finally:
            self._said.put(Lost("ended"))

    @ray.method(concurrency_group="down")
    def handle(self, packed: bytes) -> None:
        """A message of the front."""
        self._intake.put(packed)

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
        self.send(self.pack(start))
        self._listener = threading.Thread(target=self._listen, name=f"nanovllm-replica-{number}", daemon=True)
        self._listener.start()

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
