"""Mistral: [TOOL_CALLS] and a list of JSON calls; newer models: [TOOL_CALLS]name[ARGS]{...}, several in a row."""

import json
import re

from nanovllm.serve.parsers.family import (
    body_after_tag,
    json_calls,
    one_of,
    read_call,
    read_json_call,
    repeated,
    tagged_calls,
)
from nanovllm.serve.parsers.reader import Malformed, Output, Source, Steps
from nanovllm.serve.parsers.tags import Tag, Tags
from nanovllm.serve.parsers.tools import Tool

OPEN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_NAME = re.compile(r"[A-Za-z0-9_-]*")


class MistralList:
    def marks(self, tags: Tags) -> list[Tag]:
        return [tags[OPEN]]

    def grammar(self, tags: Tags, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        return "\n".join(
            (
                body_after_tag(tags[OPEN], free),
                'calls: / ?/ "[" ' + repeated("function", '", "', parallel) + ' "]"',
                json_calls("function", tools, "arguments"),
            )
        )

    def read(self, tags: Tags, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        while (yield from source.until([tags[OPEN].text], output.text)):
            yield from read_call(self._list(source, output), tags[OPEN].text, source, output)

    def _list(self, source: Source, output: Output) -> Steps:
        yield from source.blanks()
        yield from source.expect("[")
        while True:
            yield from read_json_call(source, output)
            yield from source.blanks()
            if (yield from source.expect(",", "]")) == "]":
                break
        output.begin("content", strips=True)


class MistralNamed:
    def marks(self, tags: Tags) -> list[Tag]:
        return [tags[OPEN], tags[ARGUMENTS]]

    def grammar(self, tags: Tags, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        call = one_of("call", [f"{json.dumps(t.name)} {tags[ARGUMENTS].lark} {t.arguments()}" for t in tools])
        return tagged_calls(tags[OPEN], parallel, free, call, gap="")

    def read(self, tags: Tags, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        while (yield from source.until([tags[OPEN].text], output.text)):
            yield from read_call(self._call(tags, source, output), tags[OPEN].text, source, output)

    def _call(self, tags: Tags, source: Source, output: Output) -> Steps:
        yield from source.blanks()
        name = yield from source.matching(_NAME)
        if not name:
            raise Malformed
        yield from source.expect(tags[ARGUMENTS].text)
        output.call(name)
        source.taken = None
        yield from source.blanks()
        yield from source.value(output.arguments)
        output.calls_complete = True
        output.begin("content", strips=True)
