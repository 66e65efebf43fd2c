"""MiniMax-M2: a pair of tags around all calls; for each call and each of its parameters an element with its name."""

import json
import re

from nanovllm.serve.parsers.family import ToolFamily, one_of, repeated
from nanovllm.serve.parsers.parameters import key_reader, parameters, read_parameters
from nanovllm.serve.parsers.reader import Malformed, Output, Source, Steps
from nanovllm.serve.parsers.tools import Tool

_CALL, _CALL_END = '<invoke name="', "</invoke>"
_PARAMETER, _PARAMETER_END = '<parameter name="', "</parameter>"
_UP_TO_QUOTE = re.compile(r'[^"\n]*')


class MiniMax(ToolFamily):
    tags = ("<minimax:tool_call>", "</minimax:tool_call>")

    def grammar(self, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        heads = [json.dumps(f'{tool.name}">') for tool in tools]
        values = [parameters(tool, _head, "", json.dumps(_PARAMETER_END), "GAP") for tool in tools]
        functions = [f"{head} GAP {value}" for head, value in zip(heads, values, strict=True)]
        return "\n".join((
            self.body(free),
            f"calls: GAP {repeated('call', 'GAP', parallel)} GAP {self.marks[1].lark}",
            f"call: {json.dumps(_CALL)} function {json.dumps(_CALL_END)}",
            one_of("function", functions),
            f'any: {json.dumps(_PARAMETER)} /[A-Za-z0-9_.-]{{1,64}}/ "\\">" words GAP',
            r"words[lazy]: /(.|\n)*<\/parameter>/",
            r"GAP: /\n?/",
        ))  # fmt: skip

    def call(self, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        end, begun = self.marks[1].text, output.num_calls
        while True:
            yield from source.blanks()
            if (yield from source.expect(_CALL, *([end] if output.num_calls > begun else []))) == end:
                return
            name = yield from source.matching(_UP_TO_QUOTE)
            yield from source.expect('">')
            if all(tool.name != name for tool in tools):
                raise Malformed
            yield from read_parameters(name, tools, _next_key, "", _PARAMETER_END, source, output)


_next_key = key_reader(_PARAMETER, _UP_TO_QUOTE, '">', _CALL_END)


def _head(name: str) -> str:
    return json.dumps(f'{_PARAMETER}{name}">')
