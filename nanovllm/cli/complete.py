"""`nanovllm complete [MODEL | --url URL]`: continues a text."""

import argparse
import asyncio
import sys

from nanovllm.cli.connect import answer_lines, asking_parser, piped_text, server_url, stream_answer
from nanovllm.cli.options import Parser


def make_parser() -> Parser:
    parser = asking_parser("complete", "Completes a text: --prompt, piped input, or lines typed at the terminal.")
    parser.add_argument("-p", "--prompt", metavar="TEXT")
    return parser


async def _complete(url: str, given: argparse.Namespace, prompt: str) -> None:
    shown = given.quiet
    try:
        async for _, event in stream_answer(url, given, "/v1/completions", {"prompt": prompt, "max_tokens": 128}):
            text = "".join(choice["text"] for choice in event["choices"])
            print(text if shown else prompt + text, end="", flush=True)
            shown = True
    finally:
        print()


def run(parser: Parser, arguments: list[str]) -> int:
    given = parser.parse_args(arguments)
    prompt = given.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = piped_text().removesuffix("\n")
    if prompt == "":
        raise ValueError("prompt='': must not be empty")
    with server_url(given, quiet=given.quiet) as url:
        if prompt is None:
            answer_lines(lambda line: asyncio.run(_complete(url, given, line)) is None)
        else:
            asyncio.run(_complete(url, given, prompt))
    return 0
