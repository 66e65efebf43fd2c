"""`nanovllm COMMAND`: each command's module is imported when it is called for."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from types import ModuleType

import nanovllm
from nanovllm.cli.options import Parser
from nanovllm.errors import near_miss

COMMANDS = {
    "serve": "serve a model over HTTP",
    "chat": "talk to a model in the terminal",
    "complete": "complete a text",
    "run-batch": "answer a file of requests",
    "bench": "measure a server, or the engine alone",
    "kernels": "show which kernel runs for every operation of a model",
    "plan": "how much GPU memory a model needs, and how many users fit",
    "env": "show versions, GPUs, the attention backend and what is missing",
}
"""Commands and what each does. The module of a command has make_parser() and run(parser, arguments)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by some daemons: the new one gets its number, also in our children
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
            os.set_inheritable(getattr(sys, name).fileno(), True)
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":  # a model may say anything
        sys.stdout.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0].startswith("-"):
        return _without_command(words)
    if words[0] not in COMMANDS:
        hint = near_miss(words[0], COMMANDS) or f"; must be one of {', '.join(COMMANDS)}"
        print(f"nanovllm: unknown command {words[0][:100]!r}{hint}", file=sys.stderr)
        return 2
    try:
        module = command(words[0])
        return int(module.run(module.make_parser(), words[1:]))
    except (ValueError, TypeError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # as in `nanovllm complete | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        text = str(error)
        if isinstance(error, OSError) and error.filename:  # the system's, which begins with its number
            text = f"{error.filename}: {error.strerror}"
        print(f"nanovllm: {text}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("nanovllm"):
            raise
        print(f"nanovllm {words[0]}: needs {error.name}: pip install 'nanovllm[serve]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def command(name: str) -> ModuleType:
    """The module of a command."""
    return import_module(f"nanovllm.cli.{name.replace('-', '_')}")


def _without_command(words: list[str]) -> int:
    parser = Parser(prog="nanovllm", description=nanovllm.__doc__)
    parser.add_argument("--version", action="version", version=nanovllm.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    parser.parse_args(words)
    parser.print_help(sys.stderr)
    return 2
