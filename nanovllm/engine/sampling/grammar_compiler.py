"""Compilation of constraints by llguidance, in the engine's process and in the one that checks them before."""

import json
import re
from typing import Any

from nanovllm.engine.sampling.grammar_limits import (
    JSON_BLANKS,
    UNSATISFIABLE,
    check_masks,
    check_text,
    failure,
    schemas_of,
)
from nanovllm.engine.sampling.schema_repairs import check_patterns, move_bounds, widen_bounds

_JSON_DEFAULTS: Any = {"whitespace_pattern": JSON_BLANKS}
"""A schema's own "x-guidance" entry wins over this."""
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
"""A rule's head in llama.cpp's form of a grammar; Lark has none such."""
_IN_LARK = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
"""Characters of a regular expression, also escaped ones, that a Lark grammar writes otherwise."""
_TRIES = 2
_STEP_FUEL = 100_000
"""The library's measure of the work that one mask may take: about 7 ms. Its own default is twice that."""
_MAX_STATES = 150_000
"""Maximum states of one grammar's lexer, which all its outputs share: about 45 MB. More than the longest choice has
bytes."""


class GrammarCompiler:
    """llguidance, for one tokenizer. From any thread."""

    def __init__(self, form: str, size: int, ends: list[int] | None) -> None:
        """`form`: tokenizer.json. `size`: tokens of the vocabulary. `ends`: its ids that end a text. Raises ImportError
        where the library is missing, and what it raises where it cannot read the tokenizer."""
        import llguidance

        self.library = llguidance
        self._ends = frozenset(ends or ())
        self._limits = llguidance.LLParserLimits(step_lexer_fuel=_STEP_FUEL, max_lexer_states=_MAX_STATES)
        self._tokenizer = llguidance.LLTokenizer(form, n_vocab=size, eos_token=ends)

    def check(self, kind: str, text: str) -> Any:
        """The matcher at the start of a constraint whose first masks were timed. Raises ValueError as `compile`, and
        where masks take too long, twice: a page that is touched for the first time takes long, too."""
        for _ in range(_TRIES):
            start = self.compile(kind, text)
            slow = check_masks(start.deep_copy(), self._ends)
            if slow is None:
                break
        else:
            raise ValueError(slow)
        for _, _, schema in schemas_of(kind, text) if "patternProperties" in text else ():
            check_patterns(schema, self._is_empty)
        return start

    def compile(self, kind: str, text: str) -> Any:
        """The matcher at the start of a constraint. Raises ValueError."""
        if kind == "grammar" and _GBNF_RULE.search(text):
            text = _lark_of_gbnf(text)
        check_text(kind, text)
        if "exclusive" in text or "multipleOf" in text:
            text = _with_moved_bounds(kind, text)
        library = self.library.LLMatcher
        if kind in ("json", "json_object"):
            form = library.grammar_from_json_schema(text, defaults=_JSON_DEFAULTS)
        else:
            form = library.grammar_from_lark(text) if kind == "grammar" else library.grammar_from_regex(text)
        start = self._start(form)
        if start.is_error():
            raise ValueError(failure(start))
        return start

    def _start(self, form: str) -> Any:
        """A matcher; errors become its `error`."""
        return self.library.LLMatcher(self._tokenizer, form, log_level=0, limits=self._limits)

    def _is_empty(self, pattern: str, texts: frozenset[str]) -> bool:
        """Whether an expression of a JSON schema has no other texts than these."""
        outside = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", pattern, flags=re.DOTALL)
        while (shorter := re.sub(r"\([^()]*\)", "", outside)) != outside:
            outside = shorter
        if "|" in outside:  # of which each part has its own ends
            return False
        head = "" if pattern.startswith("^") else r"[\s\S]*"
        tail = "" if pattern.endswith("$") else r"[\s\S]*"
        term = regex_term(f"{head}({pattern.removeprefix('^').removesuffix('$')}){tail}")
        others = regex_term("|".join(map(literal, sorted(texts))))
        start = self._start(self.library.LLMatcher.grammar_from_lark(f"start: KEY\nKEY: {term} & ~{others}"))
        if start.is_error():  # the library does not take it in this form
            return False
        start.compute_bitmask()
        return bool(start.is_error()) and failure(start) == UNSATISFIABLE


def _with_moved_bounds(kind: str, text: str) -> str:
    """A constraint with the bounds of its JSON schemas as the library takes them."""
    for begin, end, schema in reversed(schemas_of(kind, text)):
        before = json.dumps(schema)
        move_bounds(schema)
        widen_bounds(schema)
        if (after := json.dumps(schema)) != before:
            text = text[:begin] + after + text[end:]
    return text


def regex_term(regex: str) -> str:
    """A regular expression as a term of a Lark grammar."""
    return "/" + re.sub(r"\\.|[/\n]", lambda found: _IN_LARK.get(found[0], found[0]), regex, flags=re.DOTALL) + "/"


def literal(text: str) -> str:
    """A regular expression for exactly `text`; Rust's dialect takes escapes of ASCII punctuation only."""
    escaped = re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", text)
    return escaped.replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")


def _lark_of_gbnf(grammar: str) -> str:
    """The Lark grammar of one in GBNF. Raises ValueError, or another error that says what is wrong."""
    check_text("gbnf", grammar)
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        return gbnf_to_lark(grammar)
    except RecursionError:
        raise ValueError("its groups nest too deep") from None
    except IndexError:
        raise ValueError("it ends within an escape") from None
