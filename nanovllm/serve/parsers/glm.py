"""GLM-4.5 and on: a call's name, and then a pair of tags for each parameter's name and value."""

import json
import re
from collections.abc import Generator

from nanovllm.serve.parsers.family import ToolFamily, one_of
from nanovllm.serve.parsers.parameters import parameters, read_parameters
from nanovllm.serve.parsers.reader import Malformed, Output, Source, Steps
from nanovllm.serve.parsers.tags import Tags
from nanovllm.serve.parsers.tools import Tool

_NAME = re.compile(r"[A-Za-z0-9_.-]*")


class Glm(ToolFamily):
    tags = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def __init__(self, tags: Tags) -> None:
        super().__init__(tags)
        _, self._close, self._key, self._key_end, self._value, self._value_end = self.marks

    def grammar(self, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        end, one = self._value_end, f"{self._key.lark} /[A-Za-z0-9_.-]{{1,64}}/ {self._key_end.lark}"
        words = rf"words: TEXT {end.lark}" if end.token_id is not None else r"words[lazy]: /(.|\n)*<\/arg_value>/"
        return self.tagged_calls(
            *(parallel, free, f"call: function {self._close.lark}"),
            one_of("function", [f"{json.dumps(tool.name)} GAP {self._parameters(tool)}" for tool in tools]),
            f"any: {one} GAP {self._value.lark} words GAP",
            words,
            r"GAP: /\n?/",
        )

    def _parameters(self, tool: Tool) -> str:
        def head(name: str) -> str:
            return f"{self._key.lark} {json.dumps(name)} {self._key_end.lark} GAP {self._value.lark}"

        return parameters(tool, head, "", self._value_end.lark, "GAP")

    def call(self, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        yield from source.blanks()
        name = yield from source.matching(_NAME)
        yield from source.blanks()
        yield from source.expect(self._key.text, self._close.text, takes=False)
        if not name:
            raise Malformed
        yield from read_parameters(name, tools, self._next_key, "", self._value_end.text, source, output)

    def _next_key(self, source: Source) -> Generator[None, None, str | None]:
        yield from source.blanks()
        if (yield from source.expect(self._key.text, self._close.text)) == self._close.text:
            return None
        pieces: list[str] = []
        if not (yield from source.until([self._key_end.text], pieces.append)):
            raise Malformed
        yield from source.blanks()
        yield from source.expect(self._value.text)
        return "".join(pieces).strip()
