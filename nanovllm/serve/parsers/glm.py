"""GLM-4.5 and on: a call's name, and then a pair of tags for each parameter's name and value."""

import json
import re
from collections.abc import Mapping
from typing import Any

from nanovllm.serve.parsers.family import one_of, read_call, tagged_calls
from nanovllm.serve.parsers.parameters import inside, parameters, read_value, resolved, value_term
from nanovllm.serve.parsers.reader import Malformed, Output, Source, Steps
from nanovllm.serve.parsers.tags import Tag, Tags
from nanovllm.serve.parsers.tools import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[A-Za-z0-9_.-]*")


class Glm:
    def marks(self, tags: Tags) -> list[Tag]:
        return [tags[name] for name in (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)]

    def grammar(self, tags: Tags, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        end, one = tags[VALUE_END], f"{tags[KEY].lark} /[A-Za-z0-9_.-]{{1,64}}/ {tags[KEY_END].lark}"
        words = rf"words: TEXT {end.lark}" if end.token_id is not None else r"words[lazy]: /(.|\n)*<\/arg_value>/"
        return tagged_calls(
            *(tags[OPEN], parallel, free),
            f"call: function {tags[CLOSE].lark}",
            one_of("function", [f"{json.dumps(tool.name)} GAP {_parameters(tags, tool)}" for tool in tools]),
            f"any: {one} GAP {tags[VALUE].lark} words GAP",
            words,
            r"GAP: /\n?/",
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
            words = lambda text: output.arguments(inside(text))  # noqa: E731
            of_parameter = resolved(properties.get(parameter, {}), schema)
            yield from read_value(tags[VALUE_END].text, of_parameter, source, output, words)
            yield from source.blanks()
            follows = yield from source.expect(key, close)
        output.arguments("}" if opening == ", " else "{}")
        output.calls_complete = True
        output.begin("content", strips=True)


def _parameters(tags: Tags, tool: Tool) -> str:
    def one(name: str, value: Any) -> str:
        head = f"{tags[KEY].lark} {json.dumps(name)} {tags[KEY_END].lark} GAP {tags[VALUE].lark}"
        return f"{head} {value_term(value, tool, '', tags[VALUE_END].lark)} GAP"

    return parameters(tool, "any", one)
