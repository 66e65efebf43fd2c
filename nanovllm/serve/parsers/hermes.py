"""Hermes, Qwen2.5, Qwen3: <tool_call>, a line of JSON, </tool_call>, several in a row."""

from nanovllm.serve.parsers.family import json_calls, read_call, read_json_call, tagged_calls
from nanovllm.serve.parsers.reader import Output, Source, Steps
from nanovllm.serve.parsers.tags import Tag, Tags
from nanovllm.serve.parsers.tools import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    def marks(self, tags: Tags) -> list[Tag]:
        return [tags[OPEN], tags[CLOSE]]

    def grammar(self, tags: Tags, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        call = rf'call: "\n" function "\n" {tags[CLOSE].lark}'
        return tagged_calls(tags[OPEN], parallel, free, call, json_calls("function", tools, "arguments"))

    def read(self, tags: Tags, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        while (yield from source.until([tags[OPEN].text], output.text)):
            yield from read_call(self._call(tags, source, output), tags[OPEN].text, source, output)

    def _call(self, tags: Tags, source: Source, output: Output) -> Steps:
        yield from read_json_call(source, output)
        yield from source.until([tags[CLOSE].text], lambda _: None)
        output.begin("content", strips=True)
