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
SHORT = 512
"""Characters whose tokenizing takes less than a hand-over to a thread and back."""


class TextPool:
    """Runs such work in the order in which it comes, within bounds."""

    def __init__(self, metrics: Metrics) -> None:
        self.threads = ThreadPoolExecutor(2, "nanovllm-text")
        self.requests: Counter[int | None] = Counter()
        """Requests of each API key that the threads work on or have waiting."""
        self._metrics = metrics
        self._bytes = 0
        """The size of their texts."""

    async def run(self, call: Call, work: Callable[[], Result], size: int) -> Result:
        """Runs `work` in a thread; on a text of few bytes or characters (`size`) at once, which costs less. Raises what
        `work` raises, and ApiError (503) where too much waits for the threads."""
        return work() if size <= SHORT else await self._in_thread(call, work, size)

    async def read(
        self,
        call: Call,
        work: Callable[[dict[str, Any]], Result],
        is_short: Callable[[dict[str, Any]], bool] = lambda body: True,
    ) -> Result:
        """Returns what `work` makes of the object in a body that has been received. Raises ApiError, as `run`. A large
        body is read and worked on in a thread. `is_short`: whether `work` on a small one is less than a hand-over."""
        if call.size > limits.SMALL_BODY:
            return await self._in_thread(call, lambda: work(limits.parse_json(call.body())), call.size)
        body = limits.parse_json(call.body())
        return work(body) if is_short(body) else await self._in_thread(call, lambda: work(body), call.size)

    async def _in_thread(self, call: Call, work: Callable[[], Result], size: int) -> Result:
        if self._bytes + size > limits.PREPARING_BYTES:
            self._metrics.rejected["queue_full"] += 1
            raise ApiError(503, "too many large requests wait to be read and tokenized", "server_overloaded")
        self.requests[call.key] += 1
        self._bytes += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self.threads, _freeing, work)
        finally:
            self.requests[call.key] -= 1
            self._bytes -= size


def _freeing(work: Callable[[], Result]) -> Result:
    """Does `work`. Its refusals let go of what they refuse, here: to free that may take long, too."""
    try:
        return work()
    except ApiError as error:
        error.__context__ = None
        raise error.with_traceback(None) from None
