"""Calls whose arguments are JSON but for keys without quotes and a tag of its own around texts (Gemma 4):
`call:f{city:<|"|>Rome<|"|>,days:[1,2]}`."""

import json
import re
from collections.abc import Callable
from typing import Any

from nanovllm.engine.sampling.grammar_compiler import regex_term
from nanovllm.serve.parsers.calls import ToolFamily, one_of
from nanovllm.serve.parsers.reader import Malformed, Output, Source, Steps
from nanovllm.serve.parsers.text_bounds import ANYTHING
from nanovllm.serve.parsers.tools import Tool, json_term
from nanovllm.serve.parsers.values import json_type

_SCALAR = re.compile(r"[\w.+-]*")
_PYTHON = {"None": "null", "True": "true", "False": "false"}
"""Spellings of older templates."""
_OTHER_KEY = r'/[^\s:,{}\[\]"<>]{1,64}/'
_MOST_ITEMS = 1000
_MOST_PARTS = 2000
_ANY: dict[str, Any] = {}
_UNSAID = ("prefixItems", "contains", "uniqueItems", "patternProperties", "propertyNames", "minProperties")
"""Entries of schemas that the grammar does not know."""


class _Rules:
    """Rules of a grammar for the values of one tool's schema."""

    def __init__(self, tool: Tool, prefix: str, quote: str, terminals: dict[str, str]) -> None:
        """prefix: of the rules' names. terminals: names of terminals by their expressions."""
        self._tool, self._document, self._quote, self._terminals = tool, tool.document, quote, terminals
        self._prefix, self._names, self.rules = prefix, dict[int, str](), list[str]()
        self._kept: list[Any] = []

    def _new(self, alternatives: list[str]) -> str:
        name = f"{self._prefix}{len(self.rules)}"
        self.rules.append(one_of(name, alternatives))
        return name

    def value(self, schema: Any) -> str:
        """Name of the rule for values of a part of the schema; any value where there are too many parts."""
        schema = _ANY if schema is True or schema == _ANY or len(self._kept) > _MOST_PARTS else schema
        self._kept.append(schema)  # or another could get its id
        if id(schema) in self._names:
            return self._names[id(schema)]
        name = self._names[id(schema)] = f"{self._prefix}v{len(self._names)}"
        document, types = self._document, self._document.types(schema)
        if self._tool.strict and (unsaid := [one for one in _UNSAID for part in document.parts(schema) if one in part]):
            raise ValueError(f"tools: function {self._tool.name!r}: {unsaid[0]}: must be absent with strict=true")
        choices = [] if types <= {"string"} else document.choices(schema)
        kinds = [self.value(one) for one in choices] if choices else self._kinds(schema, types)
        self.rules.append(one_of(name, kinds or ["/[^\\s\\S]/"]))
        return name

    def _kinds(self, schema: Any, types: frozenset[str]) -> list[str]:
        kinds = []
        if "string" in types:
            kinds.append(f"{self._quote} {self._text(schema)} {self._quote}")
        if scalars := sorted(types - {"string", "array", "object"}):
            kinds.append(json_term({**self._document.alone(schema), "type": scalars}, lenient=not self._tool.strict))
        if "array" in types:
            kinds.append(self._array(schema))
        if "object" in types:
            kinds.append(self.object(schema))
        return kinds

    def _text(self, schema: Any) -> str:
        try:
            text = self._document.text(schema)
        except ValueError as error:
            raise ValueError(f"tools: function {self._tool.name!r}: {error}") from None
        if text is None:
            return "TEXT"
        expression = f"{regex_term(ANYTHING)} & ({text})"
        return self._terminals.setdefault(expression, f"T{len(self._terminals)}")

    def _array(self, schema: Any) -> str:
        parts = self._document.parts(schema)
        items: Any = next((part["items"] for part in parts if "items" in part), _ANY)
        least = max([0, *(part["minItems"] for part in parts if isinstance(part.get("minItems"), int))])
        bounds = [part["maxItems"] for part in parts if isinstance(part.get("maxItems"), int)]
        most = min([_MOST_ITEMS, *bounds])
        if not most or items is False:
            return '"[]"'
        item = self.value(items)
        some = f'"[" {item} ("," {item}){{{max(0, least - 1)},{most - 1}}} "]"'
        return some if least else f'("[]" | {some})'

    def object(self, schema: Any) -> str:
        """Entries in the order of their names, as templates sort them; those that are not required may be left out.
        After them come others, where the schema has any."""
        named, required, others = self._document.entries(schema)
        tail = ['""']
        if others is not False:
            but = f" & ~({' | '.join(map(json.dumps, named))})" if named else ""
            key = self._terminals.setdefault(_OTHER_KEY + but, f"T{len(self._terminals)}")
            entry = f'{key} ":" {self.value(others)}'
            tail = [f'("," {entry}){{0,64}}']
        later = first = self._new(tail)
        if others is not False:
            first = self._new(['""', f"{entry} {later}"])
        for name in sorted(named, key=str.lower, reverse=True):
            if set(name) & set(':,{}[]"<> \n'):
                raise ValueError(f"tools: function {self._tool.name!r}: the parameter {name[:64]!r} must be a word")
            entry = f"{json.dumps(name + ':')} {self.value(named[name])}"
            without_first, without_later = ([] if name in required else [rule] for rule in (first, later))
            first = self._new([f"{entry} {later}", *without_first])
            later = self._new([f'"," {entry} {later}', *without_later])
        return f'"{{" {first} "}}"'


class BareKeys(ToolFamily):
    """The family, in one tokenizer's tags."""

    @property
    def _quote(self) -> Any:
        return self.marks[-1]

    def _arguments(self, tool: Tool, terminals: dict[str, str], beside: list[str]) -> str:
        quote = self._quote.lark
        if self._quote.token_id is None:
            raise ValueError(f"tools: the tokenizer must have a token {self._quote.name}")
        if tool.text_grammar is not None:
            return f'"{{input:" {quote} {tool.text_term(quote)} "}}"'
        held = tool if tool.is_held else Tool(tool.name, {})
        made = _Rules(held, f"a{len(beside)}_", quote, terminals)
        term = made.object(held.parameters)
        beside += made.rules
        return term

    def _read_arguments(self, source: Source, output: Output) -> Steps:
        yield from self._read_json(source, output.arguments)

    def _read_json(self, source: Source, emit: Callable[[str], None]) -> Steps:
        """Reads one value and emits it as JSON."""
        quote, open_ones = self._quote.text, list[str]()

        def emit_text(text: str) -> None:
            emit(json.dumps(text, ensure_ascii=False)[1:-1])

        while True:
            yield from source.blanks()
            if source.text.startswith(quote):
                source.take(len(quote))
                emit('"')
                if not (yield from source.until([quote], emit_text)):
                    raise Malformed
                emit('"')
            elif source.text[:1] in ("{", "["):
                emit(opening := source.take(1))
                open_ones.append("}" if opening == "{" else "]")
                yield from source.blanks()
                if not source.text.startswith(open_ones[-1]):
                    if opening == "{":
                        yield from self._read_key(source, emit)
                    continue
            else:
                scalar = yield from source.matching(_SCALAR)
                if not scalar:
                    raise Malformed
                emit(_as_json(scalar))
            while open_ones:
                yield from source.blanks()
                if (yield from source.expect(",", open_ones[-1])) == ",":
                    emit(", ")
                    if open_ones[-1] == "}":
                        yield from self._read_key(source, emit)
                    break
                emit(open_ones.pop())
            else:
                return

    def _read_key(self, source: Source, emit: Callable[[str], None]) -> Steps:
        pieces: list[str] = []
        if not (yield from source.until([":"], pieces.append)):
            raise Malformed
        key = "".join(pieces).replace(self._quote.text, "").strip().strip('"')
        emit(f"{json.dumps(key, ensure_ascii=False)}: ")


def _as_json(scalar: str) -> str:
    scalar = _PYTHON.get(scalar, scalar)
    return scalar if json_type(scalar) is not None else json.dumps(scalar, ensure_ascii=False)
