"""JSON schemas: the schemas within a document, and what its references name."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_DATA = frozenset(("const", "enum", "default", "examples"))


def schemas_in(schema: Any) -> Iterator[Schema]:
    """Yields all schemas of a document."""
    left = [(schema, False)]
    while left:
        node, is_map = left.pop()
        if isinstance(node, list):
            left += ((each, False) for each in node)
        elif isinstance(node, dict):
            if not is_map:
                yield node
            left += (
                (value, not is_map and name in _MAPS) for name, value in node.items() if is_map or name not in _DATA
            )


class SchemaDocument:
    """A JSON schema, whose parts may refer to any other part of it."""

    def __init__(self, root: Schema) -> None:
        self.root = root

    @cached_property
    def _anchors(self) -> dict[Any, Schema]:
        return {str(schema["$anchor"]): schema for schema in schemas_in(self.root) if "$anchor" in schema}

    def target(self, reference: Any) -> Any:
        """The part that a reference names by its place (#/...) or its $anchor (#name); None where there is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        place = unquote(reference[1:])
        if place and not place.startswith("/"):
            return self._anchors.get(place)
        node: Any = self.root
        for step in place.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(step) if isinstance(node, list) else step]
            except (LookupError, TypeError, ValueError):
                return None
        return node

    def parts(self, schema: Any, lists: Sequence[str] = ("allOf",)) -> list[Schema]:
        """A schema, what it refers to and what stands in its `lists` (allOf, ...), each once."""
        found, left = dict[int, Schema](), [schema]
        for part in left:
            if isinstance(part, dict) and id(part) not in found:
                found[id(part)] = part
                left += [self.target(part.get("$ref")), *(each for name in lists for each in listed(part, name))]
        return [*found.values()]


def listed(schema: Schema, name: str) -> list[Any]:
    """An entry that has to be a list; nothing where it is none."""
    found = schema.get(name)
    return found if isinstance(found, list) else []


def mapped(schema: Schema, name: str) -> Schema:
    """An entry that has to be an object; nothing where it is none."""
    found = schema.get(name)
    return found if isinstance(found, dict) else {}
