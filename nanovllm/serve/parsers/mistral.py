"""Mistral: [TOOL_CALLS] and a list of JSON calls; newer models: [TOOL_CALLS]name[ARGS]{...}, several in a row."""

import json
import re

from nanovllm.serve.parsers.family import ToolFamily, json_calls, one_of, read_json_call, repeated
from nanovllm.serve.parsers.reader import Malformed, Output, Source, Steps
from nanovllm.serve.parsers.tools import Tool

_NAME = re.compile(r"[A-Za-z0-9_-]*")


class MistralList(ToolFamily):
    tags = ("[TOOL_CALLS]",)

    def grammar(self, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        calls = 'calls: / ?/ "[" ' + repeated("function", '", "', parallel) + ' "]"'
        return "\n".join((self.body(free), calls, json_calls(tools, "arguments")))

    def call(self, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        yield from source.blanks()
        yield from source.expect("[")
        while True:
            yield from read_json_call(source, output)
            yield from source.blanks()
            if (yield from source.expect(",", "]")) == "]":
                break


class MistralNamed(ToolFamily):
    tags = ("[TOOL_CALLS]", "[ARGS]")

    def grammar(self, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        call = one_of("call", [f"{json.dumps(tool.name)} {self.marks[1].lark} {tool.arguments()}" for tool in tools])
        return self.tagged_calls(parallel, free, call, gap="")

    def call(self, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        yield from source.blanks()
        name = yield from source.matching(_NAME)
        if not name:
            raise Malformed
        yield from source.expect(self.marks[1].text)
        output.call(name)
        source.taken = None
        yield from source.blanks()
        yield from source.value(output.arguments)
        output.calls_complete = True
