"""Attacks over connections: each is answered by a bound, and the server goes on."""

import asyncio
import json
import os
import random
import re
import shutil
import socket
import ssl
import string
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock, patch

import httpx
import pytest
from serving import DEMO, Server, ready_server, streamed, user
from system import wait_for

from nanovllm.host.fleet_handles import FleetHandles
from nanovllm.serve import limits
from nanovllm.serve.api.answer import answer
from nanovllm.serve.errors import ApiError
from nanovllm.serve.front import Front
from nanovllm.serve.http.app import App, Operation
from nanovllm.serve.http.call import Call
from nanovllm.serve.http.connection import Connection, Shared
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.options import ServeOptions

CHAT = "/v1/chat/completions"
OPENING = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
JSON = {"content-type": "application/json"}
ASK = {"messages": user("What is the capital of France?"), "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys that waits two seconds where others wait ten or sixty."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("from-file\n")
    arguments = ("--api-key", "sesame", "--api-key", f"@{keys}")
    limits = {"BODIES_BYTES": 40 << 20, "HEADER_SECONDS": 2.0, "BODY_SECONDS": 2.0, "SLOW_SECONDS": 1.0}
    folder, environment = tmp_path_factory.mktemp("impatient"), {"NANOVLLM_API_KEY": "from-environment"}
    with ready_server(folder, *arguments, env=environment, limits=limits) as started:
        yield started


def raw(server: Server, *pieces: bytes, seconds: float = 20.0) -> bytes:
    """Sends bytes as they are; returns all that comes until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        found = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
        except OSError:
            pass  # refused before all of it was sent
        try:
            while data := connection.recv(1 << 16):
                found += data
        except ConnectionResetError:
            pass
        return found


def refusal(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of a raw answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def still_serves(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200


# -- HTTP -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        OPENING + b"x: " + b"a" * 5_000_000 + b"\r\n\r\n",
        OPENING + b"".join(b"x-%d: a\r\n" % i for i in range(1000)) + b"\r\n",
        OPENING + b"x" * 5_000_000,
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
    ids=["a header of 5 MB", "1,000 headers", "a header's name without end", "a long path"],
)
def test_headers_too_large(server: Server, client: httpx.Client, head: bytes) -> None:
    status, error = refusal(raw(server, head))
    assert (status, error["code"]) == (431, "headers_too_large")
    still_serves(client)


@pytest.mark.parametrize("start", [b"", OPENING, OPENING + b"x: "], ids=["nothing", "half", "half a header"])
def test_half_a_request_for_ever(impatient: Server, start: bytes) -> None:
    assert raw(impatient, start, seconds=60) == b""


def test_headers_that_drip(impatient: Server) -> None:
    """Bytes now and then do not make the wait longer."""
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=10) as connection:
        connection.sendall(OPENING)
        with pytest.raises(OSError):
            for _ in range(150):
                connection.sendall(b"x")
                time.sleep(0.2)


def test_an_idle_connection_that_sends_an_empty_line_is_closed(impatient: Server) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200 and answer.read()  # whole, in however many pieces it comes
        connection.sendall(b"\r\n")
        assert connection.recv(1) == b""


def test_body_too_large(server: Server, client: httpx.Client) -> None:
    """Refused as soon as it is known: by its length, or when too much of it has come."""
    status, error = refusal(raw(server, OPENING + b"content-length: 60000000\r\n\r\n"))
    assert (status, error["code"]) == (413, "body_too_large")
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    trailer = b"0\r\nx: " + b" " * (1 << 20)  # without an end
    for pieces in ([chunk] * 60, [trailer] + [b" " * (1 << 20)] * 80):
        status, error = refusal(raw(server, OPENING + b"transfer-encoding: chunked\r\n\r\n", *pieces))
        assert (status, error["code"]) == (413, "body_too_large")
    still_serves(client)


def test_bodies_too_large_together(impatient: Server) -> None:
    """Clients that never end what they send do not fill the memory, and others are served when these have left."""
    head = OPENING + b"authorization: Bearer sesame\r\ncontent-length: 33000000\r\n\r\n"
    with ExitStack() as stack:
        first, *others = [
            stack.enter_context(socket.create_connection(("127.0.0.1", impatient.port))) for _ in range(15)
        ]
        for other in others:  # without a key: answered at once, and not kept
            other.sendall(OPENING + b"content-length: 33000000\r\n\r\n" + b" " * (1 << 20))
            assert other.recv(12) == b"HTTP/1.1 401"
        first.sendall(head + b" " * (30 << 20))
        status, error = refusal(raw(impatient, head, b" " * (30 << 20)))
        assert (status, error["code"]) == (503, "server_overloaded")
    key = {"authorization": "Bearer sesame"}
    body = b" " * (30 << 20) + b'{"prompt": "a", "max_tokens": 1}'
    for _ in range(2):
        assert httpx.post(impatient.url + "/v1/completions", content=body, headers=key | JSON).status_code == 200


def test_slow_body(impatient: Server) -> None:
    head = OPENING + b"authorization: Bearer sesame\r\ncontent-length: 100\r\n\r\n{"
    status, error = refusal(raw(impatient, head))
    assert (status, error["code"]) == (408, "request_timeout")


def test_unread_answers(impatient: Server) -> None:
    """A client that asks on and reads nothing is let go, whatever it asks for."""

    def let_go() -> float:
        return impatient.metric("vllm:slow_clients_closed_total")

    def answered() -> float:
        return impatient.metric("http_requests_total", handler="/")

    before = answered()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", impatient.port))
        sent = 0
        while not let_go():
            assert sent < 20_000
            connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * limits.PIPELINE)
            sent += limits.PIPELINE
            whole = before + sent
            wait_for(lambda whole=whole: answered() >= whole or let_go(), "answers")
        with pytest.raises(ConnectionError):
            connection.sendall(b"GET")
            connection.recv(1)
            time.sleep(0.2)
            connection.sendall(b"GET")


def test_a_short_pipeline_is_answered_in_order(server: Server) -> None:
    paths = [b"/health", b"/version", b"/v1/models", b"/nothing"] * 7
    asked = b"".join(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path for path in paths)
    last = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    found = re.findall(rb"HTTP/1.1 (\d+)", raw(server, asked + last))
    assert found == [b"200", b"200", b"200", b"404"] * 7 + [b"200"]


def test_a_stream_for_http_1_0_is_not_cut_into_chunks(server: Server) -> None:
    """As proxies speak it, nginx by default."""
    body = json.dumps(ASK | {"stream": True}).encode()
    request = OPENING.replace(b"1.1", b"1.0") + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    head, _, rest = raw(server, request).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert rest.endswith(b"data: [DONE]\n\n") and all(line.startswith(b"data: ") for line in rest.split(b"\n\n")[:-1])


def test_a_request_whose_target_is_no_url_is_refused(server: Server) -> None:
    assert refusal(raw(server, b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n"))[0] == 400


def test_trailers_and_upgrades_are_passed_over(server: Server) -> None:
    """Java's client offers HTTP/2 with each request."""
    body = json.dumps(ASK | {"user": "a" * 100_000}).encode()
    upgrade = b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings, close\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nx-checksum: 5\r\n\r\n" % (len(body), body)
    length = b"content-length: %d\r\n\r\n%b" % (len(body), body)
    for rest in (b"connection: close\r\n" + chunked, upgrade + length):
        assert raw(server, OPENING + rest).startswith(b"HTTP/1.1 200")


def test_an_upgrade_is_passed_over_however_it_is_cut() -> None:
    """And what follows headers that end in another read than they began is no header, however large."""

    async def body_of(*pieces: bytes) -> Any:
        bodies = []

        async def answer(call: Call) -> None:
            await call.receive()
            bodies.append((call.header(b"note"), json.loads(call.body())))

        connection = Connection(Shared(answer, Metrics(), 1))
        connection.connection_made(MagicMock(is_closing=lambda: False))
        for piece in pieces:
            connection.data_received(piece)
        await asyncio.gather(*connection.shared.tasks)
        return bodies

    offer = b"POST / HTTP/1.1\r\nNote: upgrade: none\r\nUpGrade: h2c\r\nConnection: Upgrade\r\n"
    body = b'{"a":5%b}' % (b" " * limits.HEADER_BYTES)
    head = offer + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    whole = head + body
    for at in range(len(head) + 2):
        bodies = asyncio.run(body_of(whole[:at], whole[at : at + 2], whole[at + 2 :]))
        assert bodies == [("upgrade: none", {"a": 5})], whole[:at]


def test_no_http(server: Server) -> None:
    status, error = refusal(raw(server, b"\x16\x03\x01 hello\r\n\r\n"))
    assert (status, error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "body",
    [
        *(b"[" * 100_000, b'{"a":' * 40_000, b'{"messages":' + b"[" * 65 + b"]" * 65 + b"}", b"", b"null"),
        *(b'{"a":NaN}', b'{"temperature": Infinity}', b"\xff\xfe", b'{"a":1}x'),
    ],
)
def test_body_that_is_no_request(client: httpx.Client, body: bytes) -> None:
    answer = client.post(CHAT, content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def nested(depth: int, rng: random.Random) -> Any:
    """A value that nests one level deeper than that, among others and brackets in texts."""
    texts = ["".join(rng.choices('a],}{["\\é:, 1', k=rng.randint(0, 9))) for _ in range(3)]
    if depth == 0:
        return rng.choice([*texts, 5, None])
    inner = [nested(depth - 1, rng), *texts, [], {}]
    rng.shuffle(inner)
    return inner if rng.random() < 0.5 else {f"{texts[0]}{i}": value for i, value in enumerate(inner)}


def test_depth_is_counted_whatever_texts_hold() -> None:
    rng = random.Random(1)
    for _ in range(200):
        depth = rng.choice([1, 5, limits.JSON_DEPTH - 2, limits.JSON_DEPTH - 1])
        value = {"a": nested(depth, rng)}
        body = json.dumps(value, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5).encode()
        if depth < limits.JSON_DEPTH - 1:
            assert limits.parse_json(body) == value
        else:
            with pytest.raises(ApiError, match="nests deeper than 64"):
                limits.parse_json(body)


@pytest.mark.parametrize("items", [b"[],", b'{"a":1},', b'"a",', b'"[",[],', b'"]":1,'], ids=str)
def test_structure_is_bounded_before_it_is_read(items: bytes) -> None:
    """A body of 32 MiB would take seconds, in which nothing else is answered."""
    opening, closing = (b"{", b"}") if b"]" in items[:3] else (b"[", b"]")
    body = b'{"a":' + opening + items * ((31 << 20) // len(items)) + items[:-1] + closing + b"}"
    begin = time.thread_time()
    with pytest.raises(ApiError, match="more than 250,000 lists"):
        limits.parse_json(body)
    assert time.thread_time() - begin < 1.0  # 0.2 s where nothing else runs on the cores


@pytest.mark.parametrize("value", [b"1", b"1234567", b"0.5", b"1e5", b"null", b" 7"], ids=str)
def test_values_are_bounded_before_they_are_read(value: bytes) -> None:
    """32 MiB of numbers took hundreds of MB, and 0.3 s of the event loop."""
    items = (31 << 20) // (len(value) + 1)
    body = b'{"a":["1,2",' + (value + b",") * items + value + b"]}"
    before = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="more than 1,500,000 values"):
            limits.parse_json(body)
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()
    assert time.thread_time() - before < 1.0  # 0.2 s where nothing else runs on the cores


def test_commas_of_texts_are_no_values() -> None:
    body = {"a": "1," * 2_000_000, "b": ["\",", [5] * 1000]}
    assert limits.parse_json(json.dumps(body).encode()) == body


def test_a_large_body_is_not_read_in_the_event_loop() -> None:
    """Others are answered meanwhile."""
    events = threading.Event()

    async def read() -> dict[str, Any]:
        front = Front("m", ServeOptions(), cast(FleetHandles, None))
        call = MagicMock(key=None, size=limits.SMALL_BODY + 1)
        reading = asyncio.create_task(front.pool.read(call, dict))
        while not reading.done():
            await asyncio.sleep(0.01)
            events.set()
        return await reading

    def parse(body: bytes) -> dict[str, Any]:
        assert events.wait(20), "the event loop waits for the body"
        return {}

    with patch.object(limits, "parse_json", parse):
        assert asyncio.run(read()) == {}


@pytest.mark.parametrize("num_details", [0, 100_000], ids=["at once", "in the pool"])
def test_a_mistake_of_ours_in_an_answer_is_a_500(num_details: int, caplog: pytest.LogCaptureFixture) -> None:
    """Also where it looks like one of the request."""

    async def ask() -> bytes:
        front = Front("m", ServeOptions(), cast(FleetHandles, None))
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        request = MagicMock(front=front, is_streamed=False, has_left=False, done=done, num_details=num_details)
        request.response.side_effect = ValueError("prompt: a mistake of ours")
        app = App(front, {("POST", "/"): Operation(lambda _, call: answer(call, request))})
        connection = Connection(Shared(app.answer, Metrics(), 1))
        connection.connection_made(transport := MagicMock(is_closing=lambda: False))
        with patch.object(front, "submit"), patch.object(front.log, "end_request"):
            connection.data_received(b"POST / HTTP/1.1\r\nx-request-id: abc\r\ncontent-length: 0\r\n\r\n")
            await asyncio.gather(*connection.shared.tasks)
        return b"".join(piece for each in transport.writelines.call_args_list for piece in each.args[0])

    status, error = refusal(asyncio.run(ask()))
    assert (status, error["code"]) == (500, "internal_error")
    assert "abc" in caplog.text and "a mistake of ours" in caplog.text


def test_large_body(client: httpx.Client) -> None:
    """Many prompts as token ids: some 2 MB."""
    body = {"prompt": [[5] * 1000] * 1024, "max_tokens": 0, "echo": True}
    assert client.post("/v1/completions", json=body | {"n": 2}).status_code == 400
    assert client.post("/v1/completions", json=body | {"prompt": "a", "user": "a" * 2_000_000}).status_code == 200


def test_clients_do_not_send_a_408_again() -> None:
    """Those of OpenAI would, and treble a load that is too high."""
    assert ApiError(408, "no end in time").headers() == [(b"x-should-retry", b"false")]


def test_metrics_show_no_paths_and_no_process(server: Server, client: httpx.Client) -> None:
    """They need no key."""
    text = client.get("/metrics").text
    assert "cache_config_info" in text
    assert str(DEMO.parent) not in text and f'="{server.engine}"' not in text
    assert "pid" not in text


# -- keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["sesame", "from-file", "from-environment"])
def test_each_key_opens(impatient: Server, key: str) -> None:
    answer = httpx.post(impatient.url + CHAT, json=ASK, headers={"authorization": f"Bearer {key}"}, timeout=30)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "value", [None, "Bearer ", "Bearer sesam", "Bearer sesame2", "sesame", "Basic sesame", "Bearer é"]
)
@pytest.mark.parametrize(
    "path", ["/v1/models", "/tokenize", "/load", "/v1/nothing", "//v1/models", "/health/../v1/models"]
)
def test_no_way_past_the_key(impatient: Server, path: str, value: str | None) -> None:
    key = b"" if value is None else b"authorization: " + value.encode() + b"\r\n"
    for host in (b"a", b"a/health", b"a/health?x="):
        request = b"GET %s HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n%s\r\n" % (path.encode(), host, key)
        status, error = refusal(raw(impatient, request))
        assert (status, error["code"]) == (401, "invalid_api_key")


def test_refusal_in_the_form_of_the_endpoint(impatient: Server) -> None:
    error = httpx.post(impatient.url + "/v1/messages", json={}).json()
    assert (error["type"], error["error"]["type"]) == ("error", "authentication_error")


def test_refused_before_the_body_is_read(impatient: Server) -> None:
    """And once: a second answer, to a body that never comes, would be taken for another request's."""
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as connection:
        connection.sendall(OPENING + b"content-length: 1000000\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 401"
        rest = b""
        while data := connection.recv(1 << 16):
            rest += data
    assert b"HTTP/1.1" not in rest


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/metrics", "/version", "/"])
def test_open_paths(impatient: Server, path: str) -> None:
    assert httpx.get(impatient.url + path).status_code == 200


def test_keys_are_not_logged(impatient: Server) -> None:
    assert not any(key in impatient.log for key in ("sesame", "from-file", "from-environment"))


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "a/json; application/json"])
def test_what_is_not_said_to_be_json_is_refused(client: httpx.Client, kind: str | None) -> None:
    """A page of another origin can send these without asking."""
    headers = {} if kind is None else {"content-type": kind}
    answer = client.post(CHAT, content=json.dumps(ASK).encode(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.a+json"])
def test_types_of_json(client: httpx.Client, kind: str) -> None:
    answer = client.post(CHAT, content=json.dumps(ASK).encode(), headers={"content-type": kind})
    assert answer.status_code == 200


def test_cross_origin_is_closed(client: httpx.Client) -> None:
    headers = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    for path in ("/v1/models", "/health", "/"):
        for origin in ("https://elsewhere.example", "null", "http://localhost:1"):
            answer = client.get(path, headers={"origin": origin})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden_origin")
    asked = client.options(CHAT, headers=headers)
    assert asked.status_code == 403
    assert "access-control-allow-origin" not in asked.headers


def test_own_pages_may_call(client: httpx.Client) -> None:
    own = str(client.base_url).rstrip("/")
    assert client.get("/v1/models", headers={"origin": own}).status_code == 200
    proxied = {"origin": "https://chat.example", "sec-fetch-site": "same-origin"}
    assert client.get("/v1/models", headers=proxied).status_code == 200


@pytest.mark.parametrize("host", ["rebound.example", "a.example:80", "localhost.example", "10.0.0.1", "[::2]:80", ""])
def test_other_names_of_this_machine_are_refused(client: httpx.Client, host: str) -> None:
    """A page's own domain that leads here would make the page one of ours."""
    answer = client.get("/v1/models", headers={"host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden_host")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "[::1]:8000", "a.localhost", "127.0.0.1:5"])
def test_names_of_this_machine(client: httpx.Client, host: str) -> None:
    assert client.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*made, *names, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    with ready_server(tmp_path, "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)) as server:
        assert server.url.startswith("https://")
        with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=certificate)) as client:
            assert client.post(CHAT, json=ASK).status_code == 200
            assert streamed(client, CHAT, ASK)
        assert server.stop() == 0


# -- much at once ---------------------------------------------------------------------------------------


def resources(server: Server) -> tuple[float, int]:
    """MiB resident in front and engine, and open descriptors of both."""
    memory = descriptors = 0
    for process in (server.process.pid, server.engine):
        with open(f"/proc/{process}/status") as status:
            memory += next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        descriptors += len(os.listdir(f"/proc/{process}/fd"))
    return memory / 1024, descriptors


@pytest.mark.slow
def test_memory_stays_flat(server: Server) -> None:
    """Requests that are answered, refused and left by their clients leave nothing behind."""
    rng = random.Random(3)

    def one(client: httpx.Client) -> None:
        kind = rng.random()
        body: dict[str, Any] = {"prompt": "".join(rng.choices(string.ascii_lowercase, k=8)), "max_tokens": 1}
        if kind < 0.2:
            client.post("/v1/completions", json=body | {"top_p": 7})
        elif kind < 0.4:
            try:
                client.post("/v1/completions", json=body | {"max_tokens": 500, "ignore_eos": True}, timeout=0.02)
            except httpx.TimeoutException:
                pass
        else:
            client.post("/v1/completions", json=body | {"stream": kind < 0.7})

    def many(count: int) -> None:
        with server.client() as client:
            for _ in range(count):
                one(client)

    many(600)
    wait_for(lambda: server.num_running() == 0, "rest")
    memory, descriptors = resources(server)
    many(1500)
    wait_for(lambda: server.num_running() == 0, "rest")
    later, now_open = resources(server)
    assert later - memory < 20
    assert now_open <= descriptors + 2


def test_2000_connections_at_once(server: Server, client: httpx.Client) -> None:
    _, before = resources(server)

    def ask(_: int) -> int:
        return httpx.post(
            server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=120
        ).status_code

    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2000)]
    with ThreadPoolExecutor(20) as pool:
        assert set(pool.map(ask, range(40))) == {200}
    for connection in connections:
        connection.close()
    still_serves(client)
    wait_for(lambda: resources(server)[1] <= before + 5, "end of the connections")
