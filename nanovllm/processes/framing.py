"""A stream of bytes as messages, each behind its length."""

import struct
from collections.abc import Iterator

LENGTH = struct.Struct("<Q")
"""Length prefix of a message between our own processes."""
READ_BYTES = 1 << 16
"""Maximum bytes to read at once. The buffer of a larger read is mapped anew each time, which takes 10 to 15 us."""
_ONE_PIECE = 1 << 16  # bytes of a message that is copied behind its length, to be sent at once


class FrameBuffer:
    """Splits a stream into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """An incomplete message, which begins with its length."""

    def feed(self, data: bytes | memoryview) -> Iterator[memoryview]:
        """Yields the messages that `data` completes. Each is valid until the next one is asked for."""
        self._rest += data
        begin, size = 0, LENGTH.size
        with memoryview(self._rest) as whole:
            while len(whole) - begin >= size:
                end = begin + size + LENGTH.unpack_from(whole, begin)[0]
                if end > len(whole):
                    break
                with whole[begin + size : end] as body:
                    yield body
                begin = end
        del self._rest[:begin]


def framed(packed: bytes) -> list[bytes]:
    """Pieces to send for a message, its LENGTH first."""
    length = LENGTH.pack(len(packed))
    return [length + packed] if len(packed) <= _ONE_PIECE else [length, packed]
