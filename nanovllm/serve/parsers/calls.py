"""Tool calls as one family of models writes them: their grammar, and their reader, from the family's form."""

import json
import re
from collections.abc import Sequence
from enum import Enum
from typing import Any

from nanovllm.serve.parsers.families import CallForm
from nanovllm.serve.parsers.reader import Malformed, Output, Source, Steps, is_whole
from nanovllm.serve.parsers.tags import Tag, Tags
from nanovllm.serve.parsers.tools import Tool
from nanovllm.serve.parsers.values import as_json, is_words, resolved, value_term

MAX_CALLS = 128
_WORD = re.compile(r"[A-Za-z0-9_.-]*")
_KEY = "[A-Za-z0-9_.-]{1,64}"


class Slot(Enum):
    """Slot of a form (see CallForm)."""

    NAME, ARGUMENTS, PARAMETERS, KEY, VALUE, CALL = "name", "arguments", "parameters", "key", "value", "call"
    BLANK, BREAK, BREAKS = "blank", "break", "breaks"


Piece = str | Tag | Slot
_BLANKS = {Slot.BLANK: "/ ?/", Slot.BREAK: r"/\n?/", Slot.BREAKS: r"/\n{0,2}/"}


class ToolFamily:
    """A family's form of calls, in one tokenizer's tags."""

    def __init__(self, form: CallForm, tags: Tags) -> None:
        self._form = form
        self.marks = tuple(tags[name] for name in form.tags)
        self._opening = self.marks[0]
        self._call, self._first, self._last = map(self._pieces, (form.call, form.first, form.last))
        self._between = self._pieces(form.between)
        self._separator = "".join(piece for piece in self._between if isinstance(piece, str)).strip()
        as_object = f'{{"name": "{{name}}", "{form.arguments}": {{arguments}}}}'
        written = self._pieces(form.call.replace("{call}", as_object))
        begin = written.index(Slot.NAME)
        end = 1 + next(at for at, piece in enumerate(written) if piece in (Slot.ARGUMENTS, Slot.PARAMETERS))
        self._before, self._function, self._after = written[:begin], written[begin:end], written[end:]
        parameter = self._pieces(form.parameter)
        end = 1 + parameter.index(Slot.VALUE) if parameter else 0
        self._key, self._value_end, self._tail = parameter[: end - 1], parameter[end : end + 1], parameter[end + 1 :]

    def _pieces(self, text: str) -> list[Piece]:
        """A text of the form, cut into slots, tags and what is between them."""
        known: dict[str, Piece] = {f"{{{slot.value}}}": slot for slot in Slot}
        known.update(zip(self._form.tags, self.marks, strict=True))
        return [known.get(part, part) for part in re.split(f"({'|'.join(map(re.escape, known))})", text) if part]

    # -- grammar ------------------------------------------------------------------------------------------------

    def grammar(self, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        """Lark rules, `body` among them: calls of `tools`, one or more; `free` True: or any TEXT (a terminal that is
        there), which may also come before calls where the family's models write it so."""
        more = f"({_terms(self._between)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
        rules = [
            self._body(free),
            f"calls: {_terms(self._first)} call {more} {_terms(self._last)}",
            f"call: {_terms(self._before)} function {_terms(self._after)}",
            one_of("function", [self._function_term(tool) for tool in tools]),
        ]
        if self._form.parameter:
            rules += [f"any: {_terms(self._key, key=f'/{_KEY}/')} words {_terms(self._tail)}", self._words()]
        return "\n".join(rules)

    def _body(self, free: bool) -> str:
        tag = self._opening
        if not self._form.is_tagged:
            words = rf'"" | /[^{self._form.bare}](.|\n)*/ | ' if free else ""
            return f"body: {words}{tag.lark}? calls"
        if not free:
            return f"body: {tag.lark} calls"
        if tag.token_id is not None:
            return f"body: TEXT ({tag.lark} calls)?"
        return f"body: TEXT | opened calls\nopened[lazy]: TEXT {tag.lark}"

    def _function_term(self, tool: Tool) -> str:
        arguments = self._parameters(tool) if self._form.parameter else tool.arguments()
        return _terms(self._function, name=json.dumps(tool.name), arguments=arguments, parameters=arguments)

    def _parameters(self, tool: Tool) -> str:
        """A tool's parameters, in the schema's order; those that are not required may be left out. One that no schema
        names is the rule `any`."""
        schema = tool.parameters
        properties = schema.get("properties") or {}
        if tool.strict is False or not properties:
            closed = not properties and schema.get("additionalProperties") is False
            return '""' if closed and tool.strict is not False else "any{0,64}"
        terms = []
        for name, value in properties.items():
            if not re.fullmatch(_KEY, name):
                raise ValueError(f"tools: function {tool.name!r} has a parameter whose name is not {_KEY}")
            term = f"{_terms(self._key, key=json.dumps(name))} {self._value(value, tool)} {_terms(self._tail)}"
            terms.append(term if name in (schema.get("required") or ()) else f"({term})?")
        return " ".join(terms)

    def _value(self, value: Any, tool: Tool) -> str:
        """A parameter's value with its end, or the rule `words`, which has it, too."""
        begin, end = _terms([self._form.value_begin]), _terms(self._value_end)
        if tool.text_grammar is not None:
            return f"{begin} {tool.text_term(end)}"
        term = value_term(value, tool)
        return "words" if term is None else f"{begin} {term} {end}"

    def _words(self) -> str:
        """The rule for any text as a value."""
        [end] = self._value_end
        if isinstance(end, Tag) and end.token_id is not None:
            return f"words: TEXT {end.lark}"
        begin = self._form.value_begin
        rest = _text(end).removeprefix(begin).replace("/", r"\/")
        text = f"{begin}((.|\n)*{begin})?" if begin else "(.|\n)*"
        return f"words[lazy]: /{text}{rest}/".replace("\n", r"\n")

    # -- reading ------------------------------------------------------------------------------------------------

    def read(self, tools: Sequence[Tool], source: Source, output: Output) -> Steps:
        """Reads content and calls up to the end of the text."""
        tag, bare, has_words = self._opening.text, self._form.bare, False

        def emit(text: str) -> None:
            nonlocal has_words
            has_words = has_words or bool(text.strip())
            output.text(text)

        while found := (yield from source.until([tag, bare] if bare else [tag], emit)):
            if found != tag:
                source.text, found = found + source.text, ""
            num_calls = output.num_calls
            yield from self._read_opened(tools, found, has_words and not found, source, output)
            if self._separator and output.num_calls > num_calls and output.calls_complete:
                yield from source.blanks()
                if source.text.startswith(self._separator):
                    source.text = source.text[len(self._separator) :]
                    yield from source.blanks()

    def _read_opened(
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
        yield from _pass_over(self._first, source)
        yield from self._read_call(tools, source, output)
        last = next((_text(piece) for piece in self._last if not isinstance(piece, Slot)), None)
        while last is not None:
            yield from source.blanks()
            if (yield from source.expect(last, self._separator or _text(self._call[0]), takes=False)) == last:
                source.take(len(last))
                return
            source.take(len(self._separator))
            yield from self._read_call(tools, source, output)

    def _read_call(self, tools: Sequence[Tool], source: Source, output: Output) -> Steps:
        """A call begins for the client once the text behind its name is there, or a parameter, or the end of them."""
        name: Any = None
        num_calls, schemas = output.num_calls, {tool.name: tool.parameters for tool in tools}
        for piece in self._call:
            if piece is Slot.CALL:
                yield from _read_object(schemas, source, output)
            elif piece is Slot.NAME:
                yield from source.blanks()
                name = yield from source.matching(_WORD)
            elif piece is Slot.ARGUMENTS:
                yield from source.blanks()
                yield from source.value(output.arguments)
                output.calls_complete = True
            elif piece is Slot.PARAMETERS:
                begin, end = _text(self._key[0]), _text(self._after[0]).strip()
                yield from source.blanks()
                if output.num_calls == num_calls:
                    yield from source.expect(begin, end, takes=False)
                    _begin_call(name, schemas, source, output)
                yield from self._read_parameters(schemas[name], begin, end, source, output)
            else:
                yield from _pass_over([piece], source)
                if name is not None and output.num_calls == num_calls:
                    _begin_call(name, schemas, source, output)

    def _read_parameters(self, schema: Any, begin: str, end: str, source: Source, output: Output) -> Steps:
        """Reads parameters as one JSON object, each from `begin` on, up to `end`."""
        properties, opening = schema.get("properties") or {}, "{"
        while (yield from source.expect(begin, end, takes=False)) == begin:
            source.take(len(begin))
            key = yield from source.matching(_WORD)
            yield from _pass_over(self._key[2:], source)
            output.arguments(f"{opening}{json.dumps(key)}: ")
            opening = ", "
            yield from self._read_value(resolved(properties.get(key, {}), schema), source, output)
            yield from source.blanks()
        output.arguments("}" if opening == ", " else "{}")
        output.calls_complete = True

    def _read_value(self, schema: Any, source: Source, output: Output) -> Steps:
        end, is_text, raw, begin = _text(self._value_end[0]), is_words(schema), list[str](), self._form.value_begin

        def emit(text: str) -> None:
            """Puts out text as the inside of a JSON string, without what comes before the value."""
            nonlocal begin
            if text:
                text, begin = text.removeprefix(begin), ""
            output.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

        output.arguments('"' if is_text else "")
        while (yield from source.until([end], emit if is_text else raw.append)):
            if is_text or is_whole("".join(raw)):
                break
            raw.append(end)  # which is in a string of the value
        else:
            raise Malformed
        output.arguments('"' if is_text else as_json("".join(raw)))


def one_of(rule: str, terms: list[str]) -> str:
    return f"{rule}: " + "\n  | ".join(terms)


def _terms(pieces: Sequence[Piece], **slots: str) -> str:
    """Pieces as terms of a grammar. `slots`: the terms of slots, by their names."""
    terms = []
    for piece in pieces:
        if isinstance(piece, Slot):
            terms.append(_BLANKS.get(piece) or slots[piece.value])
        elif piece:
            terms.append(piece.lark if isinstance(piece, Tag) else json.dumps(piece))
    return " ".join(terms)


def _text(piece: Piece) -> str:
    """A text of the form, or of a tag, as a reader sees it."""
    assert not isinstance(piece, Slot)
    return piece.text if isinstance(piece, Tag) else piece


def _pass_over(pieces: Sequence[Piece], source: Source) -> Steps:
    """Takes texts and tags, and blanks before them. Raises Malformed where something else comes."""
    for piece in pieces:
        yield from source.blanks()
        if not isinstance(piece, Slot) and (text := _text(piece).strip()):
            yield from source.expect(text)


def _begin_call(name: str, known: dict[str, Any], source: Source, output: Output) -> None:
    """Raises Malformed where no tool has this name."""
    if name not in known:
        raise Malformed
    output.call(name)
    source.taken = None


def _read_object(known: dict[str, Any], source: Source, output: Output) -> Steps:
    """Reads {"name": ..., "arguments": ...} or "parameters". Raises Malformed where it is none."""
    yield from source.blanks()
    yield from source.expect("{")
    named = False
    while True:
        yield from source.blanks()
        key = yield from source.string()
        yield from source.blanks()
        yield from source.expect(":")
        yield from source.blanks()
        if key == "name":
            _begin_call((yield from source.string()), known, source, output)
            named = True
        elif key in ("arguments", "parameters") and named:
            yield from source.value(output.arguments)
        else:
            yield from source.value(lambda _: None)
        yield from source.blanks()
        if (yield from source.expect(",", "}")) == "}":
            break
    if not named:
        raise Malformed
    output.calls_complete = True
