"""What a client may send. Bounds of sampling options are SamplingParams', those of grammars the engine's."""

from typing import Any

import orjson

from nanovllm.serve.errors import ApiError, bad_request

HEADER_BYTES = 64 << 10
HEADER_COUNT = 100
BODY_BYTES = 32 << 20
HEADER_SECONDS = 10.0
"""For a request's headers, and for the first byte of a connection."""
BODY_SECONDS = 60.0
"""Between two pieces of a body."""
KEEP_ALIVE_SECONDS = 60.0

JSON_DEPTH = 64
COMPLETIONS = 1024
"""Prompts times n."""
TOOL_CALLS = 128
"""Of one message."""
MESSAGES = 65536
LOGPROBS = 20
"""Likeliest tokens at each position: SamplingParams has no bound but the vocabulary."""

WRITE_BUFFER = 256 << 10
"""Bytes on their way to a slow client, beyond which its text is merged and not framed."""
PENDING_TEXT = 1 << 20
"""Characters that may wait for a slow client."""
SLOW_SECONDS = 30.0
PING_SECONDS = 15.0
"""Silence on a stream after which it gets a comment line."""


def parse_json(body: bytes) -> dict[str, Any]:
    """The object in a request's body. Raises ApiError (400): no NaN or Infinity, no deep nesting."""
    if body.count(b"[") + body.count(b"{") > JSON_DEPTH:
        _check_depth(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    return value


def _check_depth(body: bytes) -> None:
    """Raises ApiError where brackets nest too deeply; those in texts are left out first."""
    depth = 0
    for part in _outside_texts(body):
        for byte in part.translate(None, _NO_BRACKETS):
            if byte in b"[{":
                depth += 1
                if depth > JSON_DEPTH:
                    raise bad_request(f"the body nests deeper than {JSON_DEPTH} levels", code="invalid_json")
            else:
                depth -= 1


_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _outside_texts(body: bytes) -> list[bytes]:
    return body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]


def overloaded(most: int) -> ApiError:
    message = f"the server is full: {most} requests are in flight (--max-num-queued-reqs)"
    return ApiError(503, message, "server_overloaded")
