"""Attacks over connections and by the bodies of requests: each is answered by a bound, and the server goes on."""

import asyncio
import json
import os
import random
import re
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock, Mock, patch

import httpx
import msgspec
import pytest
from front import InProcess
from serving import ASK, CHAT, COMPLETIONS, DEMO, JSON, OPENING, Server, refusal
from system import wait_for

from nanovllm.engine.prompt import Prompt
from nanovllm.host.engines import Engines
from nanovllm.serve import limits
from nanovllm.serve.api.answer import answer
from nanovllm.serve.api.fields import CommonFields
from nanovllm.serve.errors import ApiError
from nanovllm.serve.formats.base import ChoicesFormat
from nanovllm.serve.front import Front
from nanovllm.serve.http.app import App, Operation
from nanovllm.serve.http.call import Call
from nanovllm.serve.http.connection import Connection, Shared
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.request import Prepared
from nanovllm.serve.text_pool import TextPool


@pytest.mark.parametrize(
    ("head", "answer"),
    [
        (OPENING + b"x: " + b"a" * 5_000_000 + b"\r\n\r\n", (431, "headers_too_large")),
        (OPENING + b"".join(b"x-%d: a\r\n" % i for i in range(1000)) + b"\r\n", (431, "headers_too_large")),
        (OPENING + b"x" * 5_000_000, (431, "headers_too_large")),
        (b"GET /" + b"a" * limits.URL_BYTES + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", (414, "path_too_long")),
        (b"GET /?" + b"a" * 5_000_000, (414, "path_too_long")),
    ],
    ids=["a header of 5 MB", "1,000 headers", "a header's name without end", "a long path", "a query without end"],
)
def test_headers_too_large(front: InProcess, client: httpx.Client, head: bytes, answer: tuple[int, str]) -> None:
    status, error = refusal(front.send(head))
    assert (status, error["code"]) == answer
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("start", [b"", OPENING, OPENING + b"x: "], ids=["nothing", "half", "half a header"])
def test_half_a_request_for_ever(impatient: InProcess, start: bytes) -> None:
    """Bytes now and then do not make the wait longer."""
    assert impatient.send(start, seconds=60) == b""
    with impatient.connect() as connection:
        connection.sendall(start)
        with pytest.raises(OSError):
            for _ in range(150):
                connection.sendall(b"x")
                time.sleep(0.2)


def test_an_idle_connection_that_sends_an_empty_line_is_closed(impatient: InProcess) -> None:
    with impatient.connect() as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200 and answer.read()  # whole, in however many pieces it comes
        connection.sendall(b"\r\n")
        assert connection.recv(1) == b""


def test_body_too_large(front: InProcess, client: httpx.Client) -> None:
    """Refused as soon as it is known: by its length, or when too much of it has come."""
    status, error = refusal(front.send(OPENING + b"content-length: 60000000\r\n\r\n"))
    assert (status, error["code"]) == (413, "body_too_large")
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    trailer = b"0\r\nx: " + b" " * (1 << 20)  # without an end
    for pieces in ([chunk] * 60, [trailer] + [b" " * (1 << 20)] * 80):
        status, error = refusal(front.send(OPENING + b"transfer-encoding: chunked\r\n\r\n", *pieces))
        assert (status, error["code"]) == (413, "body_too_large")
    assert client.get("/health").status_code == 200


def test_bodies_too_large_together(impatient: InProcess) -> None:
    """Clients that never end what they send do not fill the memory, and others are served: those with large bodies when
    these have left."""
    key = {"authorization": "Bearer sesame"}
    head = OPENING + b"authorization: Bearer sesame\r\ncontent-length: 33000000\r\n\r\n"
    with ExitStack() as stack:
        first, *others = [stack.enter_context(impatient.connect()) for _ in range(15)]
        for other in others:  # without a key: answered at once, and not kept
            other.sendall(OPENING + b"content-length: 33000000\r\n\r\n" + b" " * (1 << 20))
            assert other.recv(12) == b"HTTP/1.1 401"
        first.sendall(head + b" " * (30 << 20))
        status, error = refusal(impatient.send(head, b" " * (30 << 20)))
        assert (status, error["code"]) == (503, "server_overloaded")
        filling = stack.enter_context(impatient.connect())
        filling.sendall(head + b" " * ((10 << 20) - 8))
        first.sendall(b" ")  # both still come, and a small body passes them
        small = {"prompt": "a", "max_tokens": 1}
        assert httpx.post(impatient.url + COMPLETIONS, json=small, headers=key).status_code == 200
    body = b" " * (30 << 20) + b'{"prompt": "a", "max_tokens": 1}'
    for _ in range(2):
        assert httpx.post(impatient.url + COMPLETIONS, content=body, headers=key | JSON).status_code == 200


def test_slow_body(impatient: InProcess) -> None:
    head = OPENING + b"authorization: Bearer sesame\r\ncontent-length: 100\r\n\r\n{"
    status, error = refusal(impatient.send(head))
    assert (status, error["code"]) == (408, "request_timeout")


def test_unread_answers(impatient: InProcess) -> None:
    """A client that asks on and reads nothing is let go, whatever it asks for."""

    let_go = partial(impatient.metric, "vllm:slow_clients_closed_total")
    answered = partial(impatient.metric, "http_requests_total", handler="/")
    before = answered()
    with impatient.connect(4096) as connection:
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


def test_a_short_pipeline_is_answered_in_order(front: InProcess) -> None:
    paths = [b"/health", b"/version", b"/v1/models", b"/nothing"] * 7
    asked = b"".join(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path for path in paths)
    last = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    found = re.findall(rb"HTTP/1.1 (\d+)", front.send(asked + last))
    assert found == [b"200", b"200", b"200", b"404"] * 7 + [b"200"]


def test_a_stream_for_http_1_0_is_not_cut_into_chunks(front: InProcess) -> None:
    """As proxies speak it, nginx by default."""
    body = json.dumps(ASK | {"stream": True}).encode()
    request = OPENING.replace(b"1.1", b"1.0") + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    head, _, rest = front.send(request).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert rest.endswith(b"data: [DONE]\n\n") and all(line.startswith(b"data: ") for line in rest.split(b"\n\n")[:-1])


def test_trailers_and_upgrades_are_passed_over(front: InProcess) -> None:
    """Java's client offers HTTP/2 with each request, whatever was asked before on its connection."""
    first = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    body = json.dumps(ASK | {"user": "a" * 100_000}).encode()
    upgrade = b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings, close\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nx-checksum: 5\r\n\r\n" % (len(body), body)
    length = b"content-length: %d\r\n\r\n%b" % (len(body), body)
    for rest in (b"connection: close\r\n" + chunked, upgrade + length):
        assert front.send(first + OPENING + rest).count(b"HTTP/1.1 200") == 2


def test_an_upgrade_is_passed_over_however_it_is_cut() -> None:
    """And what follows headers that end in another read than they began is no header, however large."""

    async def body_of(*pieces: bytes) -> Any:
        bodies = []

        async def answer(call: Call) -> None:
            await call.receive()
            bodies.append((call.header(b"note"), json.loads(call.body())))

        connection = Connection(Shared(Mock(answer=answer), 1))
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


@pytest.mark.parametrize("sent", [b"\x16\x03\x01 hello", b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost"], ids=str)
def test_what_is_no_request_is_refused(front: InProcess, sent: bytes) -> None:
    status, error = refusal(front.send(sent + b"\r\n\r\n"))
    assert (status, error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("size", [(0, 0), (0, 100_000)], ids=["at once", "in the pool"])
def test_a_mistake_of_ours_in_an_answer_is_a_500(size: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    """Also where it looks like one of the request."""

    async def ask() -> bytes:
        front = Front("m", ServeOptions(), cast(Engines, None))
        front.model.info = {"vocab_size": 9}
        form = MagicMock(id="abc", size=lambda request: size)
        form.whole.side_effect = ValueError("prompt: a mistake of ours")
        prepared = Prepared(CommonFields(), [Prompt([5])], {}, [1])

        async def handler(_: Front, call: Call) -> None:
            await answer(front, call, prepared, lambda *_: form)

        app = App(front, {("POST", "/"): Operation(handler)})
        connection = Connection(Shared(app, 1))
        connection.connection_made(transport := MagicMock(is_closing=lambda: False))
        ended = patch.object(front, "submit", lambda request: request.done.set_result(None))
        with ended, patch.object(front.log, "end_request"):
            connection.data_received(b"POST / HTTP/1.1\r\nx-request-id: abc\r\ncontent-length: 0\r\n\r\n")
            await asyncio.gather(*connection.shared.tasks)
        return b"".join(piece for each in transport.writelines.call_args_list for piece in each.args[0])

    status, error = refusal(asyncio.run(ask()))
    assert (status, error["code"]) == (500, "internal_error")
    assert "abc" in caplog.text and "a mistake of ours" in caplog.text


def test_a_long_text_is_written_in_the_pool() -> None:
    """128 answers of 30,000 tokens took 0.8 s in which nobody else was served."""
    for num_tokens, num_echoed, num_numbers, is_long in (
        *((5000, 0, 0, False), (50_000, 0, 0, True), (9, 9000, 0, False), (9, 90_000, 0, True)),
        *((9, 0, 400, False), (9, 0, 600, True), (4000, 9000, 300, True)),
    ):
        rows = [Mock(lines=[bytes(4 * num_numbers)], kept=[])]
        prompts = [Prompt([5], text="a" * num_echoed)]
        request = Mock(n=1, rows=rows, prompts=prompts, prompt_lines=[None], num_output_tokens=num_tokens)
        numbers, text = ChoicesFormat.size(Mock(), request)
        assert (numbers, text) == (4 * num_numbers, 4 * num_tokens + num_echoed), "bytes"
        pool = TextPool(Metrics())
        with patch.object(pool, "in_thread", AsyncMock()) as in_thread:
            asyncio.run(pool.write(MagicMock(), lambda: None, numbers, text))
        assert in_thread.called == is_long


def test_metrics_show_no_paths_and_no_process(server: Server, served: httpx.Client) -> None:
    """They need no key."""
    text = served.get("/metrics").text
    assert "cache_config_info" in text
    assert str(DEMO.parent) not in text and f'="{server.engines[0]}"' not in text
    assert "pid" not in text


def test_metrics_name_a_folder_without_those_above_it(tmp_path: Path) -> None:
    async def text(model: str) -> str:
        return Front(model, ServeOptions(), Mock(fleet=None)).metrics.text().decode()

    (folder := tmp_path / "private" / "model").mkdir(parents=True)
    for model, name in ((str(folder), "model"), (f"{folder}/../model/", "model"), ("owner/model", "owner/model")):
        shown = asyncio.run(text(model))
        assert f'model_name="{name}"' in shown and "private" not in shown


def test_2000_connections_at_once(server: Server, served: httpx.Client) -> None:
    def num_open() -> int:
        return sum(len(os.listdir(f"/proc/{process}/fd")) for process in (server.process.pid, server.engines[0]))

    def ask(_: int) -> int:
        return httpx.post(server.url + COMPLETIONS, json={"prompt": "a", "max_tokens": 1}, timeout=120).status_code

    before = num_open()
    with ExitStack() as stack, ThreadPoolExecutor(20) as pool:
        for _ in range(2000):
            stack.enter_context(server.connect())
        assert set(pool.map(ask, range(40))) == {200}
    assert served.get("/health").status_code == 200
    wait_for(lambda: num_open() <= before + 5, "end of the connections")


# -- bodies


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


def test_depth_and_values_are_counted_whatever_texts_hold() -> None:
    commas = {"a": "1," * 2_000_000, "b": ["\",", [5] * 1000]}
    assert limits.parse_json(json.dumps(commas).encode()) == commas
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


@pytest.mark.parametrize(
    "item", [b"[]", b'{"a":1}', b'"a"', b'"[",[]', b'"]":1', *b"1 1234567 0.5 1e5 null".split(), b'"",1,1,1,1,1,1,1'],
    ids=str,
)
def test_bodies_are_bounded_before_they_are_read(item: bytes) -> None:
    """32 MiB took seconds, in which nothing else is answered, and of numbers hundreds of MB."""
    opening, closing = (b"{", b"}") if item.startswith(b'"]"') else (b"[", b"]")
    body = b'{"b":"1,2","a":' + opening + (item + b", ") * ((31 << 20) // (len(item) + 2)) + item + closing + b"}"
    most = "1,500,000 values" if item[:1].isalnum() or item.endswith(b"1,1") else "250,000 lists"
    before = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match=f"more than {most}"):
            limits.parse_json(body)
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()
    assert time.thread_time() - before < 1.0  # 0.2 s where nothing else runs on the cores


def test_numbers_beside_a_text_are_fewer() -> None:
    """They are not read in pieces."""
    for body in (b'["",' + b"1," * 1_000_000 + b"1]", b'["' + b"a" * 3_000_000 + b'",' + b"1," * 1_000_000 + b"1]"):
        with pytest.raises(ApiError, match="300,000 values beside lists of numbers"):
            limits.parse_json(b'{"a":' + body + b"}")


@pytest.mark.parametrize("body", [b" " * 1_200_000, b"[" + b"1," * 900_000 + b"]"], ids=["blanks", "a comma too many"])
def test_a_large_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        limits.parse_json(body)


def test_a_body_read_in_pieces_is_what_it_is_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is not valid."""
    monkeypatch.setattr(limits, "_PIECE", 16)
    rng = random.Random(2)
    for _ in range(1500):
        value: Any = {"a": [rng.randrange(10**6) for _ in range(rng.randrange(30))], "b": nested(rng.randrange(3), rng)}
        body = json.dumps(value, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5).encode()
        if rng.random() < 0.7:
            place = rng.randrange(len(body))
            body = body[:place] + bytes([rng.choice(b',]}[{"1 \\\xff')]) + body[place + rng.randrange(2) :]
        try:
            whole = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            with pytest.raises(ApiError, match="not valid JSON"):
                limits.parse_json(body)
        else:
            assert limits.parse_json(body) == whole


def test_others_are_answered_while_a_large_body_is_read() -> None:
    events = threading.Event()

    async def read() -> dict[str, Any]:
        front = Front("m", ServeOptions(), cast(Engines, None))
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


def test_large_body(client: httpx.Client) -> None:
    """Many prompts as token ids: some 2 MB."""
    body = {"prompt": [[5] * 1000] * 1024, "max_tokens": 0, "echo": True}
    assert client.post(COMPLETIONS, json=body | {"n": 2}).status_code == 400
    assert client.post(COMPLETIONS, json=body | {"prompt": "a", "user": "a" * 2_000_000}).status_code == 200
