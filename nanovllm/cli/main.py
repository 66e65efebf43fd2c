"""`nanovllm COMMAND`: each command's module is imported when it is called for."""

import argparse
import sys
from collections.abc import Sequence

import nanovllm
from nanovllm.cli import serve


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="nanovllm", description=nanovllm.__doc__)
    parser.add_argument("--version", action="version", version=nanovllm.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve.add_parser(commands)
    given = parser.parse_args(arguments)
    try:
        return int(given.run(given))
    except (ValueError, TypeError, OSError) as error:
        print(f"nanovllm: {error}", file=sys.stderr)
        return 2
