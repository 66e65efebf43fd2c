"""`--config FILE.yaml`: options by name; what the command line names wins."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.cli.options import Parser


def parse_with_config(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """What `parser` makes of the arguments and of what the file of --config adds. Ends with an error that names file
    and option where the file is wrong."""
    given = parser.parse_args(arguments)
    if given.config is None:
        return given
    named = {name for name, value in vars(given).items() if value != parser.get_default(name)}
    model, options = _arguments_of(parser, given.config, named)
    return parser.parse_args([*model, *arguments, *options])  # no model behind an option that takes several values


def _arguments_of(parser: Parser, path: str, named: set[str]) -> tuple[list[str], list[str]]:
    """The file's model and its other entries as arguments, but for those that `named` has."""
    found: list[str] = []
    entries = _read(parser, path)
    model = entries.pop("model", None)
    for key, value in entries.items():
        name = "--" + str(key).replace("_", "-")
        action = parser.action(name)
        if action is None or name in ("--config", "--help"):
            parser.refuse_unknown(name, f"{path}: ")
        if action.dest not in named and value is not None:
            found += _as_arguments(parser, action, name, value, path)
    return [] if model is None or "model" in named else [str(model)], found


def _read(parser: Parser, path: str) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        parser.error(f"--config {path}: {error.strerror}")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        parser.error(f"--config {path}: not valid YAML: {' '.join(str(error).split())[:300]}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        parser.error(f"--config {path}: must hold option: value lines")
    return content


def _as_arguments(parser: Parser, action: argparse.Action, name: str, value: Any, path: str) -> list[str]:
    if action.nargs == 0:
        if not isinstance(value, bool):
            parser.error(f"{path}: {name[2:]}: {str(value)[:100]!r} is not true or false")
        if isinstance(action, argparse.BooleanOptionalAction):
            return [name if value else "--no-" + name[2:]]
        return [name] if value else []
    if isinstance(value, dict):
        return [f"{name}={json.dumps(value)}"]
    if not isinstance(value, list):
        return [f"{name}={value}"]
    if isinstance(action, argparse._AppendAction):
        return [f"{name}={each}" for each in value]
    if action.nargs != "+":
        parser.error(f"{path}: {name[2:]}: takes one value, not a list")
    return [name, *map(str, value)] if value else []
