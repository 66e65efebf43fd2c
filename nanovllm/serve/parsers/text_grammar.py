"""Grammars of a custom tool's text, as terms of the grammar of a call: of the text as it is, or as JSON writes it
inside of a string.

A grammar whose rules do not contain themselves becomes one terminal. Terminals beside each other are told apart by the
next byte. That is not enough once a line break is a backslash and a letter, or where any text may come before the tag
that ends it.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any

from nanovllm.engine.sampling.grammar_compiler import regex_term
from nanovllm.engine.sampling.grammar_limits import check_text

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*|->[ \t]*\w+)
    |(?P<range>"(?:\\.|[^"\\\n])+"[ \t]*\.\.[ \t]*"(?:\\.|[^"\\\n])+")
    |(?P<text>"(?:\\.|[^"\\\n])*")
    |/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)
    |(?P<open>["/][^\n]*)
    |%import[ \t]+common\.(?P<common>\w+)(?:[ \t]*->[ \t]*(?P<name>\w+))?
    |(?P<ignore>%ignore\b)
    |(?P<other>%\w+|[@<]|~(?![ \t]*\d))
    |^[ \t]*[?!]?(?P<head>[A-Za-z_]\w*)(?:\.-?\d+)?[ \t]*:
    |(?P<word>[A-Za-z_]\w*)""",
    re.VERBOSE | re.MULTILINE,
)
ATOM = re.compile(
    r"""(?P<operator>\((?:\?(?:[a-z-]*[:)]|P?<\w+>))?|\{\d*,?\d*\}|[)|*+?^$])
    |\[\^?\]?(?:\\.|[^\]\\])*\]|\\x\{[^}]*\}|\\x..|\\u....|\\.|.""",
    re.VERBOSE | re.DOTALL,
)
_COMMON = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
}  # fmt: skip
"""Terminals of Lark's library that JSON writes otherwise."""
_WRITTEN = {char: json.dumps(char)[2:-1] for char in map(chr, (*range(32), 34, 92))}
"""Characters that JSON writes otherwise -> what it writes after a backslash."""
_PLAIN = "".join(map(chr, (*range(32, 34), *range(35, 92), *range(93, 0xD800), *range(0xE000, 0xF000))))
_OTHERS = r'[^"\\\x00-\x1f]'
_START = "RULE_START"


def lark_of(form: Mapping[str, Any]) -> str:
    """The Lark grammar of a custom tool's format. Raises ValueError for one in another language, or none."""
    language, definition = form.get("syntax"), form.get("definition")
    if language not in ("lark", "regex") or not isinstance(definition, str) or not definition.strip():
        raise ValueError("must have the syntax 'lark' or 'regex', and a definition")
    check_text("regex", definition)
    return definition if language == "lark" else f"start: {regex_term(definition)}"


def in_json(grammar: str) -> str:
    """The term of what JSON writes inside of a string for the texts of a grammar. Raises ValueError naming what of it
    has no such term."""
    rules = _Rewriting(grammar, True)
    if rules.is_regular:
        return rules.term()
    if rules.has_escapes:
        raise ValueError("rules that contain themselves, or %ignore, cannot go with what JSON writes otherwise")
    return _nested(grammar)


def before(end: str, grammar: str) -> str:
    """The term of a text of a grammar with `end` behind it: a text in quotes, or a token. Raises ValueError."""
    rules = _Rewriting(grammar, False)
    if rules.is_regular and end.startswith('"'):
        return _nested(f"start[lazy]: WHOLE\nWHOLE: {_START} {end}\n{rules.text}")
    return f"{rules.term() if rules.is_regular else _nested(grammar)} {end}"


def _nested(grammar: str) -> str:
    return f"%lark {{\n{grammar}\n}}"


class _Rewriting:
    """A grammar with terminals in place of its rules."""

    def __init__(self, grammar: str, quotes: bool) -> None:
        """`quotes`: its texts become what JSON writes for them. Raises ValueError."""
        self._quotes = quotes
        self._parts: dict[str, set[str]] = {}
        """Names that each rule is made of."""
        self._head: set[str] = set()
        self._ignores = self.has_escapes = False
        """Whether there is anything that JSON writes otherwise."""
        self.text = _TOKEN.sub(self._rewritten, grammar)

    @property
    def is_regular(self) -> bool:
        """Whether no rule contains itself, and nothing may stand anywhere."""
        try:
            TopologicalSorter(self._parts).prepare()
        except CycleError:
            return False
        return not self._ignores

    def term(self) -> str:
        """The term of the grammar's texts."""
        return _nested(f"start: {_START}\n{self.text}")

    def _rewritten(self, found: re.Match[str]) -> str:
        kind, token = found.lastgroup, found[0]
        if kind == "comment":
            return ""
        if kind == "ignore":
            self._ignores = True
            return token
        if kind == "head":
            self._head = self._parts.setdefault(_terminal(found["head"]), set())
            return f"{_terminal(found['head'])}:"
        if kind == "word":
            if token == "i":  # of the literal before it
                return token
            self._head.add(_terminal(token))
            return _terminal(token)
        if kind == "open":
            raise ValueError(f"{token[:80]}: has no end")
        if kind == "other":
            raise ValueError(f"{token}: cannot be used in the grammar of a tool's text")
        return self._quoted(found) if self._quotes else self._plain(found)

    def _plain(self, found: re.Match[str]) -> str:
        name, common = found["name"], found["common"]
        return f"%import common.{common}" + (f" -> {name}" if name else "") if common else found[0]

    def _quoted(self, found: re.Match[str]) -> str:
        kind, token = found.lastgroup, found[0]
        if kind == "text":
            text = _text(token)
            written = json.dumps(text, ensure_ascii=False)[1:-1]
            self.has_escapes = self.has_escapes or written != text
            return json.dumps(written, ensure_ascii=False)
        if kind == "range":
            first, last = (re.escape(_text(end.strip())) for end in token.split("..", 1))
            return f"/{self._quoted_regex(f'[{first}-{last}]', False)}/"
        if kind == "flags":
            if "x" in found["flags"]:
                raise ValueError(f"{token[:80]}: must not have the flag x")
            return f"/{self._quoted_regex(found['regex'], 's' in found['flags'])}/{found['flags']}"
        regex = _COMMON.get(found["common"])
        return token if regex is None else f"{found['name'] or found['common']}: /{self._quoted_regex(regex, False)}/"

    def _quoted_regex(self, regex: str, dot_all: bool) -> str:
        if re.search(r"\(\?[a-z]*x", regex):
            raise ValueError(f"/{regex[:80]}/: must not have the flag x")
        flags = re.ASCII  # of whose blanks there are as many as in the library's dialect
        if dot_all or re.search(r"\(\?[a-z]*s", regex):
            flags |= re.DOTALL
        written = ATOM.sub(lambda found: found[0] if found["operator"] else _quoted_atom(found[0], flags), regex)
        self.has_escapes = self.has_escapes or written != regex
        return written


@lru_cache(1024)
def _quoted_atom(atom: str, flags: re.RegexFlag) -> str:
    """The expression for one character as one for all that JSON writes for it. Raises ValueError."""
    if re.search(r"\\[pP]|(?<!^)\[|&&|--|~~", re.sub(r"\\[^pP]", "", atom)):
        raise ValueError(f"{atom[:80]}: cannot be used in the grammar of a text that stands inside of JSON")
    try:
        own = re.compile(re.sub(r"\\x\{(\w+)\}", lambda code: re.escape(chr(int(code[1], 16))), atom), flags)
    except (re.error, ValueError, OverflowError) as error:
        raise ValueError(f"{atom[:80]}: {error}") from None
    written = [written for char, written in _WRITTEN.items() if own.fullmatch(char)]
    if not written:
        return atom
    short = "".join("\\\\" if each == "\\" else each for each in written if len(each) == 1)
    codes = "|".join(each[3:] for each in written if len(each) > 1)
    after = "|".join([*([f"[{short}]"] if short else []), *([f"u00(?:{codes})"] if codes else [])])
    choices = [rf"(?-i:\\(?:{after}))"]
    if own.search(_PLAIN):
        choices.append(_OTHERS if atom == "." else f"[{atom}&&{_OTHERS}]")
    return f"(?:{'|'.join(choices)})"


def _terminal(name: str) -> str:
    return f"RULE_{name.upper()}" if name != name.upper() else name


def _text(token: str) -> str:
    """The text that a literal of a grammar means."""
    try:
        return str(json.loads(re.sub(r"\\x(..)", r"\\u00\1", token), strict=False))
    except ValueError:
        raise ValueError(f"{token[:80]}: is no text") from None
