"""The engine's process: `python -m nanovllm.serve.engine_process FD`, started by the front (link.py).

The main thread steps the engine; one thread takes requests in, one compiles grammars. The process ends
with the socket: when the front goes, however it goes, the read end says so.
"""

import os
import queue
import socket
import sys
import threading
import time
import traceback
from array import array
from operator import add
from typing import TYPE_CHECKING, Any

from nanovllm.engine.grammar_thread import GrammarThread
from nanovllm.processes.child import end_this, freeze_objects, leave_signals_to_parent
from nanovllm.serve import frames
from nanovllm.serve.admin_calls import AdminCalls

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.outputs import StepColumns

_STATS_INTERVAL = 0.1  # seconds between two frames with counters, while the engine is busy
_EXIT_GRACE = 5.0  # seconds for an orderly end once the front is gone
_IDLE_LOOK = 1.0  # seconds between two looks at the ranks, while there is no work
_STAGES = {
    "load": ("loading weights", 20, 60),
    "compile": ("compiling kernels", 61, 75),
    "warm-up": ("warming up", 76, 80),
    "choose kernels": ("choosing kernels", 81, 84),
    "capture": ("capturing graphs", 85, 100),
}
"""Of an executor's start, as they are told, with their percents."""


def sampling_params(fields: dict[str, Any]) -> Any:
    """SamplingParams of a frame's fields. Raises ValueError as they do."""
    from nanovllm.sampling_params import SamplingParams, StructuredOutput

    if (wanted := fields.get("structured_outputs")) is not None:
        fields = {**fields, "structured_outputs": StructuredOutput(**wanted)}
    return SamplingParams(**fields)


class EngineProcess:
    """One engine and the socket to its front."""

    _grammars: GrammarThread

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._send_lock = threading.Lock()
        self._engine: LLMEngine | None = None
        self._admin: AdminCalls | None = None
        self._leaving = False
        self._starts: queue.SimpleQueue[frames.Start] = queue.SimpleQueue()
        self._prompts_due: set[int] = set()
        """Requests whose prompts' log-probabilities are to be sent."""

    # -- the main thread ----------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serves until the front leaves; returns the exit code."""
        threading.Thread(target=self._receive, name="nanovllm-link", daemon=True).start()
        start = self._starts.get()
        try:
            self._engine = self._load(start)
            admin = self._admin = AdminCalls(self._engine, self._send)
            self._grammars = GrammarThread(self._add, self._abort)
            freeze_objects()
            self._send(frames.Ready(describe(self._engine)))
            self._serve(self._engine, admin)
            return 0
        except BaseException as error:
            users = self._engine is None and isinstance(error, (ValueError, TypeError, FileNotFoundError))
            if not users and not self._leaving:
                traceback.print_exc()
            self._send(frames.Failed(str(error), users))
            return 1
        finally:
            if self._engine is not None:
                self._engine.close()

    def _load(self, start: frames.Start) -> "LLMEngine":
        from nanovllm.config import EngineConfig
        from nanovllm.models.registry import resolve_model_folder

        self._send(frames.Progress("finding the model's files", 0))
        given = EngineConfig.from_options(start.model, **start.options)
        config = resolve_model_folder(given)
        self._send(frames.Progress("importing", 10, config.tokenizer or config.model))
        from nanovllm.llm import start_engine

        shown = 0

        def report(stage: str, share: float) -> None:
            nonlocal shown
            name, begin, end = _STAGES[stage]
            percent = begin + int(share * (end - begin))
            if percent > shown:
                shown = percent
                self._send(frames.Progress(name, percent))

        report("load", 0.0)
        # Nodes of a cluster find a hub id's files by themselves.
        return start_engine(given if given.data_parallel_backend == "ray" else config, report)

    def _serve(self, engine: "LLMEngine", admin: AdminCalls) -> None:
        from nanovllm.engine.step_clock import StepClock
        from nanovllm.engine.step_watch import watch_of

        clock = StepClock() if engine.config.device == "cuda" and engine.config.uses("late_scheduling") else None
        watch = watch_of(engine.config)
        was_busy, stats_due = False, 0.0
        while not self._leaving:
            admin.advance()
            is_busy = engine.is_busy()
            if (is_busy and time.monotonic() >= stats_due) or (was_busy and not is_busy):
                stats_due = time.monotonic() + _STATS_INTERVAL
                self._send(frames.Step([], [], stats=engine.stats()))
            was_busy = is_busy
            if is_busy:
                if clock is not None and engine.running_step is not None:
                    clock.wait(engine.executor.has_result)
                with watch:
                    gained = engine.step()
                if clock is not None:
                    clock.note(engine.running_step)
                if len(gained):
                    self._send(self._step_frame(engine, gained))
            else:
                engine.wait_for_work(_IDLE_LOOK, lambda: self._leaving or admin.has_calls)
                if engine.executor.failed:
                    engine.executor.check()  # raises

    def _step_frame(self, engine: "LLMEngine", gained: "StepColumns") -> frames.Step:
        if not gained.endings and not gained.logprobs:  # nearly every step
            rows = list(map(add, gained.request_ids, gained.indices))
            return frames.Step(rows, gained.token_ids)
        frame = frames.Step([], [])
        for entry, (request_id, index, token) in enumerate(
            zip(gained.request_ids, gained.indices, gained.token_ids, strict=True)
        ):
            row = request_id + index
            if (found := gained.logprobs.get(entry)) is not None:
                lines, position = found
                if (words := lines.words(position)) is not None:
                    frame.logprobs.append((row, words.tobytes()))
                if request_id in self._prompts_due:
                    self._send_prompt(engine, request_id, frame)
            if (ending := gained.endings.get(entry)) is None:
                frame.rows.append(row)
                frame.tokens.append(token)
                continue
            last = token if token >= 0 else None
            versions = ending.weight_versions if any(version for version, *_ in ending.weight_versions) else []
            frame.finishes.append(frames.Finish(row, last, ending.reason, ending.stop_reason, versions))
            if engine.knows(request_id) and engine.is_finished(request_id):  # the last of n reports it
                if request_id in self._prompts_due:
                    self._send_prompt(engine, request_id, frame, in_full=False)
                frame.done.append(_done(request_id, engine.forget(request_id)))
        return frame

    def _send_prompt(self, engine: "LLMEngine", request_id: int, frame: frames.Step, in_full: bool = True) -> None:
        """The prompt's log-probabilities; with `in_full` only where all are there."""
        rows = engine.prompt_logprobs(request_id)
        words = [] if rows is None else [rows.words(position) for position in range(len(rows))]
        if in_full and (not words or words[-1] is None):
            return  # of replicas: they come with the end
        frame.prompts.append((request_id, [None if each is None else each.tobytes() for each in words]))
        self._prompts_due.discard(request_id)

    # -- other threads ------------------------------------------------------------------------------------------

    def _send(self, frame: frames.Frame) -> None:
        data = frames.pack(frame)
        try:
            with self._send_lock:
                self._link.sendall(data)
        except OSError:  # the front is gone; the receiving thread sees it too
            self._leave()

    def _receive(self) -> None:
        buffer = frames.FrameBuffer()
        try:
            while data := self._link.recv(1 << 18):
                for body in buffer.feed(data):
                    self._handle(frames.down_decoder.decode(body))
        except OSError:
            pass
        except Exception as error:  # a mistake of ours: without this thread nothing more would be taken in
            traceback.print_exc()
            self._send(frames.Failed(f"{type(error).__name__} in the thread that takes requests in", False))
        if self._engine is None:
            os._exit(1)  # still loading: workers end with this process
        self._leave()
        time.sleep(_EXIT_GRACE)
        os._exit(1)

    def _leave(self) -> None:
        self._leaving = True
        if self._engine is not None:
            self._engine.wake()

    def _handle(self, frame: frames.DownFrame) -> None:
        if isinstance(frame, frames.Start):
            self._starts.put(frame)
        elif isinstance(frame, frames.Control):
            assert self._engine is not None and self._admin is not None
            self._admin.put(frame)
            self._engine.wake()
        elif isinstance(frame, frames.Abort):
            self._abort(frame.request_id)
        elif "structured_outputs" in frame.params:
            self._grammars.put(frame.request_id, frame)
        else:
            self._add(frame)

    def _abort(self, request_id: int) -> None:
        if self._grammars.withdraw(request_id):
            self._send(frames.Refused(request_id, "the request was aborted"))
        assert self._engine is not None
        self._engine.abort(request_id)

    def _add(self, frame: frames.Add) -> None:
        """Queues a request, once its grammar is compiled."""
        engine = self._engine
        assert engine is not None
        try:
            ids = array("i")
            ids.frombytes(frame.prompt)
            prompt, params = ids.tolist(), sampling_params(frame.params)
            engine.check_request(prompt, params)  # compiles its grammar
            if params.prompt_logprobs is not None:
                self._prompts_due.add(frame.request_id)
            engine.add_request(prompt, params, frame.request_id)
        except Exception as error:
            self._prompts_due.discard(frame.request_id)
            is_users = isinstance(error, (ValueError, TypeError))
            if not is_users:
                traceback.print_exc()
            self._send(frames.Refused(frame.request_id, str(error) if is_users else None))


def _done(request_id: int, seqs: list[Any]) -> frames.Done:
    seq = seqs[0]
    metrics = seq.metrics
    begin = metrics.first_scheduled_time or metrics.finished_time
    first = metrics.first_token_time or metrics.finished_time
    return frames.Done(
        request_id,
        seq.num_prompt_cached_tokens or 0,
        queued=begin - metrics.arrival_time,
        prefill=first - begin,
        decode=metrics.finished_time - first,
        kept=[_kept(each.sampling.kept_ids) for each in seqs] if seq.params.sampling_mask else [],
    )


def _kept(ids: Any) -> list[bytes | None]:
    return [None if line is None else line.astype("int32").tobytes() for line in ids]


def describe(engine: "LLMEngine") -> dict[str, Any]:
    """What the front needs to know of a started engine."""
    config, model = engine.config, engine.model_config
    return {
        "model": config.model,
        "tokenizer": config.tokenizer or config.model,
        "max_model_len": engine.max_total_tokens,
        "max_num_seqs": config.max_num_seqs * config.data_parallel_size,
        "vocab_size": model.vocab_size,
        "eos_token_ids": list(model.eos_token_ids),
        "num_kv_tokens": engine.scheduler.capacity_tokens,
        "block_size": config.kvcache_block_size,
        "startup_seconds": engine.startup_seconds,
        "dtype": config.dtype,
        "device": config.device,
        "tensor_parallel_size": config.tensor_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "logprobs_mode": config.logprobs_mode,
        "pid": os.getpid(),
    }


def main(fd: int) -> None:
    leave_signals_to_parent()
    end_this(EngineProcess(frames.opened(socket.socket(fileno=fd))).run())


if __name__ == "__main__":
    main(int(sys.argv[1]))
