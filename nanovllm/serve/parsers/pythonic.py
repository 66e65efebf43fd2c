"""Calls as Python writes them: `[f(city="Rome", days=[1, None])]` (LFM2, Llama 4). Each number, and each escape in a
text, is read alone, as it comes: nothing is run, and nothing nests for Python. (ast.literal_eval would read them too,
but in Python 3.11 it may fail where two threads parse at once.)"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

from nanovllm.serve.parsers.bare_keys import SCALAR, BareKeys, Rules, as_json, within_json
from nanovllm.serve.parsers.calls import any_but
from nanovllm.serve.parsers.reader import Malformed, Source, Steps
from nanovllm.serve.parsers.tools import Tool

_ESCAPE = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|[\\'\"abfnrtv\n]")
_ESCAPE_LENGTHS = {"x": 3, "u": 5, "U": 9, **dict.fromkeys("01234567", 3)}
"""Characters that an escape may have behind its backslash, by the first of them; others have one."""
_FLOAT = re.compile(r"[+-]?(\d[\d_]*[.eE]|\.\d)[\d_.eE+-]*")
_MAX_NUMBER = 1000
"""Characters of a number."""
_TEXT = r"""/"(?:[^"\\]|\\["'\\nrt])*"|'(?:[^'\\]|\\["'\\nrt])*'/"""
_NAME = re.compile(r"[^=,()\[\]{}\"'\s]*")
_OTHER_NAME = r"/[A-Za-z_]\w{0,63}/"
_OTHER_KEY = r"""/"[^"\\\n]{1,64}"|'[^'\\\n]{1,64}'/"""
_CONSTANTS: dict[str, dict[str, bool | None]] = {"null": {"None": None}, "boolean": {"True": True, "False": False}}


class _PythonRules(Rules):
    comma = "/, ?/"
    outer = "(", ")"

    def texts(self, schema: Any) -> list[str]:
        text = self._tool.text_bound(schema)
        if text is None:
            return [self._terminal(_TEXT)]
        plain = self._terminal(rf"/[^'\\]*/ & ({text})")
        return [f'"\'" {plain} "\'"', *super().scalars(schema, ["string"])]

    def scalars(self, schema: Any, types: list[str]) -> list[str]:
        parts = self._document.parts(schema)
        fixed = [part["enum"] if "enum" in part else [part["const"]] for part in parts if {"enum", "const"} & {*part}]
        terms = [
            json.dumps(name)
            for kind in types
            for name, value in _CONSTANTS.get(kind, {}).items()
            if all(any(one is value for one in each) for each in fixed)
        ]
        numbers = [kind for kind in types if kind not in _CONSTANTS]
        return terms + (super().scalars(schema, numbers) if numbers else [])

    def ordered(self, named: dict[str, Any]) -> list[str]:
        return [*named]

    def key(self, name: str, is_outer: bool) -> str:
        if is_outer:
            return json.dumps(self._word(name, "=,()[]{}\"'\\ \n") + "=")
        return f"({' | '.join(map(json.dumps, _quoted(name)))}) /: ?/"

    def other_key(self, named: dict[str, Any], is_outer: bool) -> str:
        if is_outer:
            return self._terminal(any_but(_OTHER_NAME, named)) + ' "="'
        quoted = [each for name in named for each in _quoted(name)]
        return self._terminal(any_but(_OTHER_KEY, quoted)) + " /: ?/"


def _quoted(name: str) -> list[str]:
    """A name in each kind of quotes that needs no other escapes than JSON's."""
    return [json.dumps(name, ensure_ascii=False), *([] if set(name) & set("'\\\n") else [f"'{name}'"])]


class Pythonic(BareKeys):
    """The families, in one tokenizer's tags."""

    arguments_begin = "("
    rules = _PythonRules

    def quote_term(self) -> str:
        return ""  # texts have quotes of their own

    def text_argument(self, tool: Tool) -> str:
        return rf'"(input=\"" {tool.text_term()} "\")"'

    def bracket(self, opening: str, is_outer: bool) -> tuple[str, str] | None:
        return (")", "=" if is_outer else "") if opening == "(" else super().bracket(opening, is_outer)

    def read_literal(self, source: Source, emit: Callable[[str], None]) -> Steps:
        quote = source.text[:1]
        if quote not in ('"', "'"):
            if not (scalar := (yield from source.matching(SCALAR))):
                raise Malformed
            emit(_number(scalar) or as_json(scalar))
            return
        source.take(1)
        emit('"')
        while (found := (yield from source.until([quote, "\\"], lambda text: emit(within_json(text))))) == "\\":
            while not source.ended and len(source.text) < _ESCAPE_LENGTHS.get(source.text[:1], 1):
                yield
            escape = _ESCAPE.match(source.text)
            emit(_meaning(source.take(escape.end())) if escape else r"\\")
        if not found:
            raise Malformed
        emit('"')

    def read_key(self, behind: str, source: Source, emit: Callable[[str], None]) -> Steps:
        yield from source.blanks()
        if behind == "=":
            name = yield from source.matching(_NAME)
            emit(json.dumps(name, ensure_ascii=False))
        else:
            is_text = source.text[:1] in ('"', "'")
            yield from self.read_literal(source, emit if is_text else lambda text: emit(f'"{text}"'))
        yield from source.expect(behind)


def _meaning(escape: str) -> str:
    """Text of an escape, given without its backslash, as JSON has it between quotes; itself where it is no character.
    (Half a surrogate pair stays an escape, which the next one may complete.)"""
    try:
        return json.dumps(f"\\{escape}".encode().decode("unicode_escape"))[1:-1]
    except UnicodeDecodeError:
        return within_json(f"\\{escape}")


def _number(scalar: str) -> str | None:
    """A number that Python writes otherwise than JSON: 1_000, 0x1f, .5; None where it is none."""
    if len(scalar) >= _MAX_NUMBER or scalar.isdecimal():
        return None
    try:
        found = float(scalar) if _FLOAT.fullmatch(scalar) else int(scalar, 0)
    except ValueError:
        return None
    return json.dumps(found) if abs(found) < math.inf else None
