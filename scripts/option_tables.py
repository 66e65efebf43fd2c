#!/usr/bin/env python3
"""Writes the tables of options in docs/ anew, from the code that owns them. tests/test_docs.py holds the docs to it."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path

from nanovllm.cli.options import field_docs
from nanovllm.cli.serve import SERVER_FIXED, SERVER_VALUES, make_parser
from nanovllm.serve.options import ServeOptions
from nanovllm.vllm_options import FIXED, RENAMED, VALUES

DOCS = Path(__file__).resolve().parent.parent / "docs"
_OWN = {"api_keys": "api_key", "admin_api_keys": "admin_api_key"}
"""Fields that are options of their own on the command line."""


def server_options() -> str:
    """Every option of the server, with its default and what it does."""
    docs, helps = field_docs(ServeOptions), {each.dest: str(each.help) for each in make_parser()._actions}
    lines = ["| option | default | meaning |", "|---|---|---|", f"| `config` | `None` | {helps['config']}. |"]
    for option in fields(ServeOptions):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        name = _OWN.get(option.name, option.name)
        meaning = f"{helps[name][:1].upper()}{helps[name][1:]}." if option.name in _OWN else docs[option.name]
        lines.append(f"| `{name}` | `{default!r}` | {meaning} |")
    return "\n".join(lines)


def options_of_vllm(
    renamed: Mapping[str, str],
    values: Mapping[str, Mapping[str, str]],
    fixed: Mapping[str, tuple[tuple[str, ...], str]],
) -> str:
    """Table of vLLM's options that have another name, other values or no meaning here."""
    rows = {name: f"`{ours}`" for name, ours in renamed.items()}
    for name, words in values.items():
        rows[name] = f"`{name}`: " + ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in words.items())
    for name, (accepted, instead) in fixed.items():
        taken = "taken, nothing to do" if {*accepted} & {"*"} or not instead else "refused"
        if accepted and instead:
            taken = ", ".join(f"`{value}`" for value in accepted) + " taken, others refused"
        rows[name] = taken + (f": {instead}" if instead else "")
    lines = [f"| `{name}` | {row} |" for name, row in sorted(rows.items())]
    return "\n".join(["| vLLM | here |", "|---|---|", *lines])


TABLES = {
    ("options.md", "## Server"): server_options(),
    ("from-vllm.md", "## Options of the engine"): options_of_vllm(RENAMED, VALUES, FIXED),
    ("from-vllm.md", "## Options of the server"): options_of_vllm({}, SERVER_VALUES, SERVER_FIXED),
}
"""Table of a section, by page and heading."""


def with_tables(page: str, text: str) -> str:
    """A page with its tables as they should be."""
    for (name, heading), table in TABLES.items():
        if name == page:
            pattern = rf"(\n{re.escape(heading)}\n(?:[^|\n].*\n|\n)*)(?:\|.*\n)+"
            text, count = re.subn(pattern, lambda found, table=table: f"{found[1]}{table}\n", text)
            assert count == 1, f"{page} has no table below {heading!r}"
    return text


if __name__ == "__main__":
    for page in {page for page, _ in TABLES}:
        path = DOCS / page
        path.write_text(with_tables(page, path.read_text(encoding="utf-8")), encoding="utf-8")
