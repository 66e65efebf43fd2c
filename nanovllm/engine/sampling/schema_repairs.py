"""JSON schemas that llguidance gets wrong: written in a form that it gets right, or refused."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from nanovllm.engine.sampling.json_schema import SchemaDocument, mapped, schemas_in
from nanovllm.errors import is_number, shown

_BOUNDS = {"exclusiveMinimum": 1, "exclusiveMaximum": -1}
"""Names of bounds that are excluded -> direction of what they admit."""
_STEP = 1e-9
"""Part of a bound by which it moves: beyond what anybody writes."""


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


def widen_bounds(schema: Any) -> None:
    """Replaces bounds of multiples of a fraction that are such themselves, and have fewer digits than that, by excluded
    ones: the library writes 0.50 for a multiple of 0.25, which it takes for more than 0.5. Changes the document."""
    document = SchemaDocument(schema)
    for node in [*schemas_in(schema)]:
        parts = document.parts(node)
        steps = (str(abs(part["multipleOf"])) for part in parts if is_number(part.get("multipleOf")))
        if (step := next((Decimal(step) for step in steps if Fraction(step) % 1), None)) is None:
            continue
        digits = _last_digit(step)
        for part in parts:
            for excluded, sign in _BOUNDS.items():
                name = excluded.replace("exclusiveM", "m")
                bound = Decimal(str(part[name])) if is_number(part.get(name)) else Decimal(0)
                if sign * bound < 0 and _last_digit(bound) > digits and not Fraction(bound) % Fraction(step):
                    beyond = float(bound - sign * Decimal(1).scaleb(digits))
                    part[excluded] = max(beyond, part.get(excluded, beyond), key=lambda bound: sign * bound)
                    del part[name]


def _last_digit(number: Decimal) -> int:
    """Power of ten of a finite number's last digit."""
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    return exponent


def check_patterns(schema: Any, is_empty: Callable[[str, frozenset[str]], bool]) -> None:
    """Raises ValueError where all names that a pattern of patternProperties matches are declared ones: the library
    fails in the middle of such an object. `is_empty`: whether an expression has no other texts than these."""
    document, checked = SchemaDocument(schema), set()
    for node in schemas_in(schema):
        parts = document.parts(node, ("allOf", "anyOf", "oneOf"))
        names = frozenset(name for part in parts for name in mapped(part, "properties"))
        patterns = {pattern for part in parts for pattern in mapped(part, "patternProperties")} if names else ()
        for pattern in patterns:
            if (pattern, names) not in checked and is_empty(pattern, names):
                bound = "must match other names than the declared properties, whose schemas belong into properties"
                raise ValueError(f"patternProperties: {shown(pattern)}: {bound}")
            checked.add((pattern, names))
