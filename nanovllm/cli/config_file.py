"""`--config FILE.yaml`: options by name; what the command line names wins."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.cli.options import Parser


def parse_with_config(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments, and after them the options of the file of --config that they do not have. Ends with an
    error that names the wrong option, or the file."""
    given = parser.parse_args(arguments)
    if given.config is None:
        return given
    entries = _read(parser, given.config)
    model = entries.pop("model", None)
    words = [*arguments] if model is None or given.model is not None else [str(model), *arguments]
    for key, value in entries.items():
        name = "--" + str(key).replace("_", "-")
        action = parser.action(name)
        if name in ("--config", "--help"):
            parser.error(f"{given.config}: {name[2:]}: not in a file")
        if action is None:
            parser.refuse_unknown(name, f"{given.config}: ")
        if value is not None and getattr(given, action.dest, action.default) == action.default:
            words += _as_typed(parser, action, name, value, given.config)
    return parser.parse_args(words)


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


def _as_typed(parser: Parser, action: argparse.Action, name: str, value: Any, path: str) -> list[str]:
    """An entry of the file as the words that one would type for it."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            parser.error(f"{path}: {name[2:]}: {str(value)[:100]!r} is not true or false")
        is_on = value != name.startswith("--no-")
        return [f"--{'' if is_on else 'no-'}{name[2:].removeprefix('no-')}"]
    values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
    if action.nargs == "+":
        return [name, *map(str, values)]
    if isinstance(value, list) and not isinstance(action, argparse._AppendAction):
        parser.error(f"{path}: {name[2:]}: takes one value, not a list")
    return [f"{name}={each}" for each in values]
