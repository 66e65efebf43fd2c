"""What a client may ask for: bounds that are checked before any work per item is done."""

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
N = 128
STOPS, STOP_CHARACTERS = 16, 256
TOOLS = 128
LIST_ITEMS = {"stop_token_ids": 1024, "bad_words": 1024, "logit_bias": 4096, "allowed_token_ids": 1 << 20}
GRAMMAR_BYTES, REGEX_BYTES = 128 << 10, 16 << 10
CHOICES = 4096
MESSAGES = 65536
DEFINITIONS, PROPERTIES = 500, 1000
CACHE_SALT_CHARACTERS = 128

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


def check_length(name: str, value: Any, most: int) -> None:
    """Raises ApiError where a list, object or text is longer than `most`."""
    if value is not None and len(value) > most:
        raise bad_request(f"{name}: must have at most {most} items, found {len(value)}", name)


def check_stop(stop: str | list[str] | None) -> None:
    stops = [stop] if isinstance(stop, str) else stop or []
    check_length("stop", stops, STOPS)
    for text in stops:
        if not text or len(text) > STOP_CHARACTERS:
            raise bad_request(f"stop: texts must have 1..{STOP_CHARACTERS} characters, found {len(text)}", "stop")


def check_structured(wanted: dict[str, Any], name: str) -> None:
    """Raises ApiError where a schema, expression or grammar is larger than what compiles in reasonable time."""
    if (schema := wanted.get("json")) is not None:
        _check_schema(schema, name)
    if (choice := wanted.get("choice")) is not None:
        check_length(name, choice, CHOICES)
        _check_bytes("choice", sum(map(len, choice)), GRAMMAR_BYTES, name)
    for kind, most in (("regex", REGEX_BYTES), ("grammar", GRAMMAR_BYTES)):
        if (text := wanted.get(kind)) is not None:
            _check_bytes(kind, len(text.encode("utf-8", "replace")), most, name)


def _check_bytes(kind: str, size: int, most: int, name: str) -> None:
    if size > most:
        raise bad_request(f"{name}: {kind} of {size} bytes: must have at most {most}", name, "invalid_schema")


def _check_schema(schema: Any, name: str) -> None:
    text = schema.encode("utf-8", "replace") if isinstance(schema, str) else orjson.dumps(schema)
    _check_bytes("schema", len(text), GRAMMAR_BYTES, name)
    if isinstance(schema, str):
        try:
            schema = orjson.loads(text)
        except orjson.JSONDecodeError:
            raise bad_request(f"{name}: the schema is not valid JSON", name, "invalid_schema") from None
    definitions = properties = 0
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            for key, value in part.items():
                if key in ("$defs", "definitions") and isinstance(value, dict):
                    definitions += len(value)
                elif key == "properties" and isinstance(value, dict):
                    properties += len(value)
            todo.extend(part.values())
        elif isinstance(part, list):
            todo.extend(part)
    for kind, found, most in (("$defs", definitions, DEFINITIONS), ("properties", properties, PROPERTIES)):
        if found > most:
            raise bad_request(f"{name}: schema with {found} {kind}: must have at most {most}", name, "invalid_schema")


def overloaded(most: int) -> ApiError:
    message = f"the server is full: {most} requests are in flight (--max-num-queued-reqs)"
    return ApiError(503, message, "server_overloaded")
