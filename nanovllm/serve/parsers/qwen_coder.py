"""Qwen3-Coder, Qwen3.5: a call as tags for the function and for each of its parameters."""

import json
import re

from nanovllm.serve.parsers.family import ToolFamily, one_of, read_call
from nanovllm.serve.parsers.parameters import key_reader, parameters, read_parameters
from nanovllm.serve.parsers.reader import Malformed, Output, Source, Steps
from nanovllm.serve.parsers.tools import Tool

_FUNCTION = "<function="
_BEGIN, _END = "\n", "\n</parameter>\n"
_UP_TO_TAG = re.compile(r"[^>\n]*")
_ANY = 'any: "<parameter=" /[A-Za-z0-9_.-]{1,64}/ ">" words'
_WORDS = r"words[lazy]: /\n((.|\n)*\n)?<\/parameter>\n/"


class QwenCoder(ToolFamily):
    tags = ("<tool_call>", "</tool_call>")

    def grammar(self, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        texts = json.dumps(_BEGIN), json.dumps(_END)
        functions = [f"{json.dumps(tool.name + '>' + chr(10))} {parameters(tool, _head, *texts)}" for tool in tools]
        call = rf'call: "\n<function=" function "</function>\n" {self.marks[1].lark}'
        return self.tagged_calls(parallel, free, call, one_of("function", functions), _ANY, _WORDS)

    def read(self, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        """A model may leave <tool_call> out."""
        tag = self.opening.text
        while found := (yield from source.until([tag, _FUNCTION], output.text)):
            if found != tag:
                source.text, found = found + source.text, ""
            yield from read_call(self.call(tools, source, output), found, source, output)

    def call(self, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        yield from source.blanks()
        yield from source.expect(_FUNCTION)
        name = yield from source.matching(_UP_TO_TAG)
        yield from source.expect(">")
        if all(tool.name != name for tool in tools):
            raise Malformed
        yield from read_parameters(name, tools, _next_key, _BEGIN, _END, source, output)
        yield from source.blanks()
        yield from source.expect(self.marks[1].text)


_next_key = key_reader("<parameter=", _UP_TO_TAG, ">", "</function>")


def _head(name: str) -> str:
    return json.dumps(f"<parameter={name}>")
