"""Errors as OpenAI's API words them: {"error": {"message", "type", "param", "code"}}."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from nanovllm.errors import UnknownName

_MOST_MESSAGE = 1000  # characters
_NAME = re.compile(r"(\w{1,40})(?:[\[.].*?)?[:=]")


class ApiError(Exception):
    """Becomes a response where none has begun, else the last event of a stream."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.message = message if len(message) <= _MOST_MESSAGE else message[: _MOST_MESSAGE - 3] + "..."
        self.excess: tuple[int, int] | None = None
        """Tokens of a prompt that is too long, as far as is known, and the most that are taken."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.type = "rate_limit_error" if status == 429 else kind

    def rename(self, names: Mapping[str, str]) -> None:
        """Names a field of `names` as the request does: by the path of what it has in its place. A field that is
        refused by its name is the request's own."""
        param = self.param or ""
        if self.code != "unsupported_field" and (own := names.get(param)) is not None:
            if self.message.startswith(param):
                self.message = own + self.message.removeprefix(param)
            self.param = own.partition(".")[0]

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the response. (OpenAI's clients repeat a request after a 408 by themselves, and so treble a load
        that is too high.)"""
        if self.status == 408:
            return [(b"x-should-retry", b"false")]
        return [(b"retry-after", b"1")] if self.status in (429, 503) else []


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """`param`: by default the name that the message begins with, if it begins with one."""
    found = _NAME.match(message)
    return ApiError(400, message, code, param or (found[1] if found else None))


def from_value_error(text: str) -> ApiError:
    """A ValueError of the library as a 400: its options are the request's fields."""
    text = text.encode("utf-8", "replace").decode()
    if text.startswith("StructuredOutput"):
        return bad_request(text.partition(".")[2], "structured_outputs", "invalid_schema")
    return bad_request(text.removeprefix("SamplingParams."), code="invalid_value")


@contextmanager
def refusing() -> Iterator[None]:
    """Turns the library's ValueErrors into what is said to a client, and msgpack's of integers beyond 64 bits."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        refused = from_value_error(str(error))
        refused.status = 404 if isinstance(error, UnknownName) else 400
        raise refused from None


def server_error() -> ApiError:
    """Error without a cause, which only the log has; the x-request-id of the response finds it there."""
    return ApiError(500, "internal server error; see the server log", "internal_error")


def engine_dead() -> ApiError:
    return ApiError(500, "the engine has stopped; the server is going down", "engine_dead")


def weights_incomplete(waiting: str) -> ApiError:
    """`waiting`: for what, and since when."""
    return ApiError(503, f"the server has no complete weights: {waiting}", "weights_incomplete")


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", "shutting_down")
