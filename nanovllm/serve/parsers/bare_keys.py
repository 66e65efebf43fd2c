"""Calls whose arguments are JSON but for keys without quotes and a tag of its own around texts (Gemma 4):
`call:f{city:<|"|>Rome<|"|>,days:[1,2]}`."""

import json
import re
from collections.abc import Callable
from typing import Any

from nanovllm.engine.sampling.grammar_compiler import regex_term
from nanovllm.serve.parsers.calls import Beside, ToolFamily, any_but, one_of
from nanovllm.serve.parsers.reader import Malformed, Output, Source, Steps
from nanovllm.serve.parsers.text_bounds import ANYTHING
from nanovllm.serve.parsers.tools import Tool, json_term
from nanovllm.serve.parsers.values import OF_PYTHON, json_type

SCALAR = re.compile(r"[\w.+-]*")
_OTHER_KEY = r'/[^\s:,{}\[\]"<>]{1,64}/'
_MOST_ITEMS = 1000
_MOST_PARTS = 2000
_ANY: dict[str, Any] = {}
_UNSAID = ("prefixItems", "contains", "uniqueItems", "patternProperties", "propertyNames", "minProperties")
"""Entries of schemas that the grammar does not know."""


class Rules:
    """Rules of a grammar for the values of one tool's schema."""

    comma = '","'
    outer = "{", "}"
    """Brackets around the arguments themselves."""

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
        kinds = self.texts(schema) if "string" in types else []
        if scalars := sorted(types - {"string", "array", "object"}):
            kinds += self.scalars(schema, scalars)
        if "array" in types:
            kinds.append(self._array(schema))
        if "object" in types:
            kinds.append(self.object(schema))
        return kinds

    def texts(self, schema: Any) -> list[str]:
        """Terms of the texts that a part admits."""
        text = self._tool.text_bound(schema)
        term = "TEXT" if text is None else self._terminal(f"{regex_term(ANYTHING)} & ({text})")
        return [f"{self._quote} {term} {self._quote}"]

    def scalars(self, schema: Any, types: list[str]) -> list[str]:
        """Terms of a part's values of these types."""
        return [json_term({**self._document.alone(schema), "type": types}, lenient=not self._tool.strict)]

    def _terminal(self, expression: str) -> str:
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
        some = f'"[" {item} ({self.comma} {item}){{{max(0, least - 1)},{most - 1}}} "]"'
        return some if least else f'("[]" | {some})'

    def object(self, schema: Any, is_outer: bool = False) -> str:
        """Entries in an order, of which those that are not required may be left out. After them come others, where the
        schema has any. `is_outer`: it is the arguments themselves."""
        named, required, others = self._document.entries(schema)
        tail = ['""']
        if others is not False:
            entry = f"{self.other_key(named, is_outer)} {self.value(others)}"
            tail = [f"({self.comma} {entry}){{0,64}}"]
        later = first = self._new(tail)
        if others is not False:
            first = self._new(['""', f"{entry} {later}"])
        for name in reversed(self.ordered(named)):
            entry = f"{self.key(name, is_outer)} {self.value(named[name])}"
            without_first, without_later = ([] if name in required else [rule] for rule in (first, later))
            first = self._new([f"{entry} {later}", *without_first])
            later = self._new([f"{self.comma} {entry} {later}", *without_later])
        begin, end = self.outer if is_outer else ("{", "}")
        return f'"{begin}" {first} "{end}"'

    def ordered(self, named: dict[str, Any]) -> list[str]:
        """Names as templates sort them."""
        return sorted(named, key=str.lower)

    def key(self, name: str, is_outer: bool) -> str:
        """The term of a name and what stands behind it."""
        return json.dumps(self._word(name, ':,{}[]"<> \n') + ":")

    def other_key(self, named: dict[str, Any], is_outer: bool) -> str:
        """The term of any name but these, and what stands behind it."""
        return self._terminal(any_but(_OTHER_KEY, named)) + ' ":"'

    def _word(self, name: str, others: str) -> str:
        if set(name) & set(others):
            raise ValueError(f"tools: function {self._tool.name!r}: the parameter {name[:64]!r} must be a word")
        return name


class BareKeys(ToolFamily):
    """The family, in one tokenizer's tags."""

    rules = Rules

    @property
    def _quote(self) -> Any:
        return self.marks[-1]

    def _arguments(self, tool: Tool, terminals: dict[str, str], beside: Beside) -> str:
        if tool.text_grammar is not None:
            return self.text_argument(tool)
        held = tool if tool.is_held else Tool(tool.name, {})
        schema = json.dumps([held.parameters, held.strict])
        if schema not in beside:
            made = self.rules(held, f"a{len(beside)}_", self.quote_term(), terminals)
            beside[schema] = made.object(held.parameters, True), made.rules
        return beside[schema][0]

    def quote_term(self) -> str:
        """The term of the tag around texts."""
        if self._quote.token_id is None:
            raise ValueError(f"tools: the tokenizer must have a token {self._quote.name}")
        return str(self._quote.lark)

    def text_argument(self, tool: Tool) -> str:
        """The term of the arguments of a tool that takes one text."""
        quote = self.quote_term()
        return f'"{{input:" {quote} {tool.text_term(quote)} "}}"'

    def _read_arguments(self, source: Source, output: Output) -> Steps:
        """Reads one value and emits it as JSON."""
        emit, open_ones = output.arguments, list[tuple[str, str]]()
        while True:
            yield from source.blanks()
            if (found := self.bracket(source.text[:1], not open_ones)) is not None:
                source.take(1)
                open_ones.append(found)
                end, behind_key = found
                emit("{" if behind_key else "[")
                yield from source.blanks()
                if not source.text.startswith(end):
                    yield from self._read_next(behind_key, source, emit)
                    continue
            else:
                yield from self.read_literal(source, emit)
            while open_ones:
                end, behind_key = open_ones[-1]
                if (yield from source.expect(",", end)) == ",":
                    emit(", ")
                    yield from self._read_next(behind_key, source, emit)
                    break
                open_ones.pop()
                emit("}" if behind_key else "]")
            else:
                return

    def _read_next(self, behind_key: str, source: Source, emit: Callable[[str], None]) -> Steps:
        """Reads the name of an entry, where these have any."""
        if behind_key:
            yield from self.read_key(behind_key, source, emit)
            emit(": ")

    def bracket(self, opening: str, is_outer: bool) -> tuple[str, str] | None:
        """The bracket that closes what `opening` opens, and what stands behind the names of its entries, or "";
        None where it opens nothing. `is_outer`: nothing is open."""
        return {"{": ("}", ":"), "[": ("]", "")}.get(opening)

    def read_literal(self, source: Source, emit: Callable[[str], None]) -> Steps:
        """Reads a value that holds no other. Raises Malformed where there is none."""
        quote = self._quote.text
        if source.text.startswith(quote):
            source.take(len(quote))
            emit('"')
            if not (yield from source.until([quote], lambda text: emit(within_json(text)))):
                raise Malformed
            emit('"')
        elif scalar := (yield from source.matching(SCALAR)):
            emit(as_json(scalar))
        else:
            raise Malformed

    def read_key(self, behind: str, source: Source, emit: Callable[[str], None]) -> Steps:
        """Reads a name and what stands behind it. Raises Malformed where that does not come."""
        pieces: list[str] = []
        if not (yield from source.until([behind], pieces.append)):
            raise Malformed
        key = "".join(pieces).replace(self._quote.text, "").strip().strip('"')
        emit(json.dumps(key, ensure_ascii=False))


def within_json(text: str) -> str:
    """A text as JSON has it between quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def as_json(scalar: str) -> str:
    """A number, a constant or a word as JSON."""
    scalar = OF_PYTHON.get(scalar, scalar)  # of older templates
    return scalar if json_type(scalar) is not None else json.dumps(scalar, ensure_ascii=False)
