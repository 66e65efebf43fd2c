"""Spans of requests, as a collector gets them. Needs the extra "otel"."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import ASK, CHAT, COMPLETIONS, events, ready_server
from system import wait_for

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(HTTPServer):
    """Keeps the spans that are sent to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receive)
        self.spans: list[Any] = []
        self.services: set[str] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Receive(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert self.path == "/v1/traces" and isinstance(self.server, Collector)
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for group in sent.resource_spans:
            named = [one for one in group.resource.attributes if one.key == "service.name"]
            self.server.services |= {one.value.string_value for one in named}
            self.server.spans += [span for scope in group.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Spans by request id: of a chat, a stream with a parent, a completion whose client leaves, and an error."""
    collector = Collector()
    folder, endpoint = tmp_path_factory.mktemp("traced"), f"http://127.0.0.1:{collector.server_port}"
    with ready_server(folder, "--otlp-traces-endpoint", endpoint) as server, server.client() as client:
        head = {"x-request-id": "plain"}
        assert client.post(CHAT, json=ASK | {"top_p": 0.5, "seed": 3}, headers=head).status_code == 200
        head = {"x-request-id": "child", "traceparent": f"00-{TRACE}-{PARENT}-01"}
        with client.stream("POST", CHAT, json=ASK | {"stream": True, "n": 2}, headers=head) as stream:
            assert list(events(stream))
        body = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with client.stream("POST", COMPLETIONS, json=body, headers={"x-request-id": "left"}) as stream:
            next(stream.iter_raw())
        bad = ASK | {"structured_outputs": {"regex": "("}}
        assert client.post(CHAT, json=bad, headers={"x-request-id": "wrong"}).status_code == 400
        wait_for(lambda: server.num_running() == 0, "end of all requests")
        assert server.stop() == 0  # sends what it has
    assert collector.services == {"nanovllm"}
    collector.shutdown()
    found = {attributes(span)["gen_ai.request.id"]: span for span in collector.spans}
    assert len(found) == len(collector.spans) == 4
    yield found


def attributes(span: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        return [value(each) for each in one.array_value.values] if kind == "array_value" else getattr(one, kind)

    return {one.key: value(one.value) for one in span.attributes}


def test_an_answer(spans: dict[str, Any]) -> None:
    span = spans["plain"]
    assert (span.name, span.kind, span.parent_span_id) == ("llm_request", 2, b"")  # 2: of a server
    said = attributes(span)
    wanted = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "demo", "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5, "gen_ai.request.seed": 3, "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 15, "gen_ai.usage.output_tokens": 9, "gen_ai.usage.completion_tokens": 9,
    }  # fmt: skip
    assert said | wanted == said
    first, whole = said["gen_ai.latency.time_to_first_token"], said["gen_ai.latency.e2e"]
    assert 0 < said["gen_ai.latency.time_in_model_prefill"] <= first <= whole
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(whole, abs=1e-3)


def test_a_parent_and_early_ends(spans: dict[str, Any]) -> None:
    span = spans["child"]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    said = attributes(span)
    assert said["gen_ai.request.choice.count"] == said["gen_ai.usage.num_sequences"] == 2
    assert said["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    assert attributes(spans["left"])["gen_ai.response.finish_reasons"] == ["abort"]
    assert attributes(spans["left"])["gen_ai.operation.name"] == "text_completion"
    assert spans["wrong"].status.code == 2  # an error
    assert attributes(spans["wrong"])["error.type"] == "invalid_schema"


def test_a_collector_that_is_not_there(tmp_path: Path) -> None:
    """It costs requests nothing, and the end a few seconds at most."""
    with ready_server(tmp_path, "--otlp-traces-endpoint", "http://127.0.0.1:9") as server:
        assert httpx.post(server.url + CHAT, json=ASK).status_code == 200
        assert server.stop(seconds=15) == 0
