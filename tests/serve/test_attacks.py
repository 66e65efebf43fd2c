"""Every known attack, beside a stream of another user: it goes on, /health answers, the front's memory stays."""

import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import httpx
import pytest
from attacking import Attack, Watched, descendants, watched
from serving import CHAT, COMPLETIONS, JSON, MESSAGES, RESPONSES, Server, message, read_until, user
from system import alive, wait_for

from nanovllm.serve import limits

COUNT, TOKENIZE, DETOKENIZE = "/v1/messages/count_tokens", "/tokenize", "/detokenize"
NONCE = b"once0000"
"""Bytes of a body that are others in each try, so that nothing is known from the one before."""
DESCENDANTS = 1600
"""MiB that the engine and all that it starts may take together."""
OWN_KEY, OTHER_KEY = "own", "other"
_tries = itertools.count()
OBJECT = {"prompt": "a", "max_tokens": 3, "structured_outputs": {"json_object": True}}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A server without keys that any address leads to."""
    with watched(tmp_path_factory.mktemp("single"), "--host", "0.0.0.0") as found:
        assert httpx.post(found.server.url + COMPLETIONS, json=OBJECT, timeout=60).status_code == 200
        yield found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A server with keys over two replicas, which take a while to start."""
    options = ("--data-parallel-size", "2", "--api-key", OWN_KEY, "--api-key", OTHER_KEY)
    patches = {"PREPARING_BYTES": 8 << 20, "nanovllm.host.fleet:MOST_RESTARTS": 99}
    folder = tmp_path_factory.mktemp("fleet")
    with watched(folder, *options, key=OTHER_KEY, limits=patches, simulated=True) as found:
        yield found


# -- attacks ----------------------------------------------------------------------------------------------------------


def post(path: str, *statuses: int, **fields: Any) -> Attack:
    """Sends a request, which is answered by one of these."""
    computes = "echo" in fields or "prompt_logprobs" in fields
    return send(path, *statuses, body=lambda: json.dumps(fields).encode(), computes=computes)


def send(path: str, *statuses: int, body: Callable[[], bytes], computes: bool = False) -> Attack:
    """`body`: makes one, of which all together would take hundreds of megabytes."""

    def run(server: Server) -> None:
        if NONCE in (content := body()):
            content = content.replace(NONCE, b"%08d" % next(_tries))
        headers = {"content-type": "application/json"}
        answer = httpx.post(server.url + path, content=content, headers=headers, timeout=60)
        assert answer.status_code in statuses, answer.text[:500]
        assert answer.status_code == 200 or len(answer.content) < 1400

    return Attack(run, computes)


def chat(**fields: Any) -> Attack:
    """Attack by a chat that is refused."""
    return post(CHAT, 400, **({"messages": user("a"), "max_tokens": 4} | fields))


def called(**function: Any) -> Attack:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"} | function}
    return chat(messages=[{"role": "assistant", "tool_calls": [call]}])


def said(**block: Any) -> Attack:
    return post(MESSAGES, 400, max_tokens=4, messages=[{"role": "assistant", "content": [block]}])


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}} | fields}


def custom(grammar: str) -> Attack:
    """A tool whose text follows a Lark grammar, which is refused."""
    form = {"type": "grammar", "syntax": "lark", "definition": grammar}
    tools = [{"type": "custom", "name": "f", "format": form}]
    return post(RESPONSES, 400, input="a", truncation="auto", max_output_tokens=4, tools=tools)


def generate(**params: Any) -> Attack:
    masked = {"sampling_mask": True, "ignore_eos": True, "temperature": 2.0, "top_p": 0.999}
    status = 400 if params["max_tokens"] > 1000 else 200
    return post("/inference/v1/generate", status, token_ids=[5], sampling_params=masked | params)


def hard(**constraint: Any) -> Attack:
    """A constraint that is served or refused; it is not known from before where it holds NONCE."""
    return post(COMPLETIONS, 200, 400, prompt="a", max_tokens=10, structured_outputs=constraint)


def chained(count: int) -> dict[str, Any]:
    """Objects, each of which refers to the next."""
    chain = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)}
    return {"title": NONCE.decode(), "$defs": {**chain, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def echo_read_late(server: Server) -> None:
    """The first chunks of most prompts wait for a client that reads when the engine is done."""
    with server.connect(4096) as connection:
        connection.sendall(message(COMPLETIONS, {"prompt": [[5] * 950] * 13, "stream": True} | ECHO))
        wait_for(lambda: server.num_running() > 1, "prompts")
        wait_for(lambda: server.num_running() <= 1, "end of the prompts")
        read_until(connection.fileno(), b"data: [DONE]")


def pipeline(server: Server, reads: bool = False) -> None:
    """Asks on and on; 34 MB of questions once made 1.7 GB of requests that waited."""
    question = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with server.connect() as connection, suppress(ConnectionError):
        for _ in range(100):
            connection.sendall(question * 8000)
            if reads and not connection.recv(1 << 20):
                return
        raise AssertionError("nothing ends it")


def slow_schemas(server: Server) -> None:
    """60 of them, and another user who asks for JSON, which is known."""
    url, part = server.url + COMPLETIONS, next(_tries)

    def schema(number: int) -> int:
        properties = {f"a{part}_{number}_{i}": {"type": "integer"} for i in range(400)}
        wanted = {"json": {"type": "object", "properties": properties}}
        body = {"prompt": "a", "max_tokens": 1, "structured_outputs": wanted}
        return client.post(url, json=body).status_code

    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(60) as pool:
        answers = [pool.submit(schema, number) for number in range(60)]
        wait_for(lambda: server.num_running() > 5, "schemas")
        assert client.post(url, json=OBJECT).status_code == 200
        assert sum(each.done() for each in answers) < 60, "JSON waited for all schemas"
        assert {each.result() for each in answers} <= {200, 400}


def doubling_schemas(server: Server) -> None:
    """1 KB each, whose states double with each pattern; and another user who asks for a choice that is not known."""
    part = next(_tries)

    def schema(count: int) -> dict[str, Any]:
        patterns = [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(1, count + 1)]
        return {"title": f"{part}", "allOf": patterns}

    def arguments(count: int) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": schema(count)}, "required": ["a"]}

    def ask(path: str, **fields: Any) -> httpx.Response:
        return client.post(server.url + path, json={"max_tokens": 4} | fields)

    chat: dict[str, Any] = {"path": CHAT, "messages": user("a")}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(40)}}
    wanted = [
        {"path": COMPLETIONS, "prompt": "a", "structured_outputs": {"json": schema(26)}},
        {"path": COMPLETIONS, "prompt": "a", "structured_outputs": {"json": schema(40)}},
        chat | {"response_format": form},
        chat | {"tools": [tool("f", parameters=arguments(40))], "tool_choice": "required"},
    ]
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, **each) for each in wanted]
        choice = ask(COMPLETIONS, prompt="a", structured_outputs={"choice": ["a", f"b{part}"]})
        assert choice.status_code == 200 and not all(each.done() for each in answers)
        while not all(each.done() for each in answers):
            assert (taken := descendants(server.process.pid)) < DESCENDANTS, taken
            time.sleep(0.05)
        assert [each.result().status_code for each in answers] == [400] * 4


def more_connections_than_descriptors(server: Server) -> None:
    """An address that opens them loses its oldest ones; another one keeps its own."""
    question = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with ExitStack() as stack:
        other, here, there = stack.enter_context(server.connect()), ("127.0.0.1", server.port), ("127.0.0.2", 0)
        made = [stack.enter_context(socket.create_connection(here, 20, there)) for _ in range(250)]
        for each in (other, made[-1]):
            each.sendall(question)
            assert each.recv(12) == b"HTTP/1.1 200"
        with suppress(ConnectionError):
            assert made[0].recv(12) == b""
        wait_for(lambda: "the limit of open files" in server.log, "line of the log")


def path_of_slashes(server: Server) -> None:
    """Each once took a second, before a key was asked for."""
    for _ in range(5):
        answer = server.send(b"GET " + b"/" * 65_000 + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 414")


def page_of_another_name(server: Server) -> None:
    """A page whose name is made to lead here may ask for nothing, however often."""
    bodies = (CHAT, {"messages": user("a")}), (COMPLETIONS, {"prompt": "a", "n": 32, "max_tokens": 1900})
    with server.client() as client:
        for (path, body), host in itertools.product(bodies, ["a.example", f"a.example:{server.port}"] * 50):
            answer = client.post(path, json=body, headers={"host": host})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden_host")
    assert server.num_running() <= 1


def key_that_fills_its_bound(server: Server) -> None:
    """The other key's text, which a thread prepares too, is taken meanwhile."""
    numbers = b'{"messages": [%b5]}' % (b"5555," * 300_000)
    small = json.dumps({"messages": user("a"), "max_tokens": 1}).encode() + b" " * limits.SMALL_BODY
    with server.client(OWN_KEY) as own, server.client(OTHER_KEY) as other, ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            large = [pool.submit(own.post, CHAT, content=numbers, headers=JSON) for _ in range(8)]
            while not all(each.done() for each in large):
                answer = other.post(CHAT, content=small, headers=JSON)
                assert answer.status_code == 200, answer.text
            statuses = {each.result().status_code for each in large}
            assert statuses <= {400, 429}
            if 429 in statuses:
                return
        raise AssertionError("nothing fills it")


def lost_replica(number: int, reason: str) -> Attack:
    """Another one is started in the place of the one that gets a signal."""

    def run(server: Server) -> None:
        count, first = server.log.count(reason), min(alive({*server.engines}))
        os.kill(first, number)
        wait_for(lambda: server.log.count(reason) > count, "line of the log")
        wait_for(lambda: len(now := alive({*server.engines})) == 2 and first not in now, "replica in its place")

    return Attack(run, computes=True, on_fleet=True)


LARGEST = {
    "text": b'"' + b"a" * (limits.BODY_BYTES - 200) + b'"',
    "numbers": b"[" + b"5555," * (limits.JSON_COMMAS - 10) + b"5]",
    "numbers and a text": b'["",' + b"5555," * (limits.JSON_COMMAS - 10) + b"5]",
    "objects": b"[" + b'{"a":1},' * (limits.JSON_ITEMS - 10) + b"{}]",
}
"""Values of a body that is as large as may be."""
LONG = "lorem ipsum " * 2_000_000
DEEP = '{"a":' * 2000 + "1" + "}" * 2000
ECHO = {"max_tokens": 1, "echo": True, "logprobs": 20}
LETTERS = "cdefghijklmnopqr"
WORDS = [f"{i} " + "xq" * 124 for i in range(256)]
ATTACKS = {
    # grammars
    "a grammar of newlines": post(COMPLETIONS, 400, prompt="a", structured_outputs={"grammar": "\n" * 131_000}),
    "a deep schema beside tools": chat(tools=[tool("f")], structured_outputs={"json": DEEP}),
    "a schema as long a chain as may be": hard(json=chained(498)),
    "a schema of many properties": hard(
        json={"title": NONCE.decode(), "properties": {f"p{i}": {"type": "integer"} for i in range(990)}}
    ),
    "an expression with two repeats": hard(regex="(a+)+b" + NONCE.decode()),
    "an expression with overlaps": hard(regex="(a|aa)*c" + NONCE.decode()),
    "an expression that counts": hard(regex="(x{1,50}){1,50}" + NONCE.decode()),
    "texts of a tool's grammar that have no end": custom('start: "' + '\\"' * 8000),
    "a tool's grammar of many rules": custom("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(1400))),
    "60 slow schemas": Attack(slow_schemas),
    "schemas whose states double": Attack(doubling_schemas),
    # lists of words and ids
    "bad words": post(COMPLETIONS, 200, prompt="a", max_tokens=4, n=16, bad_words=WORDS),
    "stop strings": post(COMPLETIONS, 200, prompt=["a"] * 300, max_tokens=2, stop=[c + "b" * 255 for c in LETTERS]),
    "allowed ids": post(COMPLETIONS, 400, prompt="a", allowed_token_ids=[*range(262_144)]),
    "a thousand prompts with large fields": post(
        COMPLETIONS, 200, prompt=["a"] * 1000, max_tokens=1, logit_bias={str(i): 1.0 for i in range(600)}
    ),
    "ids that each of many prompts may have": post(
        COMPLETIONS, 400, prompt=["a"] * 1000, max_tokens=1, allowed_token_ids=[5] * 100_000
    ),
    # text
    "content": chat(messages=user(LONG)),
    "messages": chat(messages=user("a") * 60_000),
    "reasoning": chat(messages=[{"role": "assistant", "content": "a", "reasoning_content": LONG}]),
    "a name": chat(messages=[{"role": "user", "content": "a", "name": LONG}]),
    "a call's name": called(name=LONG),
    "a call's arguments": called(arguments=LONG),
    "a tool's description": chat(tools=[tool("f", description=LONG)]),
    "tools": chat(tools=[tool(f"f{i}", description=LONG[:114_000]) for i in range(128)]),
    "template variables": chat(chat_template_kwargs={"a": LONG}),
    "text to tokenize": post(TOKENIZE, 400, prompt=LONG),
    "template variables to tokenize": post(TOKENIZE, 400, messages=user("a"), chat_template_kwargs={"a": LONG}),
    "thoughts": said(type="thinking", thinking=LONG),
    "a call's input": said(type="tool_use", id="a", name="f", input={"a": LONG}),
    "a system message": post(COUNT, 400, messages=user("a"), system=LONG),
    "an item": post(RESPONSES, 400, input=[{"type": "function_call", "call_id": "a", "name": "f", "arguments": LONG}]),
    "a prompt": post(COMPLETIONS, 400, prompt=LONG),
    "prompts": post(COMPLETIONS, 400, prompt=[LONG[:9_000]] * 1000),
    # answers
    "log-probabilities of prompts": post(COMPLETIONS, 200, prompt=[[5] * 1900] * 6, **ECHO),
    "log-probabilities of prompts in a stream": Attack(echo_read_late, computes=True),
    "log-probabilities of one prompt n times": post(COMPLETIONS, 200, prompt=[5] * 1900, n=6, prompt_logprobs=20),
    "more of them": post(COMPLETIONS, 400, prompt=[5] * 1900, n=32, **ECHO),
    "sampling masks": generate(max_tokens=60, n=16),
    "more sampling masks": generate(max_tokens=1900, n=3),
    # connections
    "paths of slashes": Attack(path_of_slashes),
    "a pipeline that is not read": Attack(pipeline),
    "a pipeline that is read": Attack(lambda server: pipeline(server, reads=True)),
    "more connections than descriptors": Attack(more_connections_than_descriptors),
    "a page of another name": Attack(page_of_another_name),
    # of a server with keys and replicas
    "a key that fills its bound": Attack(key_that_fills_its_bound, computes=True, on_fleet=True),
    "a replica that dies": lost_replica(signal.SIGKILL, "died by signal 9"),
    "a replica that lingers": lost_replica(signal.SIGUSR1, "closed its connection"),
} | {
    f"{path}: the largest body of {kind}": send(path, 400, body=partial(b'{"%b": %b}'.__mod__, (name, value)))
    for path, name in (
        (CHAT, b"messages"), (COMPLETIONS, b"prompt"), (MESSAGES, b"messages"), (RESPONSES, b"input"),
        ("/inference/v1/generate", b"token_ids"), (DETOKENIZE, b"tokens"),
    )
    for kind, value in LARGEST.items()
}  # fmt: skip


IN_OTHER_FIELDS = {
    "reasoning", "a name", "a call's name", "a tool's description", "template variables",
    "template variables to tokenize", "a call's input", "a system message",
    *(name for name in ATTACKS if name.endswith(("of text", "of numbers", "of objects")) and not name.startswith(CHAT)),
}  # fmt: skip
"""Attacks by what another field has by day, too."""


@pytest.mark.parametrize(
    "attack",
    [pytest.param(attack, id=name, marks=[pytest.mark.slow] * (name in IN_OTHER_FIELDS))
     for name, attack in ATTACKS.items()],
)  # fmt: skip
def test_others_are_served_meanwhile(attack: Attack, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("fleet" if attack.on_fleet else "single").suffer(attack)
