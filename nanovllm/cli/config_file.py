"""`--config FILE.yaml`: options by name; what the command line names wins."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.cli.options import Parser


def parse_with_config(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """What `parser` makes of the arguments, where the file of --config has its defaults. Ends with an error that names
    the option, or the file, that is wrong."""
    given = parser.parse_args(arguments)
    if given.config is None:
        return given
    entries = _read(parser, given.config)
    model = entries.pop("model", None)
    defaults: dict[str, Any] = {} if model is None else {"model": str(model)}
    for key, value in entries.items():
        name = "--" + str(key).replace("_", "-")
        action = parser.action(name)
        if action is None or name in ("--config", "--help"):
            parser.refuse_unknown(name, f"{given.config}: ")
        if value is not None and getattr(given, action.dest, action.default) == action.default:
            defaults[action.dest] = _as_default(parser, action, name, value, given.config)
    parser.set_defaults(**defaults)
    return parser.parse_args(arguments)


def _read(parser: Parser, path: str) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        parser.error(f"--config {path}: {error.strerror}")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        parser.error(f"--config {path}: not valid YAML: {' '.join(str(error).split())[:300]}")
    if content is not None and not isinstance(content, dict):
        parser.error(f"--config {path}: must hold option: value lines")
    return content or {}


def _as_default(parser: Parser, action: argparse.Action, name: str, value: Any, path: str) -> Any:
    """A value of the file as a default of its option; argparse reads one that is a text as if it had been typed."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            parser.error(f"{path}: {name[2:]}: {str(value)[:100]!r} is not true or false")
        return value != name.startswith("--no-")
    if action.nargs == "+" or isinstance(action, argparse._AppendAction):
        return list(map(str, value if isinstance(value, list) else [value]))
    if isinstance(value, list):
        parser.error(f"{path}: {name[2:]}: takes one value, not a list")
    return json.dumps(value) if isinstance(value, dict) else str(value)
