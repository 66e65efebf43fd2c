"""`nanovllm serve MODEL`."""

import argparse
import json
import os
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig

_SHORT = {"tensor_parallel_size": ["-tp"]}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    parser.add_argument("model", help="a folder with config.json and *.safetensors, or a hub id")
    _add_server_options(parser.add_argument_group("server"))
    _add_engine_options(parser.add_argument_group("engine (None: chosen from model, device and memory)"))
    parser.set_defaults(run=run)


def _add_server_options(group: Any) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--uds", help="a Unix socket's path, in place of host and port")
    add("--root-path", default="", help="what a proxy in front takes off the paths")
    add("--ssl-keyfile")
    add("--ssl-certfile")
    add("--allowed-origins", nargs="+", default=(), help="origins of pages that may call; none by default")
    add("--api-key", action="append", default=[], help="a key, or @FILE with one a line; also NANOVLLM_API_KEY")
    add("--served-model-name", nargs="+", default=())
    add("--max-num-queued-reqs", type=int, help="completions in flight beyond which requests get a 503")
    add("--request-timeout", type=float, help="seconds after which a request is ended")
    add("--shutdown-timeout", type=float, default=30.0, help="seconds that running requests get after SIGTERM")
    add("--chat-template", help="a file that takes the place of the model's")
    add("--default-chat-template-kwargs", type=_json_object, default={}, metavar="JSON")
    add("--trust-request-chat-template", action="store_true")
    add("--trust-special-tokens", action="store_true", help="control tokens that a chat spells out count")
    add("--generation-config", default="auto", metavar="auto|vllm|DIR")
    add("--override-generation-config", type=_json_object, default={}, metavar="JSON")
    add("--tool-call-parser", default="auto")
    add("--reasoning-parser", default="auto")
    add("--strict-fields", action="store_true", help="unknown fields of a request are an error")
    add("--log-format", choices=("text", "json"), default="text")
    add("--log-prompts", action="store_true")
    add("--no-ui", dest="ui", action="store_false", help="no chat page at /")


def _add_engine_options(group: Any) -> None:
    for option in fields(EngineConfig):
        if option.name == "model":
            continue
        names = [*_SHORT.get(option.name, []), "--" + option.name.replace("_", "-")]
        kwargs = _engine_option(option)
        group.add_argument(*names, dest=option.name, default=argparse.SUPPRESS, **kwargs)


def _engine_option(option: "Field[Any]") -> dict[str, Any]:
    kind = option.type if isinstance(option.type, type) else None
    text = str(option.type)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if "dict" in text:
        return {"type": _json_object, "metavar": "JSON"}
    if option.name == "disable":
        return {"nargs": "+"}
    shown = "" if option.default in (MISSING, None) else f"default {option.default}"
    convert = count if "int" in text else float if "float" in text else str
    return {"type": convert, "help": shown, "metavar": "N" if convert is not str else "X"}


def count(text: str) -> int:
    """An integer; 32k is 32768, 1M is 1048576."""
    scale = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(text[-1:].lower(), 1)
    return int(float(text[:-1]) * scale) if scale > 1 else int(text)


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _api_keys(given: list[str]) -> tuple[str, ...]:
    keys: list[str] = []
    for one in [*given, os.environ.get("NANOVLLM_API_KEY", "")]:
        keys += Path(one[1:]).read_text(encoding="utf-8").split() if one.startswith("@") else [one]
    return tuple(key for key in keys if key)


def run(given: argparse.Namespace) -> int:
    """Serves until it is told to end."""
    from nanovllm.serve.lifecycle import serve
    from nanovllm.serve.options import ServeOptions

    values = vars(given)
    engine = {option.name: values[option.name] for option in fields(EngineConfig) if option.name in values}
    model = engine.pop("model")
    server = {option.name: values[option.name] for option in fields(ServeOptions) if option.name in values}
    for name in ("allowed_origins", "served_model_name"):
        server[name] = tuple(server[name])
    EngineConfig.from_options(model, **engine)  # a mistake in an option is found before anything starts
    return serve(model, engine, ServeOptions(**server, api_keys=_api_keys(given.api_key)))
