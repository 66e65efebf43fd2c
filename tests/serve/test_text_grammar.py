"""Custom tools: their text is held to its grammar in every family's calls, and read back as it was."""

import json
import random
import re
from typing import Any

import llguidance
import pytest
from parsing import Message, Model, message_of

from nanovllm.serve.parsers import check_tools
from nanovllm.serve.parsers.text_grammar import in_json, lark_of

PATCH = r"""
start: begin hunk+ end?
begin: "*** Begin" LF   // of all
?end: "*** End" LF
hunk: add | ("*** Delete " NAME LF) -> delete
add.2: "*** Add " NAME LF (("+" | "-") /(.*)/ LF -> line)+
NAME: /[^\/\n]+/i ("a".."z")
%import common.LF
"""
SUM = r"""
start: one (" + " one)*
one: INT | "(" start ")"
%import common.INT
"""
ANYTHING = lark_of({"syntax": "regex", "definition": r"[\s\S]{1,40}"})
TEXTS = {
    PATCH: [
        '*** Begin\n*** Add a "b".py\n+print("\\n")\t# ü 🐱\n-\n*** Delete a\\b\n*** End\n',
        "*** Begin\n*** Delete <parameter>x\n",
    ],
    SUM: ["1", "(1 + 22) + 3"],
    ANYTHING: ['"', "\n", "\\n\r\n\t", "\x01\x1f\x7f", "</arg", "ü/"],
}
OTHERS = {
    PATCH: ["", "*** Begin\n", "x", "*** Begin\n*** Delete a/b\n", "*** Begin\n*** Delete B\n"],
    SUM: ["(1", "1 +"],
    ANYTHING: ["", "a" * 41, "\n" * 41],
}


def tools_of(grammar: str) -> tuple[list[dict[str, object]], dict[str, str]]:
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function = {"name": "edit", "parameters": {**schema, "additionalProperties": False}}
    return [{"type": "function", "function": function}], {"edit": grammar}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("grammar", TEXTS, ids=["regular", "recursive", "anything"])
def test_a_text_is_held_to_its_grammar(model: Model, grammar: str, choice: str) -> None:
    tools, grammars = tools_of(grammar)
    syntax = model.parser.syntax("", check_tools(tools, choice, text_grammars=grammars))
    for text in TEXTS[grammar]:
        message, written = call_of(model, text)
        assert model.admits(syntax, written), text
        assert message_of(model.read(syntax, written)) == message
    for text in OTHERS[grammar]:
        assert not model.admits(syntax, call_of(model, text)[1]), text


def call_of(model: Model, text: str) -> tuple[Message, str]:
    """A call with this text, and how a model writes it: where Python's texts may have two kinds of quotes, in those of
    JSON, to which the grammar holds it."""
    message = Message(calls=[("edit", {"input": text})])
    is_pythonic = model.family in ("lfm2", "llama4_pythonic")
    written = model.write(message)
    return message, written.replace(repr(text), json.dumps(text, ensure_ascii=False)) if is_pythonic else written


def admitted(library: Any, grammar: str, text: str) -> bool:
    """Whether a grammar over single bytes admits a text."""
    matcher = llguidance.LLMatcher(library, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = library.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("seed", range(8))
def test_json_writes_what_the_grammar_of_a_text_admits(seed: int) -> None:
    """An expression, and the one of what JSON writes for its texts, agree on every text."""
    library, rng = llguidance.LLTokenizer("byte"), random.Random(seed)
    atoms = ["a", r"\n", r"\\", '"', "/", ".", r"\s", r"\S", r"[^a\n]", r'[\\"b-d]', r"[^\]]", r"\x0a", r"\x{1f}", "é"]
    alphabet = ["a", "b", "\n", "\\", '"', "/", "\t", "\x1f", "é", "]", " "]
    for _ in range(12):
        parts = [rng.choice(atoms) + rng.choice(["", "", "*", "?", "{1,2}"]) for _ in range(rng.randint(1, 4))]
        regex = "|".join(("".join(parts), "".join(parts[1:]) or "b"))
        grammar = lark_of({"syntax": "regex", "definition": regex})
        for _ in range(12):
            text = "".join(rng.choices(alphabet, k=rng.randint(0, 5)))
            written = json.dumps(text, ensure_ascii=False)[1:-1]
            as_json = admitted(library, f"start: {in_json(grammar)}", written)
            assert as_json == admitted(library, grammar, text), (regex, text)


@pytest.mark.parametrize("text", ["a\nb", "\n\n", "\\\n/", "\t \r-~#&", "/\\/", "(a|b)\n"])
def test_what_python_escapes_is_the_text_itself(text: str) -> None:
    grammar = lark_of({"syntax": "regex", "definition": re.escape(text)})
    library = llguidance.LLTokenizer("byte")
    assert admitted(library, grammar, text)
    assert admitted(library, f"start: {in_json(grammar)}", json.dumps(text)[1:-1])


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start? ")" /.*/', 'start: /a b/\n%ignore /\\s+/', "start: %json {}", "start: <think>",
        "start: ~/a/", "start: /a b/x", r"start: /\p{L}/", r"start: /[[a-z]&&[^b]]/", r"start: /(?x: a)/",
        r"start: /\q/", 'start: "a\\"', "start: /a",
    ],
)  # fmt: skip
def test_what_json_cannot_hold_to_is_refused(grammar: str) -> None:
    tools, grammars = tools_of(grammar)
    choice = check_tools(tools, text_grammars=grammars)
    assert choice is not None
    with pytest.raises(ValueError, match="tools: the format of 'edit': "):
        choice.tools[0].arguments  # noqa: B018


@pytest.mark.parametrize(
    "form",
    [{}, {"syntax": "lark"}, {"syntax": "ebnf", "definition": "a"}, {"syntax": "regex", "definition": "a" * 20_000}],
)
def test_formats_that_are_none(form: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"must have the syntax|at most 16384"):
        lark_of(form)
