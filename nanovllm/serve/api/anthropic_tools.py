"""Tools of the Messages API as functions of a chat."""

from collections.abc import Sequence
from typing import Any

import msgspec

from nanovllm.errors import shown
from nanovllm.serve.api.messages import LeftOut, function
from nanovllm.serve.errors import bad_request


class Tool(msgspec.Struct):
    type: str | None = None
    name: str | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


def _schema(required: Sequence[str], texts: Sequence[str], **more: Any) -> dict[str, Any]:
    """`texts`: names of properties that are texts; `more`: other properties."""
    properties = {name: {"type": "string"} for name in texts} | more
    return {"type": "object", "properties": properties, "required": [*required]}


_COMMANDS = ["view", "create", "str_replace", "insert"]
_EDITED = ("path", "file_text", "old_str", "new_str", "insert_text")
_NUMBERS = {
    "insert_line": {"type": "integer"}, "view_range": {"type": "array", "items": {"type": "integer"}},
}  # fmt: skip
_KNOWN = {
    "bash_": ("Runs a command in a shell that stays open, or restarts it.",
              _schema((), ["command"], restart={"type": "boolean"})),
    "text_editor_": ("Views, creates and edits files.",
                     _schema(["command", "path"], _EDITED, command={"enum": _COMMANDS}, **_NUMBERS)),
    "memory_": ("Views and edits the files of a memory that stays, below /memories.",
                _schema(["command"], [*_EDITED, "old_path", "new_path"],
                        command={"enum": [*_COMMANDS, "delete", "rename"]}, **_NUMBERS)),
}  # fmt: skip
"""Tools that clients run themselves and whose schemas Anthropic publishes, by the beginnings of their types."""


def functions_of(tools: Sequence[Tool], left_out: LeftOut) -> list[dict[str, Any]]:
    """The tools as functions; those that a provider runs are left out. Raises ApiError (400) naming what is missing."""
    found = []
    for index, tool in enumerate(tools):
        kind = tool.type or "custom"
        about, schema = next((known for prefix, known in _KNOWN.items() if kind.startswith(prefix)), (None, None))
        schema = tool.input_schema if tool.input_schema is not None else schema
        if schema is None and kind != "custom":
            left_out.note(kind, "tools")
            continue
        for name, value in (("name", tool.name), ("input_schema", schema)):
            if value is None:
                raise bad_request(f"tools[{index}].{name}: is required", code="missing_required_parameter")
        about = tool.description if tool.description is not None else about
        found.append(function(name=tool.name, description=about, parameters=schema, strict=tool.strict))
    return found


def require_some(functions: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> None:
    """Raises ApiError (400) where all of the request's tools would have to run here."""
    if tools and not functions:
        what = f"tools[0].type={shown(tools[0].type)}: must be 'custom' or a tool that the client runs"
        raise bad_request(f"{what}; this server runs none", code="unsupported_field")
