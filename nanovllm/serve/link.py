"""The front's hold on the engine process: started as a child, spoken to through one socket, watched by its end."""

import asyncio
from collections.abc import Callable
from typing import Any

from nanovllm.processes.child import end, start_linked
from nanovllm.serve import frames
from nanovllm.serve.streams import Streams

_MODULE = "nanovllm.serve.engine_process"
_EXIT_PATIENCE = 6.0  # seconds that the engine gets to end its ranks in order


class EngineChild:
    """The process. Its ranks and helpers end with it."""

    def __init__(self, model: str, options: dict[str, Any], module: str = _MODULE) -> None:
        """Starts it. `module`: what it runs; a benchmark puts a simulator here."""
        self.process, link = start_linked(module)
        self.socket = frames.opened(link)
        self.socket.sendall(frames.pack(frames.Start(model, options)))
        self.socket.setblocking(False)

    def wait(self) -> None:
        """Waits for its end once the socket is closed, and kills it when its time is over."""
        end(self.process, _EXIT_PATIENCE)


class EngineLink(asyncio.Protocol):
    """Frames in, frames out, in the event loop."""

    def __init__(self, streams: Streams, on_frame: Callable[[frames.UpFrame], None], on_end: Callable[[], None]):
        """`on_frame`: gets what is not about requests. `on_end`: the engine's end of the socket is closed."""
        self._streams, self._on_frame, self._on_end = streams, on_frame, on_end
        self._buffer = frames.FrameBuffer()
        self._transport: Any = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_end()

    def data_received(self, data: bytes) -> None:
        """All frames that are there are taken in first, so that each stream gets one chunk of them."""
        streams, decode = self._streams, frames.up_decoder.decode
        now = self._loop.time()
        for body in self._buffer.feed(data):
            frame = decode(body)
            if isinstance(frame, frames.Step):
                streams.take(frame, now)
            else:
                self._on_frame(frame)
        streams.flush(now)

    def send(self, frame: frames.DownFrame) -> None:
        if self._transport is not None:
            self._transport.write(frames.pack(frame))

    def close(self) -> None:
        """Lets the engine go: it ends when its socket does."""
        if self._transport is not None:
            self._transport.close()
