"""Llama 3: {"name": ..., "parameters": ...} as the whole answer, maybe after <|python_tag|>, several joined by ;"""

from nanovllm.serve.parsers.family import ToolFamily, json_calls, read_call, read_json_call, repeated
from nanovllm.serve.parsers.reader import Output, Source, Steps
from nanovllm.serve.parsers.tools import Tool


class Llama(ToolFamily):
    tags = ("<|python_tag|>",)

    def grammar(self, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        text = r'body: "" | PROSE | calls' + "\n" + r"PROSE: /[^{](.|\n)*/" if free else "body: calls"
        calls = f"calls: {self.opening.lark}? " + repeated("function", '"; "', parallel)
        return "\n".join((text, calls, json_calls("function", tools, "parameters")))

    def call(self, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        return read_json_call(source, output)

    def read(self, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        while not source.text and not source.ended:
            yield
        tag = self.opening.text if source.text.startswith(self.opening.text) else ""
        if not tag and not source.text.startswith("{"):
            return
        source.text = source.text[len(tag) :]
        more = True
        while more:
            before = output.num_calls
            yield from read_call(self.call(tools, source, output), tag, source, output)
            if output.num_calls == before or not output.calls_complete:
                return
            yield from source.blanks()
            more = source.text.startswith(";")
            source.text = source.text[more:]
