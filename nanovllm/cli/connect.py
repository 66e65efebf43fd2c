"""Shared parts of `chat`, `complete` and `run-batch`: their options, a server for them, lines typed at a terminal."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from nanovllm.cli.options import Parser, add_fields, chosen, dashed, json_object, number
from nanovllm.cli.serve import add_model, check_options
from nanovllm.config import DEMO_MODEL, EngineConfig

_SAMPLING: dict[str, Callable[[str], Any]] = {
    "temperature": number, "top_p": number, "top_k": int, "min_p": number, "seed": int, "max_tokens": int,
    "repetition_penalty": number,
}  # fmt: skip
"""Fields of requests that are options of `chat` and `complete`, beside `stop`."""


def asking_parser(command: str, description: str) -> Parser:
    """A parser for `chat` or `complete`."""
    parser = Parser(prog=f"nanovllm {command}", description=description)
    add_server_options(parser)
    parser.add_argument("--model-name", metavar="NAME", help="model name to request; default: the server's first")
    group = parser.add_argument_group("sampling")
    for name, kind in _SAMPLING.items():
        group.add_argument(dashed(name), type=kind, metavar="N")
    group.add_argument("--stop", nargs="+", metavar="TEXT", help="strings that end an answer")
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="more fields of the request")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the answer only")
    return parser


def add_server_options(parser: Parser, model_option: bool = False) -> None:
    """Adds the options that name a server or a model. `model_option`: --model MODEL in place of an argument."""
    group = parser.add_argument_group("server")
    if model_option:
        group.add_argument("--model", help="a folder or a hub id; default: the demo model")
    else:
        add_model(parser)
    group.add_argument("--url", help="a running server instead of a model; unix:PATH for a socket")
    group.add_argument("--api-key", default=os.environ.get("NANOVLLM_API_KEY") or os.environ.get("OPENAI_API_KEY"))
    add_fields(parser, EngineConfig, leave_out=["model", "seed"])
    parser.epilog = "With a model, all engine options of `nanovllm serve` work too."


def piped_text() -> str:
    """The text that is piped in. Raises ValueError where it is not UTF-8, which no request can hold."""
    try:
        text = sys.stdin.read()
        text.encode()
        return text
    except UnicodeError:
        raise ValueError("stdin: must be UTF-8") from None


async def stream_answer(
    url: str, given: argparse.Namespace, path: str, body: dict[str, Any]
) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Sends a request with the sampling options that were given. Yields (seconds since then, event). Raises
    ServerError."""
    from nanovllm.cli.http_client import Client

    sampling = {name: value for name in (*_SAMPLING, "stop") if (value := getattr(given, name)) is not None}
    body = {"stream": True, **body, **sampling}
    async with Client(url, given.api_key) as client:
        body["model"] = given.model_name or await client.model()
        begin = time.perf_counter()
        async with client.stream(path, body | given.extra_body) as events:
            async for now, event in events:
                yield now - begin, event


def answer_lines(answer: Callable[[str], bool]) -> None:
    """Calls `answer` with each line typed at the terminal, until it returns False or the input ends. Ctrl-C drops a
    line; an error of the server is printed."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() edits lines with it)
    while True:
        try:
            line = input("> ").strip()
            if line and not answer(line):
                return
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except OSError as error:
            print(error, file=sys.stderr)


@contextmanager
def server_url(given: argparse.Namespace, quiet: bool = False) -> Iterator[str]:
    """The URL of the server to talk to. Raises ValueError where options contradict each other."""
    engine = chosen(given, EngineConfig)
    engine.pop("seed", None)
    model = engine.pop("model", None)
    server = {name: found for name in ("served_model_name", "lora_modules") if (found := getattr(given, name, None))}
    if given.url is not None:
        if model is not None or engine or server:
            name = "MODEL" if model is not None else dashed([*engine, *server][0])
            raise ValueError(f"{name}: not together with --url")
        yield given.url
        return
    model = DEMO_MODEL if model is None else model
    check_options(model, engine, server)
    from nanovllm.cli.local_server import LocalServer

    with closing(LocalServer(model, engine, server)) as own:
        own.wait_until_ready(quiet)
        yield own.url
