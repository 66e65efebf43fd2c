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
_SHORT = 512  # characters whose tokenizing takes less than a hand-over to a thread and back


class TextPool:
    """Runs such work in the order in which it comes, within bounds."""

    def __init__(self, metrics: Metrics) -> None:
        self.threads = ThreadPoolExecutor(2, "nanovllm-text")
        self.requests: Counter[int | None] = Counter()
        """Requests of each API key that the threads work on or have waiting."""
        self._metrics = metrics
        self._bytes = 0
        """The size of their texts."""

    async def run(self, call: Call, work: Callable[[], Result], size: int, is_short: bool = True) -> Result:
        """Runs `work` in a thread; on a text of few bytes or characters (`size`) at once, which costs less, unless
        `is_short` is False. Raises what `work` raises, and ApiError (503) where too much waits for the threads."""
        if is_short and size <= _SHORT:
            return work()
        if self._bytes + size > limits.PREPARING_BYTES:
            self._metrics.rejected["queue_full"] += 1
            raise ApiError(503, "too many large requests wait to be read and tokenized", "server_overloaded")
        self.requests[call.key] += 1
        self._bytes += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self.threads, work)
        finally:
            self.requests[call.key] -= 1
            self._bytes -= size

    async def json(self, call: Call, or_empty: bool = False) -> dict[str, Any]:
        """The object in a request's body, or an empty one where there may be no body. Raises ApiError."""
        body = await call.body(or_empty)
        if or_empty and not body:
            return {}
        if len(body) <= limits.SMALL_BODY:
            return limits.parse_json(body)
        return await self.run(call, lambda: limits.parse_json(body), len(body))
