"""A stream of bytes as messages, each behind its length."""

import struct
from collections.abc import Iterator


class FrameBuffer:
    """Cuts a stream into messages."""

    def __init__(self, length: struct.Struct) -> None:
        """length: how it is written."""
        self._length = length
        self._rest = bytearray()
        """Begins with a length; the message behind it is not all there."""

    def feed(self, data: bytes | memoryview) -> Iterator[memoryview]:
        """The messages that `data` completes, each to be read before the next is asked for."""
        self._rest += data
        begin, size = 0, self._length.size
        with memoryview(self._rest) as whole:
            while len(whole) - begin >= size:
                end = begin + size + self._length.unpack_from(whole, begin)[0]
                if end > len(whole):
                    break
                with whole[begin + size : end] as body:
                    yield body
                begin = end
        del self._rest[:begin]
