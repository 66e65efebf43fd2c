"""A replica: `python -m nanovllm.replicas.replica FD`, started by the front (link.py): an engine in a process beside
its ranks, stepped as long as it has work.

The main thread takes messages in and steps. One thread compiles grammars; one gives a sign of life, and ends the
process with its socket.
"""

import os
import pickle
import select
import socket
import sys
import threading
import time
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from nanovllm.engine.grammar_thread import GrammarThread
from nanovllm.executor.cpu_threads import let_waiting_threads_sleep
from nanovllm.processes.child import end_this, freeze_objects, leave_signals_to_parent
from nanovllm.replicas.channel import Bell, Channel, small
from nanovllm.replicas.messages import Answer, Completed, Counted, Failed, Gained, Ready, Refused, Start

if TYPE_CHECKING:
    import torch

    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.outputs import StepColumns
    from nanovllm.replicas.request import Sent

_LIFE_SECONDS = 1.0
_COUNT_SECONDS = 0.1
_AWAKE_SECONDS = 0.001
_SIGN = small(None)
_KINDS = (ValueError, TypeError, FileNotFoundError)  # mistakes of the user, which the front raises again


class Intake(Protocol):
    """Where a replica finds the messages of its front: Start, and then (name of a method of Replica, its arguments)."""

    def next(self, seconds: float) -> Any:
        """None where there is none; waits up to `seconds` for it, or for `wake`."""

    def wake(self) -> None:
        """From any thread."""


def run(send: Callable[[Any], None], intake: Intake) -> None:
    """An engine as the front's first message says, until the front says that it may leave; tells the front what ends it
    otherwise."""
    start: Start | None = None
    while start is None:
        start = intake.next(_LIFE_SECONDS)
    if start.devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = start.devices  # before CUDA starts
    engine: LLMEngine | None = None
    try:
        from nanovllm.start import start_one

        if start.num_threads is not None:
            let_waiting_threads_sleep()
            import torch

            torch.set_num_threads(start.num_threads)
        engine = start_one(start.config)
        freeze_objects()
        send(Ready(engine.config, engine.scheduler.block_manager.num_blocks, engine.info()))
        Replica(engine, send, intake).serve()
    except BaseException as error:
        kinds = _KINDS if engine is None else ()
        kind = next((kind for kind in kinds if isinstance(error, kind)), None)
        send(Failed(kind, str(error) or type(error).__name__))
    finally:
        if engine is not None:
            engine.close()


class Replica:
    """One engine and the way to its front."""

    def __init__(self, engine: "LLMEngine", send: Callable[[Any], None], intake: Intake) -> None:
        self._engine, self._send, self._intake = engine, send, intake
        self._leaving = False
        self._counted = self._awake_until = 0.0
        self._waits_for_others = False
        """An update of the weights has begun that other replicas may not have finished."""
        self._grammars = GrammarThread(self._add_late, self.abort)

    def serve(self) -> None:
        """Steps while there is work, and between two steps does what the front asks for."""
        from nanovllm.engine.step_watch import watch_of

        engine, seconds = self._engine, 0.0
        watch = watch_of(engine.config)
        while not self._leaving:
            while (message := self._intake.next(seconds)) is not None:
                self.handle(message)
                seconds = 0.0
            seconds = 0.0
            if not engine.is_busy() or self._waits_for_others or engine.lacks_weights:
                seconds = _LIFE_SECONDS if time.monotonic() > self._awake_until else 0.0
                if engine.executor.failed:
                    engine.executor.check()  # raises
            else:
                with watch:
                    gained = engine.step()
                self._send_gained(gained)

    def handle(self, message: tuple[Any, ...]) -> None:
        name, *args = message
        getattr(self, name)(*args)

    # -- what the front may ask for -----------------------------------------------------------------------------

    def add(self, requests: "list[Sent]") -> None:
        """Requests that the front has checked."""
        for request in requests:
            if request[2].structured_outputs is None:
                self._add(request)
            else:
                self._grammars.put(request[0], request)

    def _add(self, request: "Sent") -> None:
        request_id, prompt, params, known = request
        try:
            self._engine.add_request(array("i", prompt).tolist(), params, request_id, known)
        except Exception as error:  # of this request alone
            self._send(Refused(request_id, str(error)))

    def _add_late(self, request: "Sent") -> None:
        self._add(request)
        self._intake.wake()

    def rouse(self) -> None:
        """A request is on its way."""
        self._awake_until = time.monotonic() + _AWAKE_SECONDS

    def abort(self, request_id: int) -> None:
        if self._grammars.withdraw(request_id):
            self._send(Refused(request_id, "the request was aborted"))
        self._engine.abort(request_id)

    def call(self, number: int, method: str, args: tuple[Any, ...], takes_weights: bool) -> None:
        """Calls a method of the engine. Where it takes weights, they follow in messages ("bucket", pickled, error)."""
        engine, weights = self._engine, self._weights() if takes_weights else iter(())
        args = (*args, weights) if takes_weights else args
        try:
            if method == "begin_update":
                self._waits_for_others = True
            value = getattr(engine, method)(*args)
            engine.settle()
            self._send_gained(engine.take_unreported())
            answer = Answer(number, value)
        except Exception as error:
            if engine.executor.failed:
                raise
            kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
            answer = Answer(number, None, kind, str(error))
        with suppress(RuntimeError):
            deque(weights, 0)  # what the method has left
        self._send(answer)

    def _weights(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """(checkpoint name, tensor) of the buckets that follow a call; the last message has none, or an error."""
        while True:
            match self._intake.next(_LIFE_SECONDS):
                case "bucket", None, error:
                    if error is not None:
                        raise RuntimeError(error)  # the front raises why
                    return
                case "bucket", pickled, _:
                    yield from pickle.loads(pickled)
                case tuple(message):
                    self.handle(message)

    def go_on(self) -> None:
        """All replicas have the new weights."""
        self._waits_for_others = False

    def resume(self) -> None:
        self._engine.resume()

    def leave(self) -> None:
        self._leaving = True

    # -- what it says -------------------------------------------------------------------------------------------

    def _send_gained(self, gained: "StepColumns") -> None:
        if not len(gained):
            return
        if gained.endings:
            self._send_counted()
        self._send(self._message(gained))
        if time.monotonic() - self._counted > _COUNT_SECONDS:
            self._send_counted()

    def _send_counted(self) -> None:
        self._counted = time.monotonic()
        engine = self._engine
        self._send(Counted(engine.num_prefill_tokens, engine.num_decode_tokens, engine.stats()))

    def _message(self, gained: "StepColumns") -> Gained:
        engine = self._engine
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
            if lock.acquire(blocking=False):  # else something is being sent
                with suppress(OSError):
                    channel.send_some(_SIGN)  # not where there is no room: the front may not look for hours
                lock.release()
        os._exit(1)

    threading.Thread(target=live, name="nanovllm-life", daemon=True).start()
    code = 1
    try:
        run(send, SocketIntake(channel))
        code = 0
    except BaseException:
        traceback.print_exc()
    end_this(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
