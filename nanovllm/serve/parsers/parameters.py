"""Calls whose parameters each have tags of their own: their grammar, and their values as JSON."""

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from nanovllm.serve.parsers.reader import Malformed, Output, Source, Steps, is_whole
from nanovllm.serve.parsers.tools import Tool, json_term

NextKey = Generator[None, None, str | None]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def parameters(tool: Tool, head: Callable[[str], str], begin: str, end: str, gap: str = "") -> str:
    """A tool's parameters as a term of the grammar, in the schema's order; those that are not required may be left out.
    One that no schema names is the rule `any`. `head`: the term before a value, from the parameter's name; `begin` and
    `end`: terms around the value; `gap`: behind these."""
    schema = tool.parameters
    properties = schema.get("properties") or {}
    if tool.strict is False or not properties:
        closed = not properties and schema.get("additionalProperties") is False
        return '""' if closed and tool.strict is not False else "any{0,64}"
    terms = []
    for name, value in properties.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"tools: function {tool.name!r} has a parameter whose name is not 1 to 64 of A-Za-z0-9_.-")
        term = " ".join(filter(None, (head(name), _value(value, tool, begin, end), gap)))
        terms.append(term if name in (schema.get("required") or ()) else f"({term})?")
    return " ".join(terms)


def _value(value: Any, tool: Tool, begin: str, end: str) -> str:
    """A parameter's value between two terms, or the rule `words`, which has its own end."""
    if tool.text_grammar is not None:
        return f"{begin} {tool.text_term(end)}"
    value = resolved(value, tool.parameters)
    if not _is_words(value):
        outer = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        return f"{begin} {json_term({**outer, **value}, lenient=tool.strict is None)} {end}"
    choices = [value["const"]] if "const" in value else value.get("enum")
    return f"{begin} ({' | '.join(json.dumps(str(each)) for each in choices)}) {end}" if choices else "words"


def key_reader(begin: str, key: re.Pattern[str], after: str, end: str) -> Callable[[Source], NextKey]:
    """Reads `begin`, a key and `after`; or `end`, where no parameter follows."""

    def next_key(source: Source) -> NextKey:
        yield from source.blanks()
        if (yield from source.expect(begin, end)) == end:
            return None
        found = yield from source.matching(key)
        yield from source.expect(after)
        return found

    return next_key


def read_parameters(
    name: str,
    tools: Sequence[Tool],
    next_key: Callable[[Source], NextKey],
    begin: str,
    end: str,
    source: Source,
    output: Output,
) -> Steps:
    """Reads the parameters of a call as one JSON object. next_key: reads up to a value, None where no parameter
    follows. A value is between `begin`, which it may lack, and `end`."""
    output.call(name)
    source.taken = None
    schema = next((tool.parameters for tool in tools if tool.name == name), {})
    properties = schema.get("properties") or {}
    opening = "{"
    while (key := (yield from next_key(source))) is not None:
        output.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        is_words, raw = _is_words(resolved(properties.get(key, {}), schema)), list[str]()
        output.arguments('"' if is_words else "")
        while (yield from source.until([end], _Words(begin, output) if is_words else raw.append)):
            if is_words or is_whole("".join(raw)):
                break
            raw.append(end)  # which is in a string of the value
        else:
            raise Malformed
        output.arguments('"' if is_words else _as_json("".join(raw)))
    output.arguments("}" if opening == ", " else "{}")
    output.calls_complete = True


def _as_json(text: str) -> str:
    """A parameter's text as JSON: as it is, or as a string where it is none."""
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(text.removeprefix("\n"), ensure_ascii=False)
    return text.strip()


class _Words:
    """Puts out text as the inside of a JSON string, in pieces, without `begin` before it."""

    def __init__(self, begin: str, output: Output) -> None:
        self._begin, self._output = begin, output

    def __call__(self, text: str) -> None:
        if text:
            text, self._begin = text.removeprefix(self._begin), ""
        self._output.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def resolved(value: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parameter's schema, a reference to one of the definitions replaced by it."""
    reference = value.get("$ref") if isinstance(value, Mapping) else None
    if isinstance(reference, str):
        parts = reference.removeprefix("#/").split("/")
        table = schema.get(parts[0])
        found = table.get(parts[-1]) if isinstance(table, Mapping) and len(parts) == 2 else None
        value = found if isinstance(found, Mapping) else value
    return value if isinstance(value, Mapping) else {}


def _is_words(schema: Mapping[str, Any]) -> bool:
    """Whether a parameter's value is written as it is, and not as JSON."""
    fixed = [schema["const"]] if "const" in schema else schema.get("enum")
    if fixed:
        return all(isinstance(each, str) for each in fixed)
    kind = schema.get("type")
    if isinstance(kind, list):
        return "string" in kind
    return kind == "string" or (kind is None and not {"anyOf", "oneOf", "allOf", "$ref"} & {*schema})
