"""Hermes, Qwen2.5, Qwen3: <tool_call>, a line of JSON, </tool_call>, several in a row."""

from nanovllm.serve.parsers.family import ToolFamily, json_calls, read_json_call
from nanovllm.serve.parsers.reader import Output, Source, Steps
from nanovllm.serve.parsers.tools import Tool


class Hermes(ToolFamily):
    tags = ("<tool_call>", "</tool_call>")

    def grammar(self, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        call = rf'call: "\n" function "\n" {self.marks[1].lark}'
        return self.tagged_calls(parallel, free, call, json_calls(tools, "arguments"))

    def call(self, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        yield from read_json_call(source, output)
        yield from source.until([self.marks[1].text], lambda _: None)
