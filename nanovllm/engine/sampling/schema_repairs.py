"""JSON schemas that llguidance gets wrong: written in a form that it gets right, or refused."""

from collections.abc import Callable, Iterator
from typing import Any

from nanovllm.errors import is_number, shown

_BOUNDS = {"exclusiveMinimum": 1, "exclusiveMaximum": -1}
"""Names of bounds that are excluded -> direction of what they admit."""
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_DATA = frozenset(("const", "enum", "default", "examples"))
_STEP = 1e-9
"""Part of a bound by which it moves: beyond what anybody writes."""


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
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


def move_bounds(schema: Any) -> None:
    """Moves whole numbers that are excluded bounds by a billionth towards what they admit, where a document has bounds
    that are no whole numbers: the library admits 0 where 0 is excluded and 0.5 is the other bound. Flags, of draft 4 of
    the standard, become bounds. Changes the document."""
    nodes = list(schemas_in(schema))
    for node in nodes:
        for name in _BOUNDS:
            if isinstance(flag := node.get(name), bool):
                del node[name]
                inclusive = name.replace("exclusiveM", "m")
                if flag and inclusive in node:
                    node[name] = node.pop(inclusive)
    numbers = [node[name] for node in nodes for name in ("minimum", "maximum", *_BOUNDS) if is_number(node.get(name))]
    fractions = [abs(number) for number in numbers if number != int(number)]
    for node in nodes if fractions else ():
        for name, sign in _BOUNDS.items():
            if is_number(bound := node.get(name)) and bound == int(bound):
                node[name] = bound + sign * _STEP * min(1.0, *fractions) * max(1.0, abs(bound))


def check_patterns(schema: Any, is_empty: Callable[[str, frozenset[str]], bool]) -> None:
    """Raises ValueError where all names that a pattern of patternProperties matches are declared ones: the library
    fails in the middle of such an object. `is_empty`: whether an expression has no other texts than these."""
    checked = set()
    for node in schemas_in(schema):
        parts = list(_parts(node, schema))
        names = frozenset(name for part in parts for name in _map(part, "properties"))
        patterns = {pattern for part in parts for pattern in _map(part, "patternProperties")} if names else ()
        for pattern in patterns:
            if (pattern, names) not in checked and is_empty(pattern, names):
                bound = "must match other names than the declared properties, whose schemas belong into properties"
                raise ValueError(f"patternProperties: {shown(pattern)}: {bound}")
            checked.add((pattern, names))


def _parts(node: dict[str, Any], root: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema and all that hold together with it."""
    left, seen = [node], set()
    while left:
        part = left.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        for name in ("allOf", "anyOf", "oneOf"):
            left += part[name] if isinstance(part.get(name), list) else []
        left.append(_target(root, part.get("$ref")))


def _target(root: Any, reference: Any) -> Any:
    """The part of a document that "#/..." names; None where there is none."""
    if isinstance(reference, str) and reference.startswith("#"):
        for name in reference.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            root = root.get(name) if isinstance(root, dict) else None
        return root
    return None


def _map(node: dict[str, Any], name: str) -> dict[str, Any]:
    found = node.get(name)
    return found if isinstance(found, dict) else {}
