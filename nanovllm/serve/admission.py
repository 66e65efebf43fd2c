"""Whether the server takes a request now, and if not, what it says."""

import asyncio
from typing import Literal

from nanovllm.host.handle import Lost
from nanovllm.serve import errors
from nanovllm.serve.book import Book
from nanovllm.serve.errors import ApiError
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.served_model import ServedModel
from nanovllm.serve.text_pool import TextPool
from nanovllm.serve.weight_wait import WeightWait

State = Literal["loading", "ready", "draining", "failed"]


class Admission:
    """State of the server's life, and admission of requests."""

    def __init__(self, model: ServedModel, book: Book, pool: TextPool, metrics: Metrics) -> None:
        self.state: State = "loading"
        self.progress: tuple[str, int] = ("starting", 0)
        """Stage and percent of the start."""
        self.failure: Lost | None = None
        self.changed = asyncio.Event()
        """Set whenever `state` changes."""
        self.weight_wait = WeightWait(model.options.weight_update_timeout)
        self._options, self._model, self._metrics = model.options, model, metrics
        self._book, self._pool = book, pool
        self._loop = asyncio.get_running_loop()

    def become(self, state: State) -> None:
        self.state = state
        self.changed.set()

    def admit(self, key: int | None = None) -> None:
        """Raises ApiError where no request can be taken now. `key`: which of the API keys it came with."""
        if self.state != "ready":
            raise self._refusal()
        if self.weight_wait.is_over(now := self._loop.time()):
            raise errors.weights_incomplete(str(self.weight_wait.text(now)))
        rows: int = self._model.info["max_num_seqs"]
        most = self._options.max_num_queued_reqs or 4 * rows + 512
        if self._book.num_rows + self._pool.requests.total() >= most:
            self._metrics.rejected["queue_full"] += 1
            message = f"the server is full: {most} requests are in flight (--max-num-queued-reqs)"
            raise ApiError(503, message, "server_overloaded")
        if key is None or (share := self._share(most - rows)) is None:
            return
        if self._book.rows_by_key[key] + self._pool.requests[key] >= rows + share:
            self._metrics.rejected["key_full"] += 1
            message = f"this API key has {rows + share} requests in flight: {share} more than can run at once"
            raise ApiError(429, f"{message} (--max-waiting-per-key)", "rate_limit_exceeded")

    def _refusal(self) -> ApiError:
        if self.state == "loading":
            self._metrics.rejected["loading"] += 1
            stage, percent = self.progress
            return ApiError(503, f"the model is loading: {stage} ({percent} %)", "model_loading")
        if self.state == "draining":
            self._metrics.rejected["draining"] += 1
            return errors.shutting_down()
        return errors.engine_dead()

    def _share(self, places: int) -> int | None:
        """Maximum waiting places that one key may take, of so many; None: all."""
        if (given := self._options.max_waiting_per_key) is not None:
            return given
        return max(0, places) // 2 if len(self._options.api_keys) > 1 else None
