"""What a client may send. Bounds of sampling options are SamplingParams', those of grammars the engine's."""

from typing import Any

import msgspec
import orjson

from nanovllm.serve.errors import bad_request

HEADER_BYTES = 64 << 10
HEADER_COUNT = 100
BODY_BYTES = 32 << 20
HEADER_SECONDS = 10.0
"""For a request's headers, and for the first byte of a connection."""
BODY_SECONDS = 60.0
"""Between two pieces of a body."""
LARGE_BODY = 1 << 20
"""Bytes from which on a body is read in pieces, in a thread."""
PIECE = 256 << 10
"""Bytes of JSON that are read at a time: some milliseconds in which no other thread runs."""
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


def parse_large_json(body: bytes) -> dict[str, Any]:
    """What parse_json returns and raises, for a thread: the parser holds the interpreter's lock, for seconds where a
    body of 32 MiB has many small items. So what is large is parsed some of its items at a time."""
    if body.count(b"[") + body.count(b"{") > JSON_DEPTH:
        _check_depth(body)
    try:
        value = _in_pieces(body)
    except ValueError:  # also msgspec's, and that of bytes that are no text
        return parse_json(body)  # says what is wrong
    return value if isinstance(value, dict) else parse_json(body)


_items = msgspec.json.Decoder(list[msgspec.Raw])
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEM_ENDS = {b"[": b"],", b"{": b"},", b'"': b'",'}


def _in_pieces(raw: bytes) -> Any:
    """The value of `raw`, which nests no deeper than JSON_DEPTH. A list or an object is cut where an item may end; a
    piece that parses ends with one, others grow. What has items too large for that is parsed item by item."""
    raw = raw.strip()
    opening, closing = raw[:1], raw[-1:]
    if len(raw) <= PIECE or opening not in (b"[", b"{"):
        return orjson.loads(raw)
    value: Any = [] if opening == b"[" else {}
    take = value.extend if opening == b"[" else value.update
    if opening == b"[":
        end = _ITEM_ENDS.get(raw[1:PIECE].lstrip()[:1], b",")
    else:
        end = b',"' if b',"' in raw[:PIECE] else b', "'
    begin, size = 1, PIECE
    while size < 4 * PIECE and (found := raw.find(end, begin + size)) >= 0:
        comma = found + end.index(b",")
        try:
            take(orjson.loads(opening + raw[begin:comma] + closing))
        except orjson.JSONDecodeError:
            size *= 2
        else:
            begin, size = comma + 1, PIECE
    rest = opening + raw[begin:]
    if begin > 1 and not rest[1:-1].strip():
        raise ValueError("a comma at the end")
    if len(rest) <= PIECE:
        take(orjson.loads(rest))
    elif opening == b"[":
        take(_in_pieces(bytes(one)) for one in _items.decode(rest))
    else:
        take((name, _in_pieces(bytes(one))) for name, one in _members.decode(rest).items())
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
