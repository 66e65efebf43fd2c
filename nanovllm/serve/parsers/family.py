"""Interface of a family of models to its tool calls, and the one that several families share."""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection

from nanovllm.serve.parsers.reader import Malformed, Output, Source, Steps
from nanovllm.serve.parsers.tags import Tags
from nanovllm.serve.parsers.tools import Tool

MAX_CALLS = 128


class ToolFamily(ABC):
    """Tool calls as models of one family write them: as a grammar, and read back."""

    tags: tuple[str, ...]
    """Tags that calls are made of; the first begins a call."""

    def __init__(self, tags: Tags) -> None:
        self.marks = tuple(tags[name] for name in self.tags)
        self.opening = self.marks[0]

    @abstractmethod
    def grammar(self, tools: tuple[Tool, ...], parallel: bool, free: bool) -> str:
        """Lark rules, `body` among them: calls of `tools`, one or more; `free` True: or any TEXT (a terminal that is
        there), which may also come before calls where the family's models write it so."""

    @abstractmethod
    def call(self, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        """Reads what follows the tag that begins a call. Raises Malformed."""

    def read(self, tools: tuple[Tool, ...], source: Source, output: Output) -> Steps:
        """Reads content and calls up to the end of the text."""
        while (yield from source.until([self.opening.text], output.text)):
            yield from read_call(self.call(tools, source, output), self.opening.text, source, output)

    def body(self, free: bool) -> str:
        """The rule `body` for calls that begin with the tag; the rule `calls` is what follows it."""
        if not free:
            return f"body: {self.opening.lark} calls"
        if self.opening.token_id is not None:
            return f"body: TEXT ({self.opening.lark} calls)?"
        return f"body: TEXT | opened calls\nopened[lazy]: TEXT {self.opening.lark}"

    def tagged_calls(self, parallel: bool, free: bool, *rules: str, gap: str = r"/\n{0,2}/ ") -> str:
        """All rules, for calls that each begin with the tag, after a `gap`. rules: `call`, the rest of one, and its
        parts."""
        calls = "calls: " + repeated("call", gap + self.opening.lark, parallel)
        return "\n".join((self.body(free), calls, *rules))


def repeated(call: str, between: str, parallel: bool) -> str:
    """One call, or several with something between them."""
    return f"{call} ({between} {call}){{0,{MAX_CALLS - 1}}}" if parallel else call


def one_of(rule: str, terms: list[str]) -> str:
    return f"{rule}: " + "\n  | ".join(terms)


def json_calls(tools: tuple[Tool, ...], arguments: str) -> str:
    """The rule `function`: {"name": ..., "arguments": ...}."""
    heads = [json.dumps(f'{{"name": {json.dumps(tool.name)}, "{arguments}": ') for tool in tools]
    return one_of("function", [f'{head} {tool.arguments()} "}}"' for head, tool in zip(heads, tools, strict=True)])


def read_json_call(source: Source, output: Output, names: Collection[str] | None = None) -> Steps:
    """Reads {"name": ..., "arguments": ...} or "parameters". Raises Malformed where it is none, or where its name is
    not one of `names`."""
    yield from source.blanks()
    yield from source.expect("{")
    named = False
    while True:
        yield from source.blanks()
        key = yield from source.string()
        yield from source.blanks()
        yield from source.expect(":")
        yield from source.blanks()
        if key == "name":
            name = yield from source.string()
            if names is not None and name not in names:
                raise Malformed
            output.call(name)
            source.taken, named = None, True
        elif key in ("arguments", "parameters") and named:
            yield from source.value(output.arguments)
        else:
            yield from source.value(lambda _: None)
        yield from source.blanks()
        if (yield from source.expect(",", "}")) == "}":
            break
    if not named:
        raise Malformed
    output.calls_complete = True


def read_call(steps: Steps, tag_text: str, source: Source, output: Output, keeps_cut: bool = False) -> Steps:
    """Reads a call with `steps`, content follows; what turns out to be none is text, from its tag on. One that the
    output's end cuts off before its name is nothing, or, with `keeps_cut`, text."""
    num_calls, source.taken = output.num_calls, tag_text
    try:
        yield from steps
        output.begin("content", strips=True)
    except Malformed:
        if output.num_calls == num_calls and source.taken and (source.text or not source.ended or keeps_cut):
            output.text(source.taken)
    source.taken = None
