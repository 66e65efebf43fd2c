"""`nanovllm serve [MODEL]`."""

import argparse
import os
from pathlib import Path
from typing import Any

from nanovllm.cli.config_file import parse_with_config
from nanovllm.cli.options import Parser, add_fields, chosen
from nanovllm.config import EngineConfig
from nanovllm.models.registry import is_hub_id
from nanovllm.serve.options import ServeOptions

SUMMARY = "serve a model over HTTP"
ENGINE_GROUPS = {
    "tokenizer": "model and device",
    "max_model_len": "what a step may hold",
    "gpu_memory_utilization": "memory",
    "attention_backend": "kernels, overlap, failures",
}
_SERVER_GROUPS = {
    "host": "where it listens",
    "served_model_name": "requests",
    "chat_template": "chats, tools, defaults of sampling",
    "strict_fields": "log and page",
}
_NO_REMOTE_CODE = (
    "--trust-remote-code: refused. The server runs no code that comes with a checkpoint: the families of docs/models.md"
    " are computed by the engine itself, and chat templates run in a sandbox. Leave the option out"
)
_NOT_NEEDED = (
    *("--disable-log-requests", "--enable-log-requests", "--disable-uvicorn-access-log"),
    *("--enable-auto-tool-choice", "--enable-chunked-prefill", "--enable-prompt-tokens-details"),
)
"""Options of vLLM that change nothing here; taken, so that its command lines work."""
_NOT_NEEDED_WITH_VALUE = ("--weight-transfer-config", "--uvicorn-log-level", "--swap-space", "--root-path")


def make_parser() -> Parser:
    parser = Parser(
        prog="nanovllm serve",
        description="Serves a model by OpenAI's API, with a chat page at /. Defaults in [brackets]; texts in full: "
        "docs/options.md, docs/command-line.md.",
        epilog="N may be 4k (4,000) or 4K (4,096). --config takes the place of options that are not given.",
    )
    add_model(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML with options by name; the command line wins")
    add_fields(parser, ServeOptions, _SERVER_GROUPS, leave_out=["api_keys", "admin_api_keys"])
    parser.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help="a key, or @FILE with one a line; may be repeated; also NANOVLLM_API_KEY",
    )  # fmt: skip
    parser.add_argument(
        "--admin-api-key", action="append", default=[], metavar="KEY",
        help="opens the admin calls, to it alone; also NANOVLLM_ADMIN_API_KEY",
    )  # fmt: skip
    add_fields(parser, EngineConfig, ENGINE_GROUPS, leave_out=["model"])
    for name in _NOT_NEEDED:
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    for name in _NOT_NEEDED_WITH_VALUE:
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--trust-remote-code", action="store_true", help=argparse.SUPPRESS)
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="a folder with config.json and *.safetensors, or a hub id; none: the small demo model"
    )


def check_engine(model: str, options: dict[str, Any]) -> None:
    """Raises ValueError or FileNotFoundError, before anything starts, for a mistake that needs no look at the model's
    files."""
    is_hub_id(EngineConfig.from_options(model, **options))


def demo_model() -> str:
    """The folder of the checkpoint that ships with the project."""
    folder = Path(__file__).resolve().parents[1] / "demo_model"
    if not (folder / "config.json").is_file():
        raise FileNotFoundError("the demo model is not part of this installation: name a model")
    return str(folder.resolve())


def _api_keys(given: list[str], option: str, variable: str) -> tuple[str, ...]:
    """The keys of an option and of its environment variable. Raises ValueError for an entry that holds none: whoever
    sets one wants a server that asks for it."""
    named = [*((f"{option}={one!r}" if one.startswith("@") else option, one) for one in given)]
    if (set_outside := os.environ.get(variable)) is not None:
        named.append((variable, set_outside))
    keys: list[str] = []
    for name, one in named:
        found = Path(one[1:]).read_text(encoding="utf-8").split() if one.startswith("@") else [one.strip()]
        if not all(found) or not found:
            raise ValueError(f"{name}: holds no key; leave it out for a server without one")
        keys += found
    return tuple(keys)


def run(parser: Parser, arguments: list[str]) -> int:
    """Serves until it is told to end."""
    given = parse_with_config(parser, arguments)
    if given.trust_remote_code:
        raise ValueError(_NO_REMOTE_CODE)
    engine, server = chosen(given, EngineConfig), chosen(given, ServeOptions)
    model = engine.pop("model", None)
    if model is None:
        model = demo_model()
        server.setdefault("served_model_name", ("demo",))
    if "logprobs_mode" in engine:
        engine["logprobs_mode"] = engine["logprobs_mode"].removesuffix("_logprobs")  # vLLM's names are longer
    check_engine(model, engine)
    admin = _api_keys(given.admin_api_key, "--admin-api-key", "NANOVLLM_ADMIN_API_KEY")
    keys = _api_keys(given.api_key, "--api-key", "NANOVLLM_API_KEY")
    options = ServeOptions(**server, api_keys=keys, admin_api_keys=admin)
    from nanovllm.serve.lifecycle import serve

    return serve(model, engine, options)
