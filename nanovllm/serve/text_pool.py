"""Two threads for what takes long with a request's text: reading JSON, rendering, tokenizing, writing grammars."""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from nanovllm.serve import limits
from nanovllm.serve.errors import ApiError
from nanovllm.serve.http.call import Call
from nanovllm.serve.metrics import Metrics

Result = TypeVar("Result")
IsShort = Callable[[Call, dict[str, Any]], bool]
"""(a call, its body) -> whether its text is short."""
SHORT = 512
"""Characters whose tokenizing takes less than a hand-over to a thread and back."""
_SHORT_NUMBERS, _SHORT_TEXT = 2048, 32 << 10
"""Bytes of numbers, and of text, that are written as JSON in less than that."""


class TextPool:
    """Runs such work in the order in which it comes, within bounds."""

    def __init__(self, metrics: Metrics, num_keys: int = 0) -> None:
        """`num_keys`: API keys that share it."""
        self.threads = ThreadPoolExecutor(2, "nanovllm-text")
        self.requests: Counter[int | None] = Counter()
        """Requests of each API key that the threads work on or have waiting."""
        self._metrics, self._num_keys = metrics, num_keys
        self._bytes: Counter[int | None] = Counter()
        """Bytes that these were sent as, or are written from."""

    async def write(self, call: Call, work: Callable[[], Result], numbers: int, text: int) -> Result:
        """Runs `work`, which writes JSON from so many bytes of numbers and of text: in a thread, or at once where that
        takes less. Raises what `work` raises, and ApiError as `in_thread`."""
        is_short = numbers / _SHORT_NUMBERS + text / _SHORT_TEXT <= 1
        return work() if is_short else await self.in_thread(call, work, numbers + text)

    async def read(
        self,
        call: Call,
        work: Callable[[dict[str, Any]], Result],
        is_short: IsShort = lambda call, body: True,
    ) -> Result:
        """Returns what `work` makes of the object in a body that has been received. Raises ApiError, as `in_thread`. A
        large body is read and worked on in a thread. `is_short`: whether `work` on a small one is less than a
        hand-over."""
        if call.size > limits.SMALL_BODY:
            return await self.in_thread(call, lambda: work(limits.parse_json(call.body())), call.size)
        body = limits.parse_json(call.body())
        return work(body) if is_short(call, body) else await self.in_thread(call, lambda: work(body), call.size)

    async def in_thread(self, call: Call, work: Callable[[], Result], size: int) -> Result:
        """Runs `work` on so many bytes in a thread. Raises what `work` raises, and ApiError: 503 where too much waits
        for the threads, 429 where too much of the call's key does."""
        self._check_room(call.key, size)
        self.requests[call.key] += 1
        self._bytes[call.key] += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self.threads, _freeing, work)
        finally:
            self.requests[call.key] -= 1
            self._bytes[call.key] -= size

    def _check_room(self, key: int | None, size: int) -> None:
        # Large texts leave as much again to small ones, and those of one key half to the others.
        room = limits.PREPARING_BYTES * (2 if size <= limits.SMALL_BODY else 1)
        if self._bytes.total() + size > room:
            self._metrics.rejected["queue_full"] += 1
            raise ApiError(503, "too many large requests wait to be read, tokenized or written", "server_overloaded")
        if self._num_keys > 1 and self._bytes[key] + size > room // 2:
            self._metrics.rejected["key_full"] += 1
            message = "too many large requests of this API key wait to be read, tokenized or written"
            raise ApiError(429, message, "rate_limit_exceeded")


def _freeing(work: Callable[[], Result]) -> Result:
    """Does `work`. Its refusals let go of what they refuse, here: to free that may take long, too."""
    try:
        return work()
    except ApiError as error:
        error.__context__ = None
        raise error.with_traceback(None) from None
