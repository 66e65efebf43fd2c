"""Log lines and trace spans of requests."""

import asyncio
import logging
from typing import TYPE_CHECKING

from nanovllm.serve.metrics import Metrics
from nanovllm.serve.request import Request
from nanovllm.serve.served_model import ServedModel

if TYPE_CHECKING:
    from nanovllm.serve.tracing import RequestTracer

logger = logging.getLogger("nanovllm.serve")


class RequestLog:
    """A line for each request that is over, its span, and a line every 10 s while there is work."""

    def __init__(self, model: ServedModel, metrics: Metrics) -> None:
        self._options, self._model, self._metrics = model.options, model, metrics
        self._loop = asyncio.get_running_loop()
        self._last_totals = (self._loop.time(), 0, 0)
        self.tracer: RequestTracer | None = None
        if self._options.otlp_traces_endpoint is not None:
            from nanovllm.serve import tracing

            self.tracer = tracing.RequestTracer(self._options.otlp_traces_endpoint, model.name)

    def close(self) -> None:
        """Sends the last spans."""
        if self.tracer is not None:
            self.tracer.close()

    def end_request(self, request: Request) -> None:
        """Tells of a request that is over."""
        now = self._loop.time()
        if self.tracer is not None:
            self.tracer.record(request, now)
        if not logger.isEnabledFor(logging.INFO):
            return
        if self._options.log_prompts:
            for prompt in request.prompts:
                logger.info("%s: prompt %r", request.id, self._model.tokenizer.decode(prompt.token_ids, False))
        tokens = request.num_output_tokens
        reasons = {"abort" if row.end is None else row.end.reason for row in request.rows}
        logger.info(
            "%s: %d tokens in (%d cached), %d out, queued %.3f s, first token %.3f s, %.1f tok/s, %s",
            *(request.id, request.num_prompt_tokens, request.num_cached_tokens, tokens, request.queued),
            *((request.first_token or now) - request.arrival, tokens / max(now - request.arrival, 1e-9)),
            request.error.code if request.error is not None else "/".join(sorted(reasons)),
        )

    def totals(self) -> None:
        """Called once a second while there is work."""
        if self._options.disable_log_stats:
            return
        then, prompts, outputs = self._last_totals
        seconds = self._loop.time() - then
        if seconds < 10:
            return
        stats = self._metrics.stats()
        if seconds < 20:  # else there was no work in between
            logger.info(
                "%d running, %d waiting, KV cache %.1f %%, %.1f prompt tok/s, %.1f output tok/s",
                *(stats.num_running, stats.num_waiting, 100 * stats.kv_cache_usage),
                *((stats.prompt_tokens - prompts) / seconds, (stats.generation_tokens - outputs) / seconds),
            )
        self._last_totals = (self._loop.time(), stats.prompt_tokens, stats.generation_tokens)
