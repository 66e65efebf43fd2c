"""`nanovllm run-batch IN.jsonl OUT.jsonl --model MODEL`: a file of requests in OpenAI's batch format.

A record is appended when its request ends. Where the server fails with a request it is asked a few times, and then the
error is the record; where it fails with several in a row, the run ends. A run that was ended begins where it was: what
is there is not asked again, and half a last line is dropped. Each request's seed comes from its custom_id, so that a
text is the same whenever it is computed. Requests go through a server's HTTP interface, so both take the same bodies.
"""

import argparse
import asyncio
import codecs
import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import msgspec

from nanovllm.cli.connect import add_server_options, server_url
from nanovllm.cli.http_client import Client, NoServer, ServerError, error_of
from nanovllm.cli.options import Parser, count

_RETRY_SECONDS = 0.5
_TRIES = 3
"""Times that a request is sent with which the server fails; the last time when no other such one is."""
_FAILURES = 5
"""Requests in a row with which the server fails, before the run ends."""
_PATIENCE_SECONDS = 600.0  # for a server without room for a request
_WORD_SECONDS = 30.0  # between two words about it
_PREFIX = "batch_req_"


def make_parser() -> Parser:
    parser = Parser(
        prog="nanovllm run-batch",
        description="Answers a file of requests in OpenAI's batch format (chat, completions), one line each. After an "
        "interruption, run it again to resume.",
    )
    parser.add_argument("input", nargs="?", metavar="IN.jsonl")
    parser.add_argument("output", nargs="?", metavar="OUT.jsonl")
    for name, alias in (("input", "-i"), ("output", "-o")):
        parser.add_argument(alias, f"--{name}-file", metavar="FILE", help=f"the {name}, if it is not given above")
    add_server_options(parser, model_option=True)
    names = "model names that requests may use, instead of its path"
    parser.add_argument("--served-model-name", nargs="+", metavar="NAME", help=names)
    adapters = "LoRA adapters that requests may name as their model; with --enable-lora"
    parser.add_argument("--lora-modules", nargs="+", metavar="NAME=FOLDER", help=adapters)
    parser.add_argument("--max-concurrency", type=count, default=512, metavar="N", help="requests in flight [512]")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
    return parser


def seed_of(custom_id: str) -> int:
    """The seed of a request that brings none: 0..2**63 - 1."""
    return int.from_bytes(hashlib.sha256(custom_id.encode()).digest()[:8]) >> 1


class Line(msgspec.Struct):
    """One request of the input."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1)]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


def read_request(line: bytes) -> tuple[str, bytes]:
    """(path, body) of a line of the input. Raises ValueError."""
    try:
        request = msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8), type=Line)
        if request.body.get("stream"):
            raise ValueError("body.stream: answers go to a file and are not streamed")
        if request.body.get("seed") is None:
            request.body["seed"] = seed_of(request.custom_id)
        return request.url, json.dumps(request.body).encode()
    except msgspec.ValidationError as error:
        raise ValueError(_wrong_field(line) or str(error)) from None
    except msgspec.DecodeError as error:
        raise ValueError(f"not valid JSON: {str(error)[:200]}") from None
    except RecursionError:
        raise ValueError("not valid JSON: too deeply nested") from None


def _wrong_field(line: bytes) -> str:
    """The mistake in a line, in the server's words: field, value and bound; "" where the server would see none."""
    from nanovllm.serve.api.fields import convert
    from nanovllm.serve.errors import ApiError

    try:
        entry = json.loads(line.removeprefix(codecs.BOM_UTF8))
        if not isinstance(entry, dict):
            return "must be a JSON object"
        convert(Line, entry)
    except ApiError as error:
        return error.message
    return ""


def _custom_id(line: bytes) -> str | None:
    """None where it cannot be read."""
    with contextlib.suppress(ValueError, RecursionError):
        entry = json.loads(line)
        if isinstance(entry, dict) and isinstance(entry.get("custom_id"), str):
            return str(entry["custom_id"])
    return None


class Results:
    """The output file: whole lines only, one writer."""

    def __init__(self, path: Path) -> None:
        """Takes in what is there; half a last line is cut off. Raises ValueError where the file is something else, and
        OSError where another run writes it."""
        self._path = path
        self._file: IO[bytes] = open(path, "a+b", buffering=0)  # noqa: SIM115 (close() is its end)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise OSError(f"{path}: another run is writing it") from None
        self.finished: dict[int, str | None] = {}
        """custom_id by the number of the line in the input, from 1."""
        self.num_answered = 0
        """Finished requests whose answer is no error."""
        self._size = self._take_in()
        self._file.truncate(self._size)

    def _take_in(self) -> int:
        """Reads the records; returns where the last whole one ends."""
        end = 0
        with open(self._path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    record = json.loads(line)
                    self._count(record)
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise ValueError(f"{self._path}: line {number} is not a result of run-batch") from None
                end += len(line)
        return end

    def has(self, number: int, line: bytes) -> bool:
        """Whether line `number` of the input is answered. Raises ValueError where another line was."""
        if self.finished.get(number) not in (None, _custom_id(line)):
            raise ValueError(f"the results are those of another input: line {number} has another custom_id")
        return number in self.finished

    def append(self, record: dict[str, Any]) -> None:
        """Raises OSError where the disk is full, with the file as it was."""
        text = json.dumps(record, ensure_ascii=False)
        line = text.encode(errors="backslashreplace") + b"\n"  # halves of surrogate pairs as the input spells them
        try:
            written = self._file.write(line)
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            self._file.truncate(self._size)
            raise OSError(
                f"{self._path}: {error.strerror}. {len(self.finished)} results are in it; the same command goes on "
                "from there"
            ) from None
        self._size += len(line)
        self._count(record)

    def _count(self, record: dict[str, Any]) -> None:
        self.finished[int(record["id"].removeprefix(_PREFIX))] = record["custom_id"]
        self.num_answered += (record.get("response") or {}).get("status_code") == 200

    def close(self) -> None:
        self._file.close()


class Batch:
    """One run over the file. Shows a bar on a terminal, and a last line."""

    def __init__(self, client: Client, results: Results, total: int, given: argparse.Namespace) -> None:
        from tqdm import tqdm

        self._client, self._results, self._quiet = client, results, given.quiet
        self._slots = asyncio.Semaphore(given.max_concurrency)
        self._num_tokens, self._begin = 0, time.monotonic()
        self._errors: list[str] = []
        self._num_failures = 0  # since the last answer
        self._last_try = asyncio.Lock()
        self._next_word = 0.0
        options: dict[str, Any] = {"unit": "req", "disable": given.quiet or not sys.stderr.isatty()}
        self._bar = tqdm(total=total, initial=len(results.finished), dynamic_ncols=True, **options)

    @property
    def _rate(self) -> str:
        return f"{self._num_tokens / max(time.monotonic() - self._begin, 1e-9):.0f} tok/s"

    def close(self) -> None:
        self._bar.close()
        if not self._quiet:
            errors = f", {len(self._errors)} of them errors" if self._errors else ""
            text = f"{len(self._results.finished)} of {self._bar.total} requests{errors}, {self._num_tokens} tokens"
            first = f"\nthe first error: {self._errors[0]}" if self._errors else ""
            print(f"{text}, {self._rate}{first}", file=sys.stderr)

    async def run(self, path: str) -> None:
        """Raises OSError where server or disk fail."""
        try:
            async with asyncio.TaskGroup() as group:
                with open(path, "rb") as lines:
                    for number, line in enumerate(lines, 1):
                        if line.strip() and not self._results.has(number, line):
                            await self._slots.acquire()
                            group.create_task(self._answer(number, line))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _answer(self, number: int, line: bytes) -> None:
        record: dict[str, Any] = {"id": f"{_PREFIX}{number}", "custom_id": _custom_id(line)}
        try:
            try:
                path, body = read_request(line)
            except ValueError as error:
                self._errors.append(f"line {number}: {error}")
                record |= {"response": None, "error": {"code": "invalid_line", "message": str(error)}}
            else:
                status, data = await self._post(path, body, record["id"])
                self._num_failures = self._num_failures + 1 if _has_failed(status) else 0
                answer = _content(data)
                if status != 200:
                    self._errors.append(f"line {number}: {error_of(status, data) if status else answer}")
                response = {"status_code": status, "request_id": record["id"], "body": answer}
                lacks = None if status else {"code": "no_answer", "message": answer}
                record |= {"response": response if status else None, "error": lacks}
                if isinstance(answer, dict):
                    self._num_tokens += (answer.get("usage") or {}).get("completion_tokens") or 0
            self._results.append(record)
            self._bar.set_postfix_str(self._rate, refresh=False)
            self._bar.update()
            if self._num_failures == _FAILURES:
                why = f"the server failed with {_FAILURES} requests in a row. {self._errors[-1]}"
                raise ServerError(f"{why}\nThe same command goes on after them")
        finally:
            self._slots.release()

    async def _post(self, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        """Asks until the server has room; returns status and answer, or 0 and the reason where it gives none. Asks
        again where it fails. Raises ServerError where no other request would be answered either."""
        begin, failures = time.monotonic(), 0
        while True:
            async with self._last_try if failures == _TRIES - 1 else contextlib.nullcontext():
                status, answer = await self._ask(path, body, request_id)
            if status == 401 or (status == 503 and b"shutting_down" in answer):
                raise error_of(status, answer)
            if status in (429, 503) and time.monotonic() - begin < _PATIENCE_SECONDS:
                self._say_wait(status, answer)
            elif not _has_failed(status) or (failures := failures + 1) == _TRIES:
                return status, answer
            await asyncio.sleep(_RETRY_SECONDS)

    async def _ask(self, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        try:
            async with self._client.request("POST", path, body, f"x-request-id: {request_id}\r\n") as response:
                return response.status, await response.body()
        except NoServer:
            raise
        except OSError as error:
            return 0, str(error).encode()

    def _say_wait(self, status: int, answer: bytes) -> None:
        if (now := time.monotonic()) >= self._next_word:
            self._next_word = now + _WORD_SECONDS
            self._bar.write(f"waiting: {error_of(status, answer)}", file=sys.stderr)


def _has_failed(status: int) -> bool:
    """Whether this is no answer to the request: it may come another time."""
    return not 0 < status < 500 or status in (408, 429)


def _content(data: bytes) -> Any:
    """An answer that is no JSON, as that of a proxy, is a text."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode("utf-8", "replace")


async def _run(given: argparse.Namespace, url: str, results: Results, total: int) -> None:
    async with Client(url, given.api_key) as client:
        with contextlib.closing(Batch(client, results, total, given)) as batch:
            await batch.run(given.input)


def _files(given: argparse.Namespace) -> tuple[str, str]:
    """Input and output, each named once, by its place or its option. Raises ValueError otherwise."""
    named = [name for name in (given.input, given.output) if name is not None]
    found = [option or (named.pop(0) if named else "") for option in (given.input_file, given.output_file)]
    if named or not all(found):
        raise ValueError("run-batch: takes one input and one output: IN.jsonl OUT.jsonl, or -i IN.jsonl -o OUT.jsonl")
    return found[0], found[1]


def run(parser: Parser, arguments: list[str]) -> int:
    """Exit status 1: there are requests, and none of them has an answer that is no error."""
    given = parser.parse_args(arguments)
    given.input, given.output = _files(given)
    if given.max_concurrency < 1:
        raise ValueError(f"max_concurrency={given.max_concurrency}: must be >= 1")
    with open(given.input, "rb") as lines:
        if os.path.exists(given.output) and os.path.samefile(given.input, given.output):
            raise ValueError(f"{given.output}: input and output must be different files")
        with contextlib.closing(Results(Path(given.output))) as results:
            finished = [results.has(number, line) for number, line in enumerate(lines, 1) if line.strip()]
            if not all(finished):
                with server_url(given, given.quiet) as url:
                    asyncio.run(_run(given, url, results, len(finished)))
            elif not given.quiet:
                print(f"all {len(finished)} requests have their results already", file=sys.stderr)
            return 1 if finished and not results.num_answered else 0
