"""Tool calls in a family's form (families.py): the grammar that an answer is held to, and their reader."""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from nanovllm.engine.sampling.grammar_compiler import literal, regex_term
from nanovllm.serve.parsers.families import CallForm, Slot
from nanovllm.serve.parsers.reader import Malformed, Output, Source, Steps, ends_in_string
from nanovllm.serve.parsers.tags import Tag, Tags
from nanovllm.serve.parsers.text_bounds import ANYTHING
from nanovllm.serve.parsers.tools import Tool, json_term
from nanovllm.serve.parsers.values import BLANKS, INITIALS, as_json

MAX_CALLS = 128
_WORD = re.compile(r"[A-Za-z0-9_.-]*")
_OTHER_NAME = r'/[^<>"\n]{1,64}/'
"""Names of parameters that no schema names."""
_LONG = 1000
"""Characters of a text in all of which the library can look for the text's end."""
_EARLY_END = 64
"""Characters of a text that may be longer in which its end cannot stand. Behind them it is the end where the text may
end there."""
_REST = r"(~/[^\s\S]/)"
"""Any bytes, as a term: behind the beginning of what is excluded, so that the library sees at once that nothing is
left. Where it must try the texts of a long bound to find that out, it gives up, and the answer ends with an error."""
_FIXED = {Slot.ID: "/[A-Za-z0-9]{9}/", Slot.NUMBER: "/[0-9]{1,4}/"}
_FIXED |= {Slot.BLANK: "/ ?/", Slot.BREAK: r"/\n?/", Slot.BREAKS: r"/\n{0,2}/"}
_SCALARS = {
    "boolean": "true|false",
    "integer": "-?(?:0|[1-9][0-9]*)",
    "number": r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
}

Piece = str | Tag | Slot
"""Piece of a form: a text, a tag or a slot."""
Beside = dict[str, tuple[str, list[str]]]
"""Terms for arguments, and the rules that these need, by their schemas."""


class ToolFamily:
    """A family's form of calls, in one tokenizer's tags."""

    arguments_begin = "{"

    def __init__(self, form: CallForm, tags: Tags) -> None:
        self.marks = tuple(tags[name] for name in form.tags)
        self.opening, self.is_tagged = self.marks[0], form.is_tagged
        self._bare, self._value_begin = form.bare, form.value_begin
        known: dict[str, Piece] = {f"{{{slot.value}}}": slot for slot in Slot}
        known |= {tag.name: tag for tag in self.marks}
        cuts = re.compile(f"({'|'.join(map(re.escape, known))})")

        def cut(text: str) -> list[Piece]:
            return [known.get(part, part) for part in cuts.split(text) if part]

        self._call, self._first, self._last, self._between = map(cut, (form.call, form.first, form.last, form.between))
        named = f'{{"name": "{{name}}", "{form.arguments}": {{arguments}}}}'
        before, _, rest = form.call.replace("{call}", named).partition("{name}")
        middle, _, after = rest.partition("{parameters}" if form.parameter else "{arguments}")
        self._before, self._middle, self._after = map(cut, (before, middle, after))
        """Pieces before the name, between it and the arguments, and after these."""
        key, _, rest = form.parameter.partition("{value}")
        begin, _, end = key.partition("{key}")
        self._key_begin, self._key_end, self._value_end = map(cut, (begin, end, rest))
        """Pieces before a parameter's name, behind it and behind its value; the first one ends name or value."""
        self._separator = "".join(piece for piece in self._between if isinstance(piece, str)).strip()

    # -- grammar ------------------------------------------------------------------------------------------------

    def grammar(self, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        """Lark rules, `body` among them: calls of `tools`, one or more; `free` True: or any TEXT (a terminal that is
        there), which may also come before calls where the family's models write it so. `early` is a text with calls
        behind it, where these begin with a tag."""
        terminals = dict[str, str]()
        more = f"({_terms(self._between)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
        beside: Beside = {}
        functions = [self._function_term(tool, terminals, beside) for tool in tools]
        breaks = [piece for piece in self._between if piece is Slot.BREAKS]  # which also end a turn, as with Nemotron 3
        rules = [
            self._body(free),
            f"calls: {_terms(self._first)} call {more} {_terms([*self._last, *breaks])}",
            f"call: {_terms(self._before)} function {_terms(self._after)}",
            one_of("function", [f"({each})" for each in functions]),  # so that errors name the line of theirs
            *(rule for _, found in beside.values() for rule in found),
            *(f"{name.upper()}: {expression}" for expression, name in terminals.items()),
            *(f"{name}[lazy]: {name.upper()}" for name in terminals.values() if name.islower()),
        ]
        return "\n".join([*rules, self._words()] if self._value_end else rules)

    def _body(self, free: bool) -> str:
        tag = self.opening
        if not self.is_tagged:
            words = rf'"" | /[^{re.escape(self._bare)}](.|\n)*/ | ' if free else ""
            return f"body: {words}{tag.lark}? calls"
        body = "TEXT | early" if free else f"{tag.lark} calls"
        return f"body: {body}\nearly: opened calls\n{tag.text_before('opened')}"

    def _arguments(self, tool: Tool, terminals: dict[str, str], beside: Beside) -> str:
        """The arguments of a call, where they are one text, as a term; `beside` gains the rules that it needs."""
        return tool.arguments

    def _function_term(self, tool: Tool, terminals: dict[str, str], beside: Beside) -> str:
        if not self._value_end:
            arguments = self._arguments(tool, terminals, beside)
        else:
            arguments = self._parameters(tool if tool.is_held else Tool(tool.name, {}), terminals)
        return f"{json.dumps(tool.name)} {_terms(self._middle)} {arguments}"

    def _parameters(self, tool: Tool, terminals: dict[str, str]) -> str:
        """A tool's parameters, in the schema's order; those that are not required may be left out. After them come
        others, where the schema has any. `terminals`: names of the terminals in use, by their expressions; in small
        letters where the first text that matches is taken."""
        named, required, others = tool.document.parameters
        terms = []
        for name, value in named.items():
            if (end := _text(self._key_end[0])) in name:
                raise ValueError(f"tools: function {tool.name!r} has a parameter whose name has {end!r} in it")
            term = self._parameter(json.dumps(name), value, tool, terminals)
            terms.append(term if name in required else f"({term})?")
        if others is not False:
            name = terminals.setdefault(any_but(_OTHER_NAME, named), f"T{len(terminals)}")
            terms.append(f"({self._parameter(name, others, tool, terminals)}){{0,64}}")
        return " ".join(terms) or '""'

    def _parameter(self, name: str, value: Any, tool: Tool, terminals: dict[str, str]) -> str:
        before, after = _terms(self._key_begin), _terms(self._value_end[1:])
        return f"{before} {name} {_terms(self._key_end)} {self._value(value, tool, terminals)} {after}"

    def _value(self, value: Any, tool: Tool, terminals: dict[str, str]) -> str:
        """A parameter's value with its end, or the rule `words`, which has it, too."""
        begin, end = _terms([self._value_begin]), _terms(self._value_end[:1])
        if tool.text_grammar is not None:
            return f"{begin} {tool.text_term(end)}"
        document = tool.document
        types = document.types(value)
        others = types - {"string", "null"}

        def as_value() -> str:  # not asked for where a value is a text alone, as most are
            whole = document.alone(value)
            if "string" in types:
                whole["type"] = sorted(others)
            return f"{json_term(whole, lenient=not tool.strict)} {end}"

        if "string" not in types:
            return f"{begin} {as_value()}"
        text = tool.text_bound(value)
        if text is None and (not others or document.is_free(value)):
            return "words"
        if text is not None and "null" in types:
            text = f'({text}) | "null"'
        if not others and not {"&", "/"} & {*str(text)}:
            return f"{begin} ({text}) {end}"  # one of a few texts
        expression, after = self._text_expression(text, others)
        name = terminals.setdefault(expression, f"{'T' if after else 't'}{len(terminals)}")
        return f"{begin} ({name} {after}" + (f" | {as_value()})" if others else ")")

    def _text_expression(self, text: str | None, others: frozenset[str]) -> tuple[str, str]:
        """The expression of a terminal for a value's text, and what comes after it. Ends that are texts are a part of
        it, once, so that nothing goes on behind them; and what would be read as JSON of the types `others` is none."""
        last, after = self._value_end[0], _terms(self._value_end[:1])
        is_token = isinstance(last, Tag) and last.token_id is not None
        end = _text(last)
        expression = regex_term(ANYTHING)
        if scalars := "|".join(_SCALARS[each] for each in sorted(others & _SCALARS.keys())):
            expression += f" & ~{regex_term(f'[{BLANKS}]*(?:{scalars})[{BLANKS}]*')}"
            expression += "" if is_token else f" & ~({regex_term(f'(?:{scalars}){literal(end[0])}')} {_REST})"
        if nested := "".join(INITIALS[each] for each in sorted(others - _SCALARS.keys())):
            expression += f" & ~({regex_term(f'[{BLANKS}]*[{re.escape(nested)}]')} {_REST})"
        expression = f"({expression})" + (f" & ({text})" if text else "")
        if is_token:
            return expression, after
        is_long = any(int(count) > _LONG for count in re.findall(r",(\d+)\}", text or ""))
        before = rf"(?:.|\n){{0,{_EARLY_END}}}" if is_long else ANYTHING
        at_once = literal(end.removeprefix(self._value_begin))  # which ends an empty text
        early = regex_term(rf"(?:{before}{literal(end)}|{at_once})(?:.|\n)")
        return f"(({expression}) {after}) & ~({early} {_REST})", ""

    def _words(self) -> str:
        """The rule for any text as a value."""
        end, begin = self._value_end[0], self._value_begin
        if isinstance(end, Tag):
            return end.text_before("words")
        text = f"{begin}((.|\n)*{begin})?" if begin else "(.|\n)*"
        return f"words[lazy]: {regex_term(text + _text(end).removeprefix(begin))}"

    # -- reading ------------------------------------------------------------------------------------------------

    def read(self, tools: Sequence[Tool], source: Source, output: Output, around: Sequence[str] = ()) -> Steps:
        """Reads content and calls up to the end of the text. around: tags before and behind the content."""
        tag, bare, has_words, around = self.opening.text, self._bare, False, [*around]

        def emit(text: str) -> None:
            nonlocal has_words
            has_words = has_words or bool(text.strip())
            output.text(text)

        while found := (yield from source.until([one for one in (tag, bare, *around[:1]) if one], emit)):
            if found in around:
                output.begin("content", strips=True)
                around.remove(found)
                continue
            if found != tag:
                source.text, found = found + source.text, ""
            num_calls = output.num_calls
            yield from self.read_opened(tools, found, has_words and not found, source, output)
            if self._separator and output.num_calls > num_calls and output.calls_complete:
                yield from source.blanks()
                if source.text.startswith(self._separator):
                    source.text = source.text[len(self._separator) :]
                    yield from source.blanks()

    def read_opened(
        self, tools: Sequence[Tool], tag_text: str, keeps_cut: bool, source: Source, output: Output
    ) -> Steps:
        """Reads the calls behind a tag; content follows. What turns out to be none is text, from its tag on. A call
        that the output's end cuts off before its name is nothing, or, with `keeps_cut`, text."""
        num_calls, source.taken = output.num_calls, tag_text
        try:
            yield from self._read_calls(tools, source, output)
            output.begin("content", strips=True)
        except Malformed:
            if output.num_calls == num_calls and source.taken and (source.text or not source.ended or keeps_cut):
                output.text(source.taken)
        source.taken = None

    def _read_calls(self, tools: Sequence[Tool], source: Source, output: Output) -> Steps:
        yield from self._pass_over(self._first, source)
        yield from self._read_call(tools, source, output)
        last = [piece for piece in self._last if not isinstance(piece, Slot)]
        while last:
            end, next_one = _text(last[0]), self._separator or _text(self._call[0])
            if (yield from source.expect(end, next_one, takes=False)) == end:
                yield from self._pass_over(last, source)
                return
            source.take(len(self._separator))
            yield from self._read_call(tools, source, output)

    def _read_call(self, tools: Sequence[Tool], source: Source, output: Output) -> Steps:
        """A call begins for the client once the text behind its name is there, or a parameter, or the end of them."""
        name: Any = None
        num_calls, known = output.num_calls, {tool.name: tool for tool in tools}
        for piece in self._call:
            if piece is Slot.CALL:
                yield from _read_object(known, source, output)
            elif piece is Slot.NAME:
                yield from source.blanks()
                name = yield from source.matching(_WORD)
            elif piece in (Slot.ID, Slot.NUMBER):
                yield from source.matching(_WORD)
            elif piece is Slot.ARGUMENTS:
                if output.num_calls == num_calls:
                    yield from source.expect(self.arguments_begin, takes=False)
                    _begin_call(name, known, source, output)
                yield from self._read_arguments(source, output)
                output.calls_complete = True
            elif piece is Slot.PARAMETERS:
                begin, end = _text(self._key_begin[0]), _text(self._after[0]).strip()
                if output.num_calls == num_calls:
                    yield from source.expect(begin, end, takes=False)
                    _begin_call(name, known, source, output)
                yield from self._read_parameters(known[name], begin, end, source, output)
            else:
                yield from self._pass_over([piece], source)
                if name is not None and not isinstance(piece, Slot) and output.num_calls == num_calls:
                    _begin_call(name, known, source, output)

    def _read_arguments(self, source: Source, output: Output) -> Steps:
        yield from source.value(output.arguments)

    def _read_parameters(self, tool: Tool, begin: str, end: str, source: Source, output: Output) -> Steps:
        """Reads parameters as one JSON object, each from `begin` on, up to `end`."""
        named, _, others = tool.document.parameters
        behind_key, opening = _text(self._key_end[0]), "{"
        while (yield from source.expect(begin, end, takes=False)) == begin:
            source.take(len(begin))
            pieces: list[str] = []
            found = yield from source.until([behind_key], pieces.append)
            key = "".join(pieces)
            key = key if key in named else key.strip()
            if not found:
                output.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)[:-1]}")
                raise Malformed
            output.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            yield from self._pass_over(self._key_end[1:], source)
            yield from self._read_value(tool, named.get(key, others or {}), source, output)
        output.arguments("}" if opening == ", " else "{}")
        output.calls_complete = True

    def _read_value(self, tool: Tool, schema: Any, source: Source, output: Output) -> Steps:
        """Reads a value, and its end. It is a text once it can be nothing else; what the output's end cuts off is left
        as it is."""
        end, begin = _text(self._value_end[0]), self._value_begin
        types, is_free = tool.document.types(schema), tool.document.is_free(schema)
        initials = "".join(INITIALS[each] for each in types - {"string"})
        held, is_text = list[str](), None if "string" in types else False

        def emit(text: str) -> None:
            nonlocal is_text
            if not is_text:
                held.append(text)
                first = "".join(held).lstrip(BLANKS)[:1] if is_text is None else ""
                if first:
                    is_text = first not in initials
                if not is_text:
                    return
                output.arguments('"')
                text = "".join(held).removeprefix(begin)
            output.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

        while (yield from source.until([end], emit)):
            value = "".join(held)
            if is_text or (is_free and "string" in types) or not ends_in_string(value):
                break
            held.append(end)
        else:
            output.arguments("" if is_text else "".join(held).strip(BLANKS))
            raise Malformed
        output.arguments('"' if is_text else as_json(value, types, begin))

    def _pass_over(self, pieces: Sequence[Piece], source: Source) -> Steps:
        """Takes texts and tags, and blanks before them. Raises Malformed where something else comes."""
        for piece in pieces:
            if not isinstance(piece, Slot):
                yield from source.expect(_text(piece).strip())


def _terms(pieces: Sequence[Piece]) -> str:
    """Pieces as terms of a grammar."""
    return " ".join(
        _FIXED[piece] if isinstance(piece, Slot) else piece.lark if isinstance(piece, Tag) else json.dumps(piece)
        for piece in pieces
        if piece
    )


def _text(piece: Piece) -> str:
    """A text of the form, or of a tag, as a reader sees it."""
    assert not isinstance(piece, Slot)
    return piece.text if isinstance(piece, Tag) else piece


def any_but(term: str, names: Collection[str]) -> str:
    """The term of all that a term admits, but for these names."""
    return term + (f" & ~({' | '.join(map(json.dumps, names))})" if names else "")


def one_of(rule: str, terms: list[str]) -> str:
    return f"{rule}: " + "\n  | ".join(terms)


def _begin_call(name: str, known: Collection[str], source: Source, output: Output) -> None:
    """Raises Malformed where no tool has this name."""
    if name not in known:
        raise Malformed
    output.call(name)
    source.taken = None


def _read_object(known: Collection[str], source: Source, output: Output) -> Steps:
    """Reads {"name": ..., "arguments": ...} or "parameters". Raises Malformed where it is none."""
    yield from source.expect("{")
    named, has_arguments, early = False, False, list[str]()
    while True:
        key = yield from source.string()
        yield from source.expect(":")
        if key == "name" and not named:
            _begin_call((yield from source.string()), known, source, output)
            output.arguments("".join(early))
            named = True
        elif key in ("arguments", "parameters") and not has_arguments:
            yield from source.value(output.arguments if named else early.append)
            has_arguments = True
        else:
            yield from source.value(lambda _: None)
        if (yield from source.expect(",", "}")) == "}":
            break
    if not named:
        raise Malformed
    output.arguments("" if has_arguments else "{}")
    output.calls_complete = True
