"""What `chat`, `complete` and `run-batch` share: a server that is there (--url), or one started for a model."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nanovllm.cli.options import Parser, add_fields, chosen, json_object
from nanovllm.cli.serve import DEMO_NAME, add_model, check_engine, demo_model
from nanovllm.config import EngineConfig

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "repetition_penalty")
"""Fields of requests that are options of `chat` and `complete`."""


def add_server_options(parser: Parser, model_option: bool = False) -> None:
    """`model_option`: --model MODEL in place of an argument."""
    group = parser.add_argument_group("server")
    if model_option:
        group.add_argument("--model", help="a folder or a hub id; none: the small demo model")
    else:
        add_model(parser)
    group.add_argument("--url", help="of a server that is running, in place of a model; unix:PATH for a socket")
    group.add_argument("--api-key", default=os.environ.get("NANOVLLM_API_KEY") or os.environ.get("OPENAI_API_KEY"))
    add_fields(parser, EngineConfig, {}, leave_out=["model", "seed"], shown=False)
    parser.epilog = "With a model, the engine options of `nanovllm serve` are taken too."


def add_sampling_options(parser: Parser) -> None:
    parser.add_argument("--model-name", metavar="NAME", help="the name to ask a server for; its first model if none")
    group = parser.add_argument_group("sampling")
    for name in SAMPLING:
        kind: Any = float if name in ("temperature", "top_p", "min_p", "repetition_penalty") else int
        if name == "stop":
            group.add_argument("--stop", nargs="+", metavar="TEXT", help="texts that end an answer")
        else:
            group.add_argument("--" + name.replace("_", "-"), type=kind, metavar="N")
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="more fields of the request")
    parser.add_argument("-q", "--quiet", action="store_true", help="the answer and nothing else")


def sampling_fields(given: argparse.Namespace) -> dict[str, Any]:
    found = {name: getattr(given, name) for name in SAMPLING if getattr(given, name) is not None}
    return found | given.extra_body


@contextmanager
def server_url(given: argparse.Namespace, quiet: bool = False) -> Iterator[str]:
    """The URL of the server to talk to. Raises ValueError where options contradict each other."""
    engine = chosen(given, EngineConfig)
    engine.pop("seed", None)
    model = engine.pop("model", None)
    names = getattr(given, "served_model_name", None)
    if given.url is not None:
        if model is not None or engine or names:
            name = "MODEL" if model is not None else "--" + next(iter(engine), "served-model-name").replace("_", "-")
            raise ValueError(f"{name}: not together with --url")
        yield given.url
        return
    if model is None:
        model, names = demo_model(), names or [DEMO_NAME]
    check_engine(model, engine)
    from nanovllm.cli.local_server import LocalServer

    with LocalServer(model, engine, names or []) as server:
        server.wait_until_ready(quiet)
        yield server.url
