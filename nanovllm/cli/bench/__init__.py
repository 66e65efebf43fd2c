"""`nanovllm bench serve`, with the option names of `vllm bench serve`; `bench engine`, `throughput` and `latency`."""

import argparse

from nanovllm.cli.bench import engine, serve
from nanovllm.cli.options import Parser

_KINDS = {
    "serve": "any OpenAI server: first token, time per token, throughput",
    "engine": "the engine alone, in the modes that are asked for",
    "throughput": "the engine with all requests at once",
    "latency": "the engine with one request, or one batch, after another",
}


def make_parser() -> Parser:
    parser = Parser(prog="nanovllm bench", description="Measures a server, or the engine alone.")
    kinds = parser.add_subparsers(metavar="KIND", required=True, dest="kind", parser_class=Parser)
    for name, text in _KINDS.items():
        kind = kinds.add_parser(name, help=text, description=text)
        if name == "serve":
            serve.add_options(kind)
        else:
            engine.add_options(kind)
            if name != "engine":
                kind.set_defaults(**{name: True})
    return parser


def run(parser: Parser, arguments: list[str]) -> int:
    given: argparse.Namespace = parser.parse_args(arguments)
    if given.kind == "serve":
        return serve.run(given)
    engine.measure(given, engine.check(parser, given))
    return 0
