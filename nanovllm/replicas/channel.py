"""What connects a front and a replica of its host: pickled messages over a socket that both hold, and a bell."""

import pickle
import socket
from typing import Any

from nanovllm.processes.framing import FrameBuffer, framed

_READ_BYTES = 1 << 18


class Channel:
    """One end. One thread at a time may send, and one receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._piece = memoryview(bytearray(_READ_BYTES))
        self._frames = FrameBuffer()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, packed: bytes) -> None:
        """Waits for room. Raises OSError where the other end is gone."""
        for piece in framed(packed):
            self._socket.sendall(piece)

    def send_some(self, piece: memoryview) -> memoryview:
        """Sends what there is room for; returns the rest. Raises OSError where the other end is gone."""
        try:
            return piece[self._socket.send(piece, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return piece

    def receive(self, waits: bool = False) -> list[Any]:
        """The messages that are complete now; `waits` for a piece of one. Raises EOFError or OSError where the other
        end is gone."""
        try:
            size = self._socket.recv_into(self._piece, 0, 0 if waits else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not size:
            raise EOFError
        return [pickle.loads(body) for body in self._frames.feed(self._piece[:size])]

    def close(self) -> None:
        self._socket.close()


def small(message: Any) -> memoryview:
    """A message as it travels, so short that a socket takes it whole or, without room, not at all."""
    return memoryview(framed(pickle.dumps(message))[0])


class Bell:
    """Wakes a thread that polls its number, from any other thread."""

    def __init__(self) -> None:
        self._heard, self._rung = socket.socketpair()
        for end in (self._heard, self._rung):
            end.setblocking(False)

    def fileno(self) -> int:
        return self._heard.fileno()

    def ring(self) -> None:
        try:
            self._rung.send(b"!")
        except OSError:
            pass  # it rings already, or is closed

    def hush(self) -> None:
        """After a poll that found it ringing."""
        self._heard.recv(64)

    def close(self) -> None:
        self._heard.close()
        self._rung.close()
