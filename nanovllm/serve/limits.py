"""Limits on what a client may send. Bounds of sampling options are in SamplingParams, those of grammars in the
engine."""

import re
from typing import Any

import msgspec

from nanovllm.serve.errors import bad_request

HEADER_BYTES = 64 << 10
HEADER_COUNT = 100
URL_BYTES = 2 << 10
"""Bytes of a request's path and query."""
BODY_BYTES = 32 << 20
BODIES_BYTES = 512 << 20
"""Maximum bytes of all bodies that are on their way at once. Beyond it small ones (SMALL_BODY) are still taken: a few
clients that send large ones slowly keep nobody else out."""
HEADER_SECONDS = 10.0
"""Maximum seconds for a request's headers, and for TLS and the first byte of a connection."""
BODY_SECONDS = 60.0
"""Maximum seconds between two pieces of a body."""
KEEP_ALIVE_SECONDS = 75.0
"""Longer than the 60 s of most proxies: a connection that both close at once costs a request."""

PIPELINE = 32
"""Requests that may wait on one connection for the answers to earlier ones. While one does, nothing is read."""
SPARE_DESCRIPTORS = 64
"""File descriptors, of those that the system allows, kept for other files than connections."""

JSON_DEPTH = 64
JSON_ITEMS = 250_000
"""Lists and objects of one body, and texts of one body, names among them."""
JSON_COMMAS = 1_500_000
"""Outside of texts: as many token ids as all prompts of one request may have."""
JSON_MIXED = 300_000
"""Commas outside of texts and of lists of numbers."""
SMALL_BODY = 32 << 10
"""Bytes that are read in less than a millisecond, whatever they are."""
TEXT_BYTES, TEXT_BYTES_PER_TOKEN = 256 << 10, 16
"""Maximum bytes of all that a chat prompt is made of, and bytes more for each token of the context: messages with
reasoning and calls, tools, template variables, as JSON."""
PROMPTS_TEXT = 8 << 20
"""Characters of all prompts of a request."""
PREPARING_BYTES = 64 << 20
"""Maximum bytes of all texts that wait for the threads that render and tokenize."""
COMPLETIONS = 1024
"""Prompts times n."""
PARAMS_BYTES = 8 << 20
"""Bytes of the sampling fields of all prompts of a request on their way to an engine."""
PROMPT_LOGPROBS = 1 << 18
"""Log-probabilities of prompts in one answer; each takes some 100 bytes of it."""
LOGPROBS = 8 << 20
"""Log-probabilities of all completions of an unstreamed answer."""
MASK_IDS = 4 << 20
"""Ids in the sampling masks of one answer."""
ECHO_TEXT, ECHO_IDS = 32 << 20, 4 << 20
"""Characters, and token ids, of prompts that one answer repeats."""
INPUTS, EMBEDDINGS = 2048, 4 << 20
"""Texts that embeddings are asked of at once, and numbers of all these embeddings."""
TOOL_CALLS = 128
"""Maximum tool calls of one message."""
MESSAGES = 65536
OUTPUT_ITEMS_BYTES = 8 << 20
"""Output items of answers that are kept for requests which name them by their ids."""

WRITE_BUFFER = 256 << 10
"""Bytes on their way to a slow client, beyond which its text is merged and not framed."""
PENDING_BYTES = 1 << 20
"""Bytes that may wait for a slow client, as far as can be told before they are written as JSON."""
ID_BYTES, LOGPROB_BYTES = 6, 32
"""Bytes that a token id takes in an answer, and a number of a line of log-probabilities."""
SLOW_SECONDS = 30.0
"""Seconds after which a client with a full write buffer that takes nothing is dropped."""
PING_SECONDS = 15.0
"""Silence on a stream after which it gets a comment line, or an event where clients count events."""
BEGIN_SECONDS = 0.5
"""Silence before the first token after which a stream whose clients count events begins. Until then, an error is the
response's status."""


def parse_json(body: bytes) -> dict[str, Any]:
    """The object in a request's body. Raises ApiError (400): no NaN or Infinity, no deep nesting, nothing that takes
    seconds to read."""
    if len(body) > _PIECE or body.count(b"[") + body.count(b"{") > JSON_DEPTH:
        _check_structure(body)
    try:
        # The whole body is looked through first: pieces alone would not show a comma too many.
        value = _decoded(msgspec.json.decode(body, type=msgspec.Raw) if len(body) > _PIECE else body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    return value


def _decoded(raw: bytes | msgspec.Raw) -> Any:
    """The value of valid JSON; a large one, which a Raw has without blanks around it, is made piece by piece, between
    which other threads may run, and without copies of it."""
    text = memoryview(raw)
    if len(text) <= _PIECE or text[0] not in b"[{":
        return msgspec.json.decode(raw)
    if text[0] == ord("{"):
        return {name: _decoded(one) for name, one in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items()}
    first, last = 1, len(text) - 1
    pieces = (bytes(text[begin : begin + _PIECE]) for begin in range(first, last, _PIECE))
    if any(mark in piece for piece in pieces for mark in b'[{"'):
        return [_decoded(one) for one in msgspec.json.decode(raw, type=list[msgspec.Raw])]
    found: list[Any] = []
    while first < last:
        comma = _COMMA.search(text, first + _PIECE)
        end = comma.start() if comma else last
        found += msgspec.json.decode(b"".join((b"[", text[first:end], b"]")))
        first = end + 1
    return found


_COMMA = re.compile(rb",")
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}",'))
_PIECE = 1 << 20
"""Bytes that are looked at in one go, between which the interpreter lets other threads run."""


def _check_structure(body: bytes) -> None:
    """Raises ApiError where lists and objects nest too deep, or there are too many of them, of texts, or of commas
    outside of texts."""
    structure, cut, in_text = bytearray(), b"", False
    num_quotes = num_commas = num_brackets = 0
    for begin in range(0, len(body), _PIECE):
        piece = cut + body[begin : begin + _PIECE]
        cut = b"\\" if (len(piece) - len(piece.rstrip(b"\\"))) % 2 else b""
        piece = piece.removesuffix(cut).replace(b"\\\\", b"").replace(b'\\"', b"")
        marks = piece.translate(_ONE_KIND, _NO_MARKS).split(b'"')
        outside = b'"'.join(marks[in_text::2])
        structure += (b'"' if in_text else b"") + outside
        in_text ^= len(marks) % 2 == 0
        num_quotes += len(marks) - 1
        num_commas += outside.count(b",")
        num_brackets += outside.count(b"[") + outside.count(b"]")
        if max(num_quotes, num_brackets) > 2 * JSON_ITEMS:
            raise bad_request(f"the body has more than {JSON_ITEMS:,} lists, objects or texts", code="invalid_json")
        if num_commas > JSON_COMMAS:
            raise bad_request(f"the body has more than {JSON_COMMAS:,} values", code="invalid_json")
    if re.sub(rb"\[,*\]", b"", structure).count(b",") > JSON_MIXED:
        raise bad_request(f"the body has more than {JSON_MIXED:,} values beside lists of numbers", code="invalid_json")
    brackets = bytes(structure.translate(None, b',"'))
    for _ in range(JSON_DEPTH):
        brackets = brackets.replace(b"[]", b"")  # what holds no list or object any more
    if brackets.startswith(b"[") and brackets.count(b"[") == brackets.count(b"]"):
        raise bad_request(f"the body nests deeper than {JSON_DEPTH} levels", code="invalid_json")
    if brackets:
        raise bad_request("the body is not valid JSON: brackets do not match", code="invalid_json")
