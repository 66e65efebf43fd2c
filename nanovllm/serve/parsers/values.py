"""Values of a call's parameters, which are texts as they are, or JSON: by their schemas."""

import json
from functools import cached_property
from typing import Any, NamedTuple

from nanovllm.engine.sampling.json_schema import Schema, SchemaDocument, listed, mapped
from nanovllm.serve.parsers.text_bounds import text_terms

TYPES = frozenset(("null", "boolean", "integer", "number", "object", "array", "string"))
_DIGITS = "-0123456789"
INITIALS = {"null": "n", "boolean": "tf", "integer": _DIGITS, "number": _DIGITS, "object": "{", "array": "["}
"""Characters with which JSON of a type begins."""
BLANKS = " \t\n\r"
"""JSON's."""
_DESCRIBING = frozenset(("type", "title", "description", "default", "examples", "deprecated", "$comment", "$schema"))
_LEFT_OUT = frozenset(("$defs", "definitions", "title", "description", "default", "examples"))
_MAX_NESTED = 64
"""Choices within choices, after which any type may come."""
_MAX_TEXT_TERM = 32 << 10


class Parameters(NamedTuple):
    """Entries of an object, as its schema has them."""

    named: dict[str, Any]
    required: set[str]
    others: Any
    """Schema of an entry that is not named; False: there is none."""


class Document(SchemaDocument):
    """A JSON schema of an object, and its parts."""

    def __init__(self, root: Schema, strict: bool) -> None:
        """`strict`: see text_terms."""
        super().__init__(root)
        self._strict = strict
        self._types: dict[int, frozenset[str]] = {}
        self._texts: dict[int, str | None] = {}

    @cached_property
    def parameters(self) -> Parameters:
        """Entries of the object."""
        return self.entries(self.root)

    def choices(self, schema: Any) -> list[Any]:
        """Schemas of which a value satisfies one, where a part says nothing else; else none."""
        parts = self.parts(schema)
        found = [each for part in parts for each in _choices(part)]
        says_more = any(part.keys() - {"anyOf", "oneOf", "$ref", "allOf"} - _LEFT_OUT for part in parts)
        return found[0] if len(found) == 1 and not says_more else []

    def entries(self, schema: Any) -> Parameters:
        """Entries of an object that is a part. Others than the named ones are left to the model where the schema says
        so, or names none."""
        named: dict[str, Any] = {}
        required, others = set[str](), list[Any]()
        for part in self.parts(schema):
            for name, value in mapped(part, "properties").items():
                named[name] = {"allOf": [named[name], value]} if name in named else value
            required.update(name for name in listed(part, "required") if isinstance(name, str))
            others += [part["additionalProperties"]] if "additionalProperties" in part else []
        rest = others[0] if others else not named
        if rest is not False:
            named |= dict.fromkeys(sorted(required - named.keys()), rest)
        return Parameters({name: value for name, value in named.items() if value is not False}, required, rest)

    def types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Types that a part's values may have."""
        if not isinstance(schema, dict) or depth > _MAX_NESTED:
            return frozenset() if schema is False else TYPES
        if id(schema) not in self._types:
            self._types[id(schema)] = frozenset()  # where it is a choice within itself
            found = TYPES
            for part in self.parts(schema):
                found &= _own_types(part)
                for each in _choices(part):
                    found &= frozenset[str]().union(*(self.types(one, depth + 1) for one in each))
            self._types[id(schema)] = found
        return self._types[id(schema)]

    def text(self, schema: Any, depth: int = 0) -> str | None:
        """The texts that a part admits, as an expression of a Lark terminal; None: any. Raises ValueError as
        text_terms."""
        if not isinstance(schema, dict) or depth > _MAX_NESTED:
            return None
        if id(schema) not in self._texts:
            self._texts[id(schema)] = ""
            terms = []
            for part in self.parts(schema):
                terms += text_terms(part, self._strict)
                for each in _choices(part):
                    texts = [self.text(one, depth + 1) for one in each if "string" in self.types(one)]
                    if None not in texts and any(texts):
                        terms.append(f"({' | '.join(filter(None, texts))})")
            if sum(map(len, terms)) > _MAX_TEXT_TERM:
                raise ValueError(f"what it asks of texts has more than {_MAX_TEXT_TERM} bytes")
            self._texts[id(schema)] = " & ".join(terms) or None
        return self._texts[id(schema)]

    def is_free(self, schema: Any) -> bool:
        """Whether every value of a part's types is one of its values."""
        return schema is True or (isinstance(schema, dict) and schema.keys() <= _DESCRIBING)

    def alone(self, schema: Any) -> dict[str, Any]:
        """A part as a schema of its own, with what it refers to among its definitions."""
        names: dict[str, str] = {}

        def moved(node: Any) -> Any:
            if isinstance(node, list):
                return [moved(each) for each in node]
            if not isinstance(node, dict):
                return node
            reference = node.get("$ref")
            found = {name: moved(value) for name, value in node.items()}
            if isinstance(reference, str) and self.target(reference) is not None:
                found["$ref"] = f"#/$defs/{names.setdefault(reference, str(len(names)))}"
            return found

        whole = moved(_needed(schema)) if isinstance(schema, dict) else {}
        definitions: dict[str, Any] = {}
        while len(definitions) < len(names):
            reference = [*names][len(definitions)]
            definitions[names[reference]] = moved(_needed(self.target(reference)))
        return {**whole, "$defs": definitions} if definitions else whole


OF_PYTHON = {"True": "true", "False": "false", "None": "null"}


def _own_types(schema: Schema) -> frozenset[str]:
    kind = schema.get("type", [*TYPES])
    types = frozenset(each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str))
    types |= {"integer"} if "number" in types else types
    fixed = [schema["const"]] if "const" in schema else schema.get("enum")
    return types & {_type_of(each) for each in fixed} if isinstance(fixed, list) else types


def _choices(schema: Schema) -> list[list[Any]]:
    return [each for name in ("anyOf", "oneOf") if (each := listed(schema, name))]


def _needed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {name: value for name, value in schema.items() if name not in _LEFT_OUT}


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


_JSON = json.JSONDecoder(parse_int=lambda _: 0, parse_constant=_refuse)  # an int may be longer than Python reads


def json_type(text: str) -> str | None:
    """Type of a text's JSON value; None where it is none."""
    try:
        return _type_of(_JSON.decode(text))
    except (ValueError, RecursionError):
        return None


def as_json(text: str, types: frozenset[str], begin: str = "") -> str:
    """A parameter's text as JSON: as it is where it is JSON of its types, or where no text is among these; else as a
    string, without `begin`. Qwen3.5 and Nemotron 3 may write Python's constants, as their templates do."""
    if "string" not in types:
        text = OF_PYTHON.get(text.strip(BLANKS), text)
    found = json_type(text)
    if found is not None and ("string" not in types or found in types - {"string"}):
        return text.strip(BLANKS)
    return json.dumps(text.removeprefix(begin), ensure_ascii=False)
