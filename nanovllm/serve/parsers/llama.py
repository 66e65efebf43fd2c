"""Llama 3: {"name": ..., "parameters": ...}, maybe after <|python_tag|> or between words, several joined by ;"""

from nanovllm.serve.parsers.family import ToolFamily, json_calls, read_call, read_json_call, repeated
from nanovllm.serve.parsers.reader import Output, Source, Steps
from nanovllm.serve.parsers.tools import Tool


class Llama(ToolFamily):
    tags = ("<|python_tag|>",)

    def grammar(self, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        text = r'body: "" | PROSE | calls' + "\n" + r"PROSE: /[^{](.|\n)*/" if free else "body: calls"
        calls = f"calls: {self.opening.lark}? " + repeated("function", '"; "', parallel)
        return "\n".join((text, calls, json_calls(tools, "parameters")))

    def call(self, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        return read_json_call(source, output, {tool.name for tool in tools})

    def read(self, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        tag, has_words = self.opening.text, False

        def emit(text: str) -> None:
            nonlocal has_words
            has_words = has_words or bool(text.strip())
            output.text(text)

        while found := (yield from source.until([tag, "{"], emit)):
            if found != tag:
                source.text, found = found + source.text, ""
            num_calls = output.num_calls
            yield from read_call(self.call(tools, source, output), found, source, output, has_words)
            if output.num_calls > num_calls and output.calls_complete:
                yield from source.blanks()
                if source.text.startswith(";"):
                    source.text = source.text[1:]
                    yield from source.blanks()
