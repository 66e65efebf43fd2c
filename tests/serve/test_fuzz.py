"""Requests at random: good, bad, cut, doubled, left at any moment. No 500, no traceback, nothing left running."""

import json
import random
import socket
import time
from typing import Any

import httpx
from serving import CHAT, Server, message, user
from system import wait_for

_VALUES: list[Any] = [
    *(None, 1, -1, 0.5, "x", [], {}, [1], ["a"], {"a": 1}, {"5": 1}, True, 10**12, [[1]], [None], [{}], 1e300)
]
_NAMES = (
    *("messages", "max_tokens", "stream", "n", "tools", "tool_choice", "seed", "temperature", "top_p", "logit_bias"),
    *("stream_options", "structured_outputs", "response_format", "chat_template_kwargs", "bad_words", "min_tokens"),
    *("truncate_prompt_tokens", "stop_token_ids", "allowed_token_ids", "logprobs", "top_logprobs", "stop"),
)
_DIALECTS: dict[bytes, dict[str, Any]] = {
    b"/v1/responses": {
        "input": [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "a"}, *user("hello"),
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "tools": [{"type": "function", "name": "f"}], "text": {"format": {"type": "text"}}, "max_output_tokens": 2,
    },
    b"/v1/messages": {
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "a"}]},
        ],
        "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "auto"}, "system": "a", "max_tokens": 2,
    },
}  # fmt: skip
_EXTRAS: list[dict[str, Any]] = [
    *({}, {}, {"logprobs": True, "top_logprobs": 5}, {"stop": ["e", " "]}, {"response_format": {"type": "json_object"}})
]


def random_body(rng: random.Random) -> bytes:
    body: dict[str, Any] = {"messages": user("hello there"), "max_tokens": rng.randint(1, 8)}
    body |= {"stream": rng.random() < 0.5, "n": rng.randint(1, 3)} | rng.choice(_EXTRAS)
    for _ in range(rng.randint(0, 2)):
        body[rng.choice(_NAMES)] = rng.choice(_VALUES)
    return json.dumps(body).encode()


def spoiled(rng: random.Random, value: Any) -> Any:
    """A body with another value somewhere in it."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.8:
        place = rng.choice([*value] if isinstance(value, dict) else range(len(value)))
        value = value.copy()
        value[place] = spoiled(rng, value[place])
        return value
    return rng.choice(_VALUES)


def test_dialects(client: httpx.Client) -> None:
    rng = random.Random(7)
    for _ in range(300):
        path = rng.choice([*_DIALECTS])
        body = spoiled(rng, _DIALECTS[path])
        assert client.post(path.decode(), json=body).status_code in ((415,) if body is None else (200, 400, 404)), body


def mangled(rng: random.Random, message: bytes) -> bytes:
    kind = rng.random()
    if kind < 0.2:
        changed = bytearray(message)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if kind < 0.3:
        return message[: rng.randrange(len(message))]
    return message * 2 if kind < 0.4 else message


def test_random_requests(server: Server) -> None:
    rng = random.Random(5)
    for _ in range(600):
        body = random_body(rng)
        with server.connect() as connection:
            try:
                whole = message(CHAT, body)
                sent = mangled(rng, whole)
                connection.sendall(sent)
                if rng.random() < 0.4:  # leaves
                    time.sleep(rng.random() * 0.01)
                    continue
                if not sent.startswith(whole):  # the server may wait for more
                    connection.shutdown(socket.SHUT_WR)
                status = connection.recv(12)
            except OSError:  # it was refused, and closed, while it was sending
                continue
            assert not status.startswith(b"HTTP/1.1 5"), body
    wait_for(lambda: server.num_running() == 0, "end of all requests")
    assert httpx.get(server.url + "/health").status_code == 200
    assert "Traceback" not in server.log
