"""`nanovllm bench serve|throughput|latency`, with the option names of `vllm bench`."""

import argparse

from nanovllm.cli.bench import offline, serve
from nanovllm.cli.options import Parser

SUMMARY = "measure a server, or the engine alone"


def make_parser() -> Parser:
    parser = Parser(prog="nanovllm bench", description="Measures a server, or the engine alone.")
    kinds = parser.add_subparsers(metavar="KIND", required=True, dest="kind", parser_class=Parser)
    for name, text, add in (
        ("serve", "any OpenAI server: first token, time per token, throughput", serve.add_options),
        ("throughput", "the engine with all requests at once", offline.add_throughput_options),
        ("latency", "the engine with one batch after another", offline.add_latency_options),
    ):
        add(kinds.add_parser(name, help=text, description=text))
    return parser


def run(parser: Parser, arguments: list[str]) -> int:
    given: argparse.Namespace = parser.parse_args(arguments)
    if given.kind == "serve":
        return serve.run(given)
    return offline.throughput(given) if given.kind == "throughput" else offline.latency(given)
