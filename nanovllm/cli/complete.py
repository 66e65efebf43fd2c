"""`nanovllm complete [MODEL | --url URL]`: a text goes on."""

import argparse
import asyncio
import sys

from nanovllm.cli.connect import add_sampling_options, add_server_options, sampling_fields, server_url
from nanovllm.cli.options import Parser

SUMMARY = "let a model go on with a text"


def make_parser() -> Parser:
    parser = Parser(
        prog="nanovllm complete",
        description="Prints how a text goes on. The text is --prompt, or comes through a pipe, or is typed in lines.",
    )
    add_server_options(parser)
    add_sampling_options(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT")
    return parser


async def _complete(url: str, given: argparse.Namespace, prompt: str) -> None:
    from nanovllm.cli.http_client import Client

    body = {"prompt": prompt, "stream": True, "max_tokens": 128, **sampling_fields(given)}
    try:
        async with Client(url, given.api_key) as client:
            body.setdefault("model", given.model_name or await client.model())
            if not given.quiet:
                sys.stdout.write(prompt)
            async with client.stream("/v1/completions", body) as events:
                async for _, event in events:
                    sys.stdout.write("".join(choice["text"] for choice in event["choices"]))
                    sys.stdout.flush()
    finally:
        print()


def run(parser: Parser, arguments: list[str]) -> int:
    given = parser.parse_args(arguments)
    prompt = given.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().removesuffix("\n")
    if prompt == "":
        raise ValueError("prompt='': must not be empty")
    with server_url(given, quiet=given.quiet) as url:
        if prompt is not None:
            asyncio.run(_complete(url, given, prompt))
            return 0
        while True:
            try:
                line = input("> ")
                if line:
                    asyncio.run(_complete(url, given, line))
            except EOFError:
                return 0
            except KeyboardInterrupt:
                print()
