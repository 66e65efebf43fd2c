"""OpenTelemetry: one span for each request that the engine works on, sent over OTLP. Imported where it is asked for."""

import os
import time
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import nanovllm
from nanovllm.serve.request import Request

_SEND_SECONDS = 3
"""Seconds for sending one batch of spans, and the last one before the server ends."""
_REQUEST = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed", "n": "choice.count",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
}  # fmt: skip
"""Fields of requests, and what follows "gen_ai.request." of them."""


class RequestTracer:
    """Makes spans of requests that are over. Attributes: the GenAI conventions, and vLLM's gen_ai.latency.*"""

    def __init__(self, endpoint: str, model_name: str) -> None:
        """`endpoint`: an OTLP/HTTP collector, with or without a path."""
        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
        self._model_name = model_name
        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "nanovllm")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=_SEND_SECONDS)))
        self._tracer = self._provider.get_tracer("nanovllm", nanovllm.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, request: Request, now: float) -> None:
        """The span of a request that has ended, below the one that its `traceparent` header names. `now`: on the clock
        of `request.arrival`."""
        end = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            self._propagator.extract(request.call.trace_headers),
            trace.SpanKind.SERVER,
            _attributes(request, self._model_name, now),
            start_time=end - int(1e9 * (now - request.arrival)),
        )
        if request.error is not None:
            span.set_status(trace.StatusCode.ERROR, request.error.message)
        span.end(end)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.force_flush(1000 * _SEND_SECONDS)


def _attributes(request: Request, model_name: str, now: float) -> dict[str, Any]:
    output, params = request.num_output_tokens, request.params
    names = {"cmpl-": "text_completion", "embd-": "embeddings"}
    found = {
        "gen_ai.operation.name": names.get(request.format.id_prefix, "chat"),
        "gen_ai.provider.name": "nanovllm",
        "gen_ai.request.id": request.id,
        "gen_ai.request.model": request.format.model,
        "gen_ai.request.max_tokens": max(request.max_tokens),
        "gen_ai.response.id": request.id,
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": [
            request.format.finish_reason(row) or ("error" if request.error is not None else "abort")
            for row in request.rows
        ],
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.output_tokens": output,
        "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": output,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "gen_ai.usage.num_sequences": len(request.rows),
        "gen_ai.latency.e2e": now - request.arrival,
        "gen_ai.latency.time_in_queue": request.queued,
        "gen_ai.latency.time_in_model_prefill": request.prefill,
        "gen_ai.latency.time_in_model_decode": request.decode,
        "gen_ai.latency.time_in_model_inference": request.prefill + request.decode,
    }
    if request.first_token is not None:
        found["gen_ai.latency.time_to_first_token"] = request.first_token - request.arrival
    if request.error is not None:
        found["error.type"] = request.error.code or str(request.error.status)
    return found | {f"gen_ai.request.{shown}": params[name] for name, shown in _REQUEST.items() if name in params}
