"""From a constraint's text to a matcher of llguidance, in the engine's process and in the one that checks it before."""

import re
from typing import Any

from nanovllm.engine.sampling.grammar_limits import JSON_BLANKS, check_masks, check_text, failure

_JSON_DEFAULTS: Any = {"whitespace_pattern": JSON_BLANKS}
"""A schema's own "x-guidance" entry wins over this."""
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
"""A rule's head in llama.cpp's form of a grammar; Lark has none such."""
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
                return start
        raise ValueError(slow)

    def compile(self, kind: str, text: str) -> Any:
        """The matcher at the start of a constraint. Raises ValueError."""
        if kind == "grammar" and _GBNF_RULE.search(text):
            text = _lark_of_gbnf(text)
        check_text(kind, text)
        library = self.library.LLMatcher
        if kind in ("json", "json_object"):
            form = library.grammar_from_json_schema(text, defaults=_JSON_DEFAULTS)
        else:
            form = library.grammar_from_lark(text) if kind == "grammar" else library.grammar_from_regex(text)
        # Its errors become the matcher's `error`.
        start = library(self._tokenizer, form, log_level=0, limits=self._limits)
        if start.is_error():
            raise ValueError(failure(start))
        return start


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
