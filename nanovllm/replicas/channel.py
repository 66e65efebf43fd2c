"""Messages between a front and a replica of its host: pickles, each behind its length, over a socket that both hold."""

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 18
_ONE_PIECE = 1 << 16  # bytes of a message that is copied behind its length, to be sent at once


class Channel:
    """One end. One thread at a time may send, and one receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._piece = memoryview(bytearray(_READ_BYTES))
        self._unread = bytearray()
        """Begins with a length; the message behind it is not all there."""

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
        if not self._unread and size - _LENGTH.size == _LENGTH.unpack_from(self._piece)[0]:  # nearly always
            return [pickle.loads(self._piece[_LENGTH.size : size])]
        self._unread += self._piece[:size]
        messages, begin = [], 0
        with memoryview(self._unread) as unread:
            while len(unread) - begin >= _LENGTH.size:
                end = begin + _LENGTH.size + _LENGTH.unpack_from(unread, begin)[0]
                if end > len(unread):
                    break
                messages.append(pickle.loads(unread[begin + _LENGTH.size : end]))
                begin = end
        del self._unread[:begin]
        return messages

    def close(self) -> None:
        self._socket.close()


def framed(packed: bytes) -> list[bytes]:
    """A message as it travels, in pieces."""
    length = _LENGTH.pack(len(packed))
    return [length + packed] if len(packed) <= _ONE_PIECE else [length, packed]
