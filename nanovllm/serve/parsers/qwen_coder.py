"""Qwen3-Coder, Qwen3.5: a call as tags for the function and for each of its parameters."""

import json
import re
from collections.abc import Mapping
from typing import Any

from nanovllm.serve.parsers.family import one_of, read_call, tagged_calls
from nanovllm.serve.parsers.parameters import inside, parameters, read_value, resolved, value_term
from nanovllm.serve.parsers.reader import Output, Source, Steps
from nanovllm.serve.parsers.tags import Tag, Tags
from nanovllm.serve.parsers.tools import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BEGIN, _END = r'"\n" ', "\n</parameter>\n"
_UP_TO_TAG = re.compile(r"[^>\n]*")
_ANY_PARAMETER = '"<parameter=" /[A-Za-z0-9_.-]{1,64}/ ">" words'
_WORDS = r"words[lazy]: /\n((.|\n)*\n)?<\/parameter>\n/"


class QwenCoder:
    def marks(self, tags: Tags) -> list[Tag]:
        return [tags[OPEN], tags[CLOSE]]

    def grammar(self, tags: Tags, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        functions = [f"{json.dumps(tool.name + '>' + chr(10))} {_parameters(tool)}" for tool in tools]
        call = rf'call: "\n<function=" function "</function>\n" {tags[CLOSE].lark}'
        return tagged_calls(tags[OPEN], parallel, free, call, one_of("function", functions), _WORDS)

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
            of_key = resolved(properties.get(key, {}), schema)
            yield from read_value(_END, of_key, source, output, _Words(output))
        output.arguments("}" if opening == ", " else "{}")
        output.calls_complete = True
        yield from source.until([tags[CLOSE].text], lambda _: None)
        output.begin("content", strips=True)


class _Words:
    """Text as the inside of a JSON string; the line break that it begins with belongs to the tag before it."""

    def __init__(self, output: Output) -> None:
        self._output, self._is_first = output, True

    def __call__(self, text: str) -> None:
        if text and self._is_first:
            text, self._is_first = text.removeprefix("\n"), False
        self._output.arguments(inside(text))


def _parameters(tool: Tool) -> str:
    def one(name: str, value: Any) -> str:
        return f"{json.dumps(f'<parameter={name}>')} {value_term(value, tool, _BEGIN, json.dumps(_END))}"

    return parameters(tool, f"({_ANY_PARAMETER})", one)
