"""A replica: `python -m nanovllm.replicas.replica FD`, started by the front (link.py): an engine in a process beside
its ranks, stepped as long as it has work.

The main thread steps. One thread takes messages in, one compiles grammars, one gives a sign of life. The process ends
with its socket.
"""

import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from array import array
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from nanovllm.replicas.messages import Answer, Completed, Failed, Gained, Ready, Refused, Start

if TYPE_CHECKING:
    import torch

    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.outputs import StepColumns

_LIFE_SECONDS = 1.0
_LOOK_SECONDS = 0.5
_KINDS = (ValueError, TypeError, FileNotFoundError)  # mistakes of the user, which the front raises again
_BUCKETS_AHEAD = 2  # of new weights, taken in before the ranks have those before them


class Replica:
    """One engine and the way to its front. `handle` may be called from another thread than `run`."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._engine: LLMEngine | None = None
        self._work = threading.Event()
        self._leaving = False
        self._calls: queue.SimpleQueue[tuple[int, str, tuple[Any, ...], bool]] = queue.SimpleQueue()
        self._waits_for_others = False
        """An update of the weights has begun that other replicas may not have finished."""
        self._buckets: queue.Queue[list[Any] | str | None] = queue.Queue(_BUCKETS_AHEAD)
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
        self._work.set()

    # -- what the front may ask for -----------------------------------------------------------------------------

    def add(self, request_id: int, prompt: bytes, params: Any, known: list[int]) -> None:
        """`prompt`: int32 token ids. `known`: the output's first tokens. The request was checked by the front."""
        if params.structured_outputs is None:
            self._add(request_id, prompt, params, known)
        else:
            self._compiling.add(request_id)
            self._to_compile.put((request_id, prompt, params, known))

    def _add(self, request_id: int, prompt: bytes, params: Any, known: list[int]) -> None:
        assert self._engine is not None
        try:
            self._engine.add_request(array("i", prompt).tolist(), params, request_id, known)
        except Exception as error:  # of this request alone
            self._send(Refused(request_id, str(error)))

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
            self._work.set()

    # -- the main thread ----------------------------------------------------------------------------------------

    def _serve(self, engine: "LLMEngine") -> None:
        from nanovllm.engine.step_watch import watch_of

        watch = watch_of(engine.config)
        while not self._leaving:
            if not self._calls.empty():
                self._send(self._answer(engine, *self._calls.get()))
            elif engine.is_busy() and not self._waits_for_others and not engine.lacks_weights:
                with watch:
                    gained = engine.step()
                self._send_gained(engine, gained)
            else:
                self._work.wait(_LIFE_SECONDS)
                self._work.clear()
                if engine.executor.failed:
                    engine.executor.check()  # raises

    def _answer(
        self, engine: "LLMEngine", number: int, method: str, args: tuple[Any, ...], takes_weights: bool
    ) -> Answer:
        weights = _Weights(self._buckets)
        try:
            if method == "begin_update":
                self._waits_for_others = True
            if takes_weights:
                args = (*args, weights)
            value = getattr(engine, method)(*args)
            engine.settle()
            self._send_gained(engine, engine.take_unreported())
            return Answer(number, value)
        except Exception as error:
            if engine.executor.failed:
                raise
            if takes_weights:
                weights.skip()
            kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
            return Answer(number, None, kind, str(error))

    def _send_gained(self, engine: "LLMEngine", gained: "StepColumns") -> None:
        if len(gained):
            self._send(self._message(engine, gained))

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
        rows = (array("q", gained.request_ids), array("i", gained.indices), array("i", gained.token_ids))
        return Gained(*rows, ended, scores, engine.num_prefill_tokens, engine.num_decode_tokens, engine.stats())


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


def _receive(link: Connection, replica: Replica, starts: "queue.SimpleQueue[Start]") -> None:
    parent = os.getppid()
    try:
        while True:
            while not link.poll(_LOOK_SECONDS):
                if os.getppid() != parent:  # a process that the front forked may hold its end of the socket open
                    os._exit(1)
            message = link.recv()
            if isinstance(message, Start):
                starts.put(message)
            else:
                replica.handle(message)
    except (EOFError, OSError):
        pass
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)  # ranks end with this process


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's to handle
    link = Connection(fd)
    lock = threading.Lock()

    def send(message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with lock:
                link.send_bytes(data)
        except OSError:
            os._exit(1)  # the front is gone

    def live() -> None:
        while True:
            never.wait(_LIFE_SECONDS)
            send(None)

    never = threading.Event()
    replica = Replica(send)
    starts: queue.SimpleQueue[Start] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(link, replica, starts), name="nanovllm-link", daemon=True).start()
    threading.Thread(target=live, name="nanovllm-life", daemon=True).start()
    replica.run(starts.get())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not sys.exit: library threads may wait for what is gone


if __name__ == "__main__":
    main(int(sys.argv[1]))
