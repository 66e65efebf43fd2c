"""Values of a call's parameters, which are texts as they are, or JSON: by their schemas."""

import json
from collections.abc import Mapping
from typing import Any

from nanovllm.serve.parsers.tools import Tool, json_term


def value_term(value: Any, tool: Tool) -> str | None:
    """Values of a parameter as a term of a grammar, from its schema; None: any text."""
    value = resolved(value, tool.parameters)
    if not is_words(value):
        outer = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        return json_term({**outer, **value}, lenient=tool.strict is None)
    choices = [value["const"]] if "const" in value else value.get("enum")
    return f"({' | '.join(json.dumps(str(each)) for each in choices)})" if choices else None


def as_json(text: str) -> str:
    """A parameter's text as JSON: as it is, or as a string where it is none."""
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(text.removeprefix("\n"), ensure_ascii=False)
    return text.strip()


def resolved(value: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parameter's schema, a reference to one of the definitions replaced by it."""
    reference = value.get("$ref") if isinstance(value, Mapping) else None
    if isinstance(reference, str):
        parts = reference.removeprefix("#/").split("/")
        table = schema.get(parts[0])
        found = table.get(parts[-1]) if isinstance(table, Mapping) and len(parts) == 2 else None
        value = found if isinstance(found, Mapping) else value
    return value if isinstance(value, Mapping) else {}


def is_words(schema: Mapping[str, Any]) -> bool:
    """Whether a parameter's value is written as it is, and not as JSON."""
    fixed = [schema["const"]] if "const" in schema else schema.get("enum")
    if fixed:
        return all(isinstance(each, str) for each in fixed)
    kind = schema.get("type")
    if isinstance(kind, list):
        return "string" in kind
    return kind == "string" or (kind is None and not {"anyOf", "oneOf", "allOf", "$ref"} & {*schema})
