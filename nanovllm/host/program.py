"""Program of an engine in a child process: `python -m nanovllm.host.program FD PARENT`, started by handle.py.

The main thread reads frames and steps the engine. A second thread sends signs of life, and ends the process when its
driver has gone.
"""

import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanovllm.host import wire
from nanovllm.processes.child import end_this, leave_signals_to_parent
from nanovllm.processes.framing import READ_BYTES, FrameBuffer
from nanovllm.processes.garbage import freeze_objects

if TYPE_CHECKING:
    from nanovllm.config import EngineConfig
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.host.engine_host import Intake

_LIFE_SECONDS = 1.0
_EXIT_GRACE = 5.0  # seconds for an orderly exit once the driver has gone
_ALIVE = wire.pack(wire.Alive())
_STAGES = {
    "load": ("loading weights", 20, 60),
    "compile": ("compiling kernels", 61, 75),
    "warm-up": ("warming up", 76, 80),
    "capture": ("capturing graphs", 81, 100),
}
"""Stages of an executor's start: text and range of percents."""
_SHOWN_OPTIONS = (
    "model", "max_num_seqs", "dtype", "device", "tensor_parallel_size", "max_logprobs", "logprobs_mode", "runner",
)  # fmt: skip
"""Options that drivers want to know as they are."""


def run(send: Callable[[wire.Up], None], intake: "Intake") -> int:
    """Runs the engine that the first frame describes, until the driver leaves. Reports an error that ends it to the
    driver. Returns the exit code."""
    engine: LLMEngine | None = None
    try:
        while (start := intake.next(_LIFE_SECONDS)) is None:
            pass
        assert isinstance(start, wire.Start)
        engine = _load(start, send)
        from nanovllm.host.engine_host import EngineHost

        host = EngineHost(engine, send, intake)
        freeze_objects()
        send(wire.Ready(describe(engine), wire.config_fields(engine.config), engine.info()))
        host.run()
        return 0
    except EOFError:
        return 0
    except BaseException as error:
        kind = wire.kind_of(error) if engine is None and isinstance(error, (ValueError, TypeError, OSError)) else None
        if kind is None:
            traceback.print_exc()
        send(wire.Failed(str(error) or type(error).__name__, kind))
        return 0 if kind is not None else 1
    finally:
        if engine is not None:
            engine.close()


def _load(start: wire.Start, send: Callable[[wire.Up], None]) -> "LLMEngine":
    from nanovllm.config import EngineConfig
    from nanovllm.models.registry import resolve_model_folder

    send(wire.Progress("finding the model's files", 0))
    config = resolve_model_folder(EngineConfig.from_options(start.model, **start.options))
    send(wire.Progress("importing", 10, config.tokenizer or config.model))
    _claim_devices(config, start.number)
    from nanovllm.start import start_one

    shown = 0

    def report(stage: str, share: float) -> None:
        nonlocal shown
        name, begin, end = _STAGES[stage]
        percent = begin + int(share * (end - begin))
        if percent > shown:
            shown = percent
            send(wire.Progress(name, percent))

    report("load", 0.0)
    return start_one(replace(config, data_parallel_size=1, data_parallel_backend=None, ray_address=None), report)


def _claim_devices(config: "EngineConfig", number: int) -> None:
    """Limits this process to the GPUs of replica `number`, or to its share of the cores. Ray does so for its actors."""
    if config.data_parallel_size == 1 or config.data_parallel_backend == "ray":
        return
    from nanovllm.host.devices import devices_of_replicas

    if (devices := devices_of_replicas(config)[number]) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices  # before CUDA starts
        return
    from nanovllm.executor.cpu_threads import let_waiting_threads_sleep
    from nanovllm.processes.machine import usable_cores

    let_waiting_threads_sleep()
    import torch

    torch.set_num_threads(max(1, usable_cores() // config.data_parallel_size))


def describe(engine: "LLMEngine") -> dict[str, Any]:
    """Sizes and limits of a started engine, for its driver."""
    config, model = engine.config, engine.model_config
    return {
        **{name: getattr(config, name) for name in _SHOWN_OPTIONS},
        "max_model_len": engine.book.max_total_tokens,
        "vocab_size": model.vocab_size,
        "eos_token_ids": list(model.eos_token_ids),
        "num_kv_tokens": engine.scheduler.memory.num_kv_tokens,
        "num_kvcache_blocks": engine.scheduler.memory.num_blocks,
        "page_groups": engine.executor.state_size.groups,
        "block_size": config.kvcache_block_size,
        "startup_seconds": engine.startup_seconds,
        "prefix_caching": config.enable_prefix_caching,
        "max_loras": config.max_loras if config.enable_lora else 0,
        "pooling": None if model.pooling is None else vars(model.pooling),
        "hidden_size": model.hidden_size,
    }


class DriverLink:
    """Connection of an engine to its driver, by a socket: frames both ways, and signs of life."""

    def __init__(self, link: socket.socket) -> None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self._link, self._sends = link, threading.Lock()
        self._buffer = FrameBuffer()
        self._frames: deque[wire.Down] = deque()
        self._heard, self._rung = socket.socketpair()
        self._heard.setblocking(False)
        self._rung.setblocking(False)
        self._poll = select.poll()
        for end in (link, self._heard):
            self._poll.register(end, select.POLLIN)

    def next(self, seconds: float) -> wire.Down | None:
        """See Intake.next."""
        if not self._frames:
            for fd, _ in self._poll.poll(seconds * 1000):
                if fd == self._heard.fileno():
                    self._heard.recv(64)
                    continue
                try:
                    data = self._link.recv(READ_BYTES)
                except OSError:
                    data = b""
                if not data:
                    raise EOFError
                self._frames += map(wire.down_decoder.decode, self._buffer.feed(data))
        return self._frames.popleft() if self._frames else None

    def wake(self) -> None:
        """See Intake.wake."""
        with suppress(OSError):  # it rings already
            self._rung.send(b"!")

    def send(self, frame: wire.Up) -> None:
        """Sends a frame. From any thread. Raises OSError where the driver has gone."""
        data = wire.pack(frame)
        with self._sends:
            self._link.sendall(data)

    def live(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Sends signs of life until the driver has gone, or `is_over`."""
        gone = select.poll()
        gone.register(self._link, select.POLLRDHUP)
        while not gone.poll(_LIFE_SECONDS * 1000) and not is_over():
            if self._sends.acquire(blocking=False):  # else a frame is being sent, which is a sign of life too
                with suppress(OSError):  # dropped if the buffer is full: the driver may not read for hours
                    self._link.send(_ALIVE, socket.MSG_DONTWAIT)
                self._sends.release()


def main(fd: int, parent: int) -> None:
    """`fd`: of the socket to the driver. `parent`: the driver's process id."""
    leave_signals_to_parent()
    link = DriverLink(socket.socket(fileno=fd))
    is_serving = threading.Event()

    def send(frame: wire.Up) -> None:
        if isinstance(frame, wire.Ready):
            is_serving.set()
        try:
            link.send(frame)
        except OSError:
            os._exit(1)  # the driver has gone; ranks end with this process

    def live() -> None:
        # A fork of the driver may keep the other end open, so its process is looked at too.
        link.live(lambda: os.getppid() != parent)
        if is_serving.is_set() and os.getppid() == parent:
            time.sleep(_EXIT_GRACE)
        os._exit(1)

    threading.Thread(target=live, name="nanovllm-life", daemon=True).start()
    code = 1
    try:
        code = run(send, link)
    except BaseException:
        traceback.print_exc()
    end_this(code)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
