"""A replica: `python -m nanovllm.replicas.replica FD`, started by the front (link.py): an engine in a process beside
its ranks, stepped as long as it has work.

The main thread takes messages in and steps. One thread compiles grammars; one gives a sign of life, and ends the
process with its socket.
"""

import os
import pickle
import queue
import select
import socket
import sys
import threading
import time
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from nanovllm.replicas.channel import Bell, Channel
from nanovllm.replicas.messages import Answer, Completed, Counted, Failed, Gained, Ready, Refused, Start
from nanovllm.startup.child import freeze_objects, leave_signals_to_parent

if TYPE_CHECKING:
    import torch

    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.outputs import StepColumns
    from nanovllm.replicas.request import Sent

_LIFE_SECONDS = 1.0
_COUNT_SECONDS = 0.1
_AWAKE_SECONDS = 0.001
_KINDS = (ValueError, TypeError, FileNotFoundError)  # mistakes of the user, which the front raises again
_BUCKETS_AHEAD = 2  # of new weights, taken in before the ranks have those before them


class Intake(Protocol):
    """Where a replica finds the messages of its front, unless another thread calls Replica.handle. One thread at a time
    takes them out."""

    def next(self, seconds: float) -> Any:
        """None where there is none; waits up to `seconds` for it, or for `wake`."""

    def wake(self) -> None:
        """From any thread."""


class Replica:
    """One engine and the way to its front. `handle` may be called from another thread than `run`."""

    def __init__(self, send: Callable[[Any], None], intake: Intake) -> None:
        self._send, self._intake = send, intake
        self._engine: LLMEngine | None = None
        self._leaving = False
        self._counted = self._awake_until = 0.0
        self._calls: queue.SimpleQueue[tuple[int, str, tuple[Any, ...], bool]] = queue.SimpleQueue()
        self._waits_for_others = False
        """An update of the weights has begun that other replicas may not have finished."""
        self._buckets: queue.Queue[list[Any] | str | None] = queue.Queue(_BUCKETS_AHEAD)
        self._last_is_here = threading.Event()
        """The last of the buckets that follow a call."""
        self._to_compile: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._compiling: set[int] = set()
        """Requests whose grammar is not compiled yet."""
        self._aborted: set[int] = set()
        """Those of them that are to end then."""

    def run(self, start: Start) -> None:
        """Serves until the front says that it may leave; tells it what ends it otherwise."""
        if start.devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = start.devices  # before CUDA starts
        try:
            from nanovllm.start import start_one

            if start.num_threads is not None:
                import torch

                torch.set_num_threads(start.num_threads)
            self._engine = engine = start_one(start.config)
            freeze_objects()
            self._send(Ready(engine.config, engine.scheduler.block_manager.num_blocks, engine.info()))
            threading.Thread(target=self._compile, name="nanovllm-grammars", daemon=True).start()
            self._serve(engine)
        except BaseException as error:
            kinds = _KINDS if self._engine is None else ()
            kind = next((kind for kind in kinds if isinstance(error, kind)), None)
            self._send(Failed(kind, str(error) or type(error).__name__))
        finally:
            if self._engine is not None:
                self._engine.close()

    def handle(self, message: Any) -> None:
        """Takes a message of the front in: (name of a method below, its arguments)."""
        name, *args = message
        getattr(self, name)(*args)

    # -- what the front may ask for -----------------------------------------------------------------------------

    def add(self, requests: "list[Sent]") -> None:
        """Requests that the front has checked."""
        for request in requests:
            if request[2].structured_outputs is None:
                self._add(*request)
            else:
                self._compiling.add(request[0])
                self._to_compile.put(request)

    def _add(self, request_id: int, prompt: bytes, params: Any, known: list[int]) -> None:
        assert self._engine is not None
        try:
            self._engine.add_request(array("i", prompt).tolist(), params, request_id, known)
        except Exception as error:  # of this request alone
            self._send(Refused(request_id, str(error)))

    def rouse(self) -> None:
        """A request is on its way."""
        self._awake_until = time.monotonic() + _AWAKE_SECONDS

    def abort(self, request_id: int) -> None:
        assert self._engine is not None
        if request_id in self._compiling:
            self._aborted.add(request_id)
        self._engine.abort(request_id)

    def call(self, number: int, method: str, args: tuple[Any, ...], takes_weights: bool) -> None:
        """Calls a method of the engine between two steps. Buckets follow where it takes weights."""
        self._calls.put((number, method, args, takes_weights))

    def go_on(self) -> None:
        """All replicas have the new weights."""
        self._waits_for_others = False

    def resume(self) -> None:
        if self._engine is not None:  # else it is no part of the pause: it has been started again meanwhile
            self._engine.resume()

    def bucket(self, pickled: bytes | None, error: str | None) -> None:
        """Some weights, or why there are no more of them, or neither at their end."""
        self._buckets.put(error if pickled is None else pickle.loads(pickled))
        if pickled is None:
            self._last_is_here.set()

    def leave(self) -> None:
        self._leaving = True

    # -- a thread of its own: a grammar may take seconds, and other messages do not wait for it --------------------

    def _compile(self) -> None:
        while True:
            request_id, *rest = self._to_compile.get()
            self._add(request_id, *rest)
            self._compiling.discard(request_id)
            if request_id in self._aborted:
                self._aborted.discard(request_id)
                self.abort(request_id)
            self._intake.wake()

    # -- the main thread ----------------------------------------------------------------------------------------

    def _serve(self, engine: "LLMEngine") -> None:
        from nanovllm.engine.step_watch import watch_of

        watch, seconds = watch_of(engine.config), 0.0
        while not self._leaving:
            self._take_in(seconds)
            seconds = 0.0
            if not self._calls.empty():
                self._send(self._answer(engine, *self._calls.get()))
            elif not engine.is_busy() or self._waits_for_others or engine.lacks_weights:
                seconds = _LIFE_SECONDS if time.monotonic() > self._awake_until else 0.0
                if engine.executor.failed:
                    engine.executor.check()  # raises
            else:
                with watch:
                    gained = engine.step()
                self._send_gained(engine, gained)

    def _take_in(self, seconds: float) -> None:
        """All messages up to a call, which those behind it may belong to."""
        while self._calls.empty() and (message := self._intake.next(seconds)) is not None:
            self.handle(message)
            seconds = 0.0

    def _answer(
        self, engine: "LLMEngine", number: int, method: str, args: tuple[Any, ...], takes_weights: bool
    ) -> Answer:
        try:
            if method == "begin_update":
                self._waits_for_others = True
            with self._weights(engine) if takes_weights else nullcontext(()) as weights:
                value = getattr(engine, method)(*args, *weights)
            engine.settle()
            self._send_gained(engine, engine.take_unreported())
            return Answer(number, value)
        except Exception as error:
            if engine.executor.failed:
                raise
            kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
            return Answer(number, None, kind, str(error))

    @contextmanager
    def _weights(self, engine: "LLMEngine") -> "Iterator[tuple[_Weights]]":
        """Those of the buckets that follow a call. Another thread takes them in, while those before are used."""
        weights = _Weights(self._buckets)
        thread = threading.Thread(target=self._take_buckets_in, name="nanovllm-buckets", daemon=True)
        thread.start()
        try:
            yield (weights,)
        finally:
            if not engine.executor.failed:  # else this process ends
                weights.skip()
                thread.join()

    def _take_buckets_in(self) -> None:
        try:
            while not self._last_is_here.is_set():
                if (message := self._intake.next(_LIFE_SECONDS)) is not None:
                    self.handle(message)
            self._last_is_here.clear()
        except Exception:  # a mistake of ours: the main thread would wait without an end
            traceback.print_exc()
            os._exit(1)

    def _send_gained(self, engine: "LLMEngine", gained: "StepColumns") -> None:
        if not len(gained):
            return
        if gained.endings:
            self._send_counted(engine)
        self._send(self._message(engine, gained))
        if time.monotonic() - self._counted > _COUNT_SECONDS:
            self._send_counted(engine)

    def _send_counted(self, engine: "LLMEngine") -> None:
        self._counted = time.monotonic()
        self._send(Counted(engine.num_prefill_tokens, engine.num_decode_tokens, engine.stats()))

    def _message(self, engine: "LLMEngine", gained: "StepColumns") -> Gained:
        scores = {entry: rows.words(position) for entry, (rows, position) in gained.logprobs.items()}
        ended: dict[int, Completed] = {}
        for entry, ending in gained.endings.items():
            request_id, index = gained.request_ids[entry], gained.indices[entry]
            seq = engine._completions[request_id][index]
            prompt_words = kept = None
            if (row := seq.sampling) is not None:
                kept = row.kept_ids
                if (lines := row.prompt_logprob_rows) is not None:
                    prompt_words = [lines.words(position) for position in range(len(lines))]
            queued = seq.metrics.queued
            ended[entry] = Completed(
                ending.reason, ending.stop_reason, ending.num_cached_tokens, queued, prompt_words, kept
            )
        for request_id in {gained.request_ids[entry] for entry in ended}:
            if engine.is_finished(request_id):
                engine.forget(request_id)
        columns = array("q", gained.request_ids + gained.indices + gained.token_ids)
        return Gained(columns.tobytes(), ended, scores)


class _Weights:
    """(checkpoint name, tensor) of the buckets, up to their end."""

    def __init__(self, buckets: "queue.Queue[list[Any] | str | None]") -> None:
        self._buckets, self._ended = buckets, False

    def __iter__(self) -> "Iterator[tuple[str, torch.Tensor]]":
        while not self._ended:
            bucket = self._buckets.get()
            if isinstance(bucket, list):
                yield from bucket
                continue
            self._ended = True
            if bucket is not None:
                raise RuntimeError(bucket)  # the front raises why

    def skip(self) -> None:
        """Takes in what is left, for nothing."""
        while not self._ended:
            self._ended = not isinstance(self._buckets.get(), list)


class SocketIntake:
    """Messages of the front of this host, whose end is this process's too."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: deque[Any] = deque()
        self._bell = Bell()
        self._poll = select.poll()
        for end in (channel, self._bell):
            self._poll.register(end, select.POLLIN)

    def next(self, seconds: float) -> Any:
        if not self._messages:
            for fd, _ in self._poll.poll(seconds * 1000):
                if fd == self._bell.fileno():
                    self._bell.hush()
                else:
                    self._read()
        return self._messages.popleft() if self._messages else None

    def _read(self) -> None:
        try:
            self._messages += self._channel.receive()
        except (EOFError, OSError):
            os._exit(1)  # ranks end with this process

    def wake(self) -> None:
        self._bell.ring()


def main(fd: int) -> None:
    leave_signals_to_parent()
    channel = Channel(socket.socket(fileno=fd))
    lock, parent = threading.Lock(), os.getppid()

    def send(message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with lock:
                channel.send(data)
        except OSError:
            os._exit(1)  # the front is gone

    def live() -> None:
        gone = select.poll()
        gone.register(channel, 0)  # its end
        # A process that the front forked may hold the other end open.
        while not gone.poll(_LIFE_SECONDS * 1000) and os.getppid() == parent:
            send(None)
        os._exit(1)

    threading.Thread(target=live, name="nanovllm-life", daemon=True).start()
    intake = SocketIntake(channel)
    while (start := intake.next(_LIFE_SECONDS)) is None:
        pass
    code = 1
    try:
        Replica(send, intake).run(start)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: library threads may wait for what is gone, and signs of life go on


if __name__ == "__main__":
    main(int(sys.argv[1]))
