"""Llama 3: {"name": ..., "parameters": ...} as the whole answer, maybe after <|python_tag|>, several joined by ;"""

from nanovllm.serve.parsers.family import json_calls, read_call, read_json_call, repeated
from nanovllm.serve.parsers.reader import Output, Source, Steps
from nanovllm.serve.parsers.tags import Tag, Tags
from nanovllm.serve.parsers.tools import Tool

PYTHON_TAG = "<|python_tag|>"


class Llama:
    def marks(self, tags: Tags) -> list[Tag]:
        return [tags[PYTHON_TAG]]

    def grammar(self, tags: Tags, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        text = r'body: "" | PROSE | calls' + "\n" + r"PROSE: /[^{](.|\n)*/" if free else "body: calls"
        return "\n".join(
            (
                text,
                f"calls: {tags[PYTHON_TAG].lark}? " + repeated("function", '"; "', parallel),
                json_calls("function", tools, "parameters"),
            )
        )

    def read(self, tags: Tags, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        while not source.text and not source.ended:
            yield
        tag = tags[PYTHON_TAG].text if source.text.startswith(tags[PYTHON_TAG].text) else ""
        if not tag and not source.text.startswith("{"):
            return
        source.text = source.text[len(tag) :]
        more = True
        while more:
            before = output.num_calls
            yield from read_call(read_json_call(source, output), tag, source, output)
            if output.num_calls == before or not output.calls_complete:
                return
            yield from source.blanks()
            more = source.text.startswith(";")
            source.text = source.text[more:]
        output.begin("content", strips=True)
