"""Qwen3-Coder, Qwen3.5: a call as tags for the function and for each of its parameters."""

import json
import re
from collections.abc import Mapping
from typing import Any

from nanovllm.serve.parsers.family import body_after_tag, one_of, read_call, repeated
from nanovllm.serve.parsers.reader import Malformed, Output, Source, Steps
from nanovllm.serve.parsers.tags import Tag, Tags
from nanovllm.serve.parsers.tools import Tool, json_term

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_END = "\n</parameter>\n"
_UP_TO_TAG = re.compile(r"[^>\n]*")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ANY_PARAMETER = '"<parameter=" /[A-Za-z0-9_.-]{1,64}/ ">" words'
_WORDS = r"words[lazy]: /\n((.|\n)*\n)?<\/parameter>\n/"


class QwenCoder:
    def marks(self, tags: Tags) -> list[Tag]:
        return [tags[OPEN], tags[CLOSE]]

    def grammar(self, tags: Tags, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        between = rf"/\n{{0,2}}/ {tags[OPEN].lark}"
        return "\n".join(
            (
                body_after_tag(tags[OPEN], free),
                "calls: " + repeated("call", between, parallel),
                rf'call: "\n<function=" function "</function>\n" {tags[CLOSE].lark}',
                one_of("function", [f"{json.dumps(tool.name + '>' + chr(10))} {_parameters(tool)}" for tool in tools]),
                _WORDS,
            )
        )

    def read(self, tags: Tags, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        schemas = {tool.name: tool.parameters for tool in tools}
        while (yield from source.until([tags[OPEN].text], output.text)):
            yield from read_call(self._call(tags, schemas, source, output), tags[OPEN].text, source, output)

    def _call(self, tags: Tags, schemas: Mapping[str, Any], source: Source, output: Output) -> Steps:
        yield from source.blanks()
        yield from source.expect("<function=")
        name = yield from source.matching(_UP_TO_TAG)
        yield from source.expect(">")
        output.call(name)
        source.taken = None
        schema = schemas.get(name, {})
        properties = schema.get("properties") or {}
        opening = "{"
        while True:
            yield from source.blanks()
            if (yield from source.expect("<parameter=", "</function>")) == "</function>":
                break
            key = yield from source.matching(_UP_TO_TAG)
            yield from source.expect(">")
            output.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            yield from _value(resolved(properties.get(key, {}), schema), source, output)
        output.arguments("}" if opening == ", " else "{}")
        output.calls_complete = True
        yield from source.until([tags[CLOSE].text], lambda _: None)
        output.begin("content", strips=True)


def _value(schema: Mapping[str, Any], source: Source, output: Output) -> Steps:
    """One parameter's text as JSON: a string piece by piece, anything else at its end."""
    if is_words(schema):
        output.arguments('"')
        if not (yield from source.until([_END], _Words(output))):
            raise Malformed
        output.arguments('"')
        return
    raw: list[str] = []
    if not (yield from source.until([_END], raw.append)):
        raise Malformed
    output.arguments(as_json("".join(raw)))


def as_json(text: str) -> str:
    """A parameter's text as JSON: as it is, or as a string where it is none."""
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(text.removeprefix("\n"), ensure_ascii=False)
    return text.strip()


class _Words:
    """Text as the inside of a JSON string; the line break that it begins with belongs to the tag before it."""

    def __init__(self, output: Output) -> None:
        self._output, self._is_first = output, True

    def __call__(self, text: str) -> None:
        if text and self._is_first:
            text, self._is_first = text.removeprefix("\n"), False
        self._output.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _parameters(tool: Tool) -> str:
    """The parameters as a term of the grammar, in the schema's order; those that are not required may be left out."""
    schema = tool.parameters
    properties = schema.get("properties") or {}
    if tool.strict is False or not properties:
        closed = not properties and schema.get("additionalProperties") is False
        return '""' if closed and tool.strict is not False else f"({_ANY_PARAMETER}){{0,64}}"
    terms = []
    for key, value in properties.items():
        if not _NAME.fullmatch(key):
            raise ValueError(f"tools: function {tool.name!r} has a parameter whose name is not 1 to 64 of A-Za-z0-9_.-")
        term = f'{json.dumps(f"<parameter={key}>")} {_value_term(value, tool)}'
        terms.append(term if key in (schema.get("required") or ()) else f"({term})?")
    return " ".join(terms)


def _value_term(value: Any, tool: Tool) -> str:
    value = resolved(value, tool.parameters)
    if not is_words(value):
        outer = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        return rf'"\n" {json_term({**outer, **value}, lenient=tool.strict is None)} {json.dumps(_END)}'
    choices = [value["const"]] if "const" in value else value.get("enum")
    return "(" + " | ".join(json.dumps(f"\n{each}{_END}") for each in choices) + ")" if choices else "words"


def resolved(value: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parameter's schema, a reference to one of the definitions replaced by it."""
    reference = value.get("$ref") if isinstance(value, Mapping) else None
    if isinstance(reference, str):
        parts = reference.removeprefix("#/").split("/")
        found = (schema.get(parts[0]) or {}).get(parts[1]) if len(parts) == 2 else None
        value = found if isinstance(found, Mapping) else value
    return value if isinstance(value, Mapping) else {}


def is_words(schema: Mapping[str, Any]) -> bool:
    """Whether a parameter's value is written as it is, and not as JSON."""
    fixed = [schema["const"]] if "const" in schema else schema.get("enum")
    if fixed:
        return all(isinstance(each, str) for each in fixed)
    kind = schema.get("type")
    if isinstance(kind, list):
        return "string" in kind
    return kind == "string" or (kind is None and not {"anyOf", "oneOf", "allOf", "$ref"} & {*schema})
