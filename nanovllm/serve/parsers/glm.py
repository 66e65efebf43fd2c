"""GLM-4.5 and on: a call's name, and then a pair of tags for each parameter's name and value."""

import json
import re
from collections.abc import Mapping
from typing import Any

from nanovllm.serve.parsers.family import body_after_tag, one_of, read_call, repeated
from nanovllm.serve.parsers.qwen_coder import as_json, is_words, resolved
from nanovllm.serve.parsers.reader import Malformed, Output, Source, Steps
from nanovllm.serve.parsers.tags import Tag, Tags
from nanovllm.serve.parsers.tools import Tool, json_term

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_PARAMETER = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Glm:
    def marks(self, tags: Tags) -> list[Tag]:
        return [tags[name] for name in (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)]

    def grammar(self, tags: Tags, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        between, end = rf"/\n{{0,2}}/ {tags[OPEN].lark}", tags[VALUE_END]
        words = rf"words: TEXT {end.lark}" if end.token_id is not None else r"words[lazy]: /(.|\n)*<\/arg_value>/"
        return "\n".join(
            (
                body_after_tag(tags[OPEN], free),
                "calls: " + repeated("call", between, parallel),
                f"call: function {tags[CLOSE].lark}",
                one_of("function", [f"{json.dumps(tool.name)} GAP {_parameters(tags, tool)}" for tool in tools]),
                f"any: {tags[KEY].lark} /[A-Za-z0-9_.-]{{1,64}}/ {tags[KEY_END].lark} GAP {tags[VALUE].lark} words GAP",
                words,
                r"GAP: /\n?/",
            )
        )

    def read(self, tags: Tags, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        schemas = {tool.name: tool.parameters for tool in tools}
        while (yield from source.until([tags[OPEN].text], output.text)):
            yield from read_call(self._call(tags, schemas, source, output), tags[OPEN].text, source, output)

    def _call(self, tags: Tags, schemas: Mapping[str, Any], source: Source, output: Output) -> Steps:
        key, close = tags[KEY].text, tags[CLOSE].text
        yield from source.blanks()
        name = yield from source.matching(_NAME)
        yield from source.blanks()
        follows = yield from source.expect(key, close)
        if not name:
            raise Malformed
        output.call(name)
        source.taken = None
        schema = schemas.get(name, {})
        opening = "{"
        while follows == key:
            pieces: list[str] = []
            if not (yield from source.until([tags[KEY_END].text], pieces.append)):
                raise Malformed
            parameter = "".join(pieces).strip()
            yield from source.blanks()
            yield from source.expect(tags[VALUE].text)
            output.arguments(f"{opening}{json.dumps(parameter, ensure_ascii=False)}: ")
            opening = ", "
            properties = schema.get("properties") or {}
            yield from _value(tags[VALUE_END].text, resolved(properties.get(parameter, {}), schema), source, output)
            yield from source.blanks()
            follows = yield from source.expect(key, close)
        output.arguments("}" if opening == ", " else "{}")
        output.calls_complete = True
        output.begin("content", strips=True)


def _value(end: str, schema: Mapping[str, Any], source: Source, output: Output) -> Steps:
    """One parameter's text as JSON: a string piece by piece, anything else at its end."""
    if is_words(schema):
        output.arguments('"')
        inside = lambda text: output.arguments(json.dumps(text, ensure_ascii=False)[1:-1])  # noqa: E731
        if not (yield from source.until([end], inside)):
            raise Malformed
        output.arguments('"')
        return
    raw: list[str] = []
    if not (yield from source.until([end], raw.append)):
        raise Malformed
    output.arguments(as_json("".join(raw)))


def _parameters(tags: Tags, tool: Tool) -> str:
    """The parameters as a term of the grammar, in the schema's order; those that are not required may be left out."""
    schema = tool.parameters
    properties = schema.get("properties") or {}
    if tool.strict is False or not properties:
        closed = not properties and schema.get("additionalProperties") is False
        return '""' if closed and tool.strict is not False else "any{0,64}"
    terms = []
    for name, value in properties.items():
        if not _PARAMETER.fullmatch(name):
            raise ValueError(f"tools: function {tool.name!r} has a parameter whose name is not 1 to 64 of A-Za-z0-9_.-")
        head = f"{tags[KEY].lark} {json.dumps(name)} {tags[KEY_END].lark} GAP {tags[VALUE].lark}"
        term = f"{head} {_value_term(tags, value, tool)} GAP"
        terms.append(term if name in (schema.get("required") or ()) else f"({term})?")
    return " ".join(terms)


def _value_term(tags: Tags, value: Any, tool: Tool) -> str:
    value, end = resolved(value, tool.parameters), tags[VALUE_END].lark
    if not is_words(value):
        outer = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        return f"{json_term({**outer, **value}, lenient=tool.strict is None)} {end}"
    choices = [value["const"]] if "const" in value else value.get("enum")
    return f"({' | '.join(json.dumps(str(each)) for each in choices)}) {end}" if choices else "words"
