"""gpt-oss: an answer is messages in channels (OpenAI's harmony format). The prompt ends with <|start|>assistant.

    <|channel|>analysis<|message|> ... <|end|><|start|>assistant              reasoning
    <|channel|>commentary<|message|> ... <|end|><|start|>assistant            content before calls
    <|channel|>final<|message|> ... <|return|>                                content
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|> ... <|call|>

A call ends the answer, so there is one at most. Its receiver may also stand before the channel.
"""

import json
import re
from collections.abc import Callable, Generator
from typing import Any

from nanovllm.sampling_params import StructuredOutput
from nanovllm.serve.parsers.calls import one_of
from nanovllm.serve.parsers.reader import Output, Source, Steps
from nanovllm.serve.parsers.syntax import term
from nanovllm.serve.parsers.tags import MarkedDetokenizer, Tag, Tags
from nanovllm.serve.parsers.tools import ToolChoice
from nanovllm.serve.parsers.values import json_type

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"
_FUNCTIONS = "functions."
_RECEIVER = re.compile(r"to=([A-Za-z0-9_.-]+)")
_ADDRESS = " to="


class Harmony:
    """The format in one tokenizer's tokens."""

    def __init__(self, tags: Tags) -> None:
        """Raises ValueError where the tokenizer has no tokens for it."""
        self._tags = {name: tags[name] for name in (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)}
        self.marks: tuple[Tag, ...] = tuple(self._tags.values())
        missing = [tag.name for tag in self.marks if tag.token_id is None]
        if missing:
            raise ValueError(f"reasoning_parser='harmony': the tokenizer has no token {missing[0]}")
        self._ends = [self._tags[name].text for name in (END, RETURN, CALL)]

    def begins_message(self, prompt: str) -> bool:
        """Whether a rendered chat ends where a message's channel comes."""
        return prompt.rstrip().endswith(START + "assistant")

    # -- grammar ------------------------------------------------------------------------------------------------

    def grammar(self, choice: ToolChoice | None, wanted: StructuredOutput | None) -> StructuredOutput | None:
        """Grammar of the answer; None where nothing is asked for, so the answer is free."""
        if choice is None and wanted is None:
            return None
        start, end, message, channel, constrain, *_ = (tag.lark for tag in self.marks)
        rules = [
            f'earlier: {channel} /analysis|commentary/ {message} TEXT {end} {start} "assistant"',
            f'form: "" | " json" | /( )?/ {constrain} "json"',
            f'final: {channel} "final" form {message} ' + ("TEXT" if wanted is None else term(wanted)),
            r"TEXT: /(.|\n)*/",
        ]
        last = "final"
        if choice is not None:
            last = "call" if choice.mode != "auto" else "final | call"
            tools = [*enumerate(choice.tools)]
            rules += [
                f'call: {channel} "commentary to={_FUNCTIONS}" named | "{_ADDRESS}{_FUNCTIONS}" addressed',
                one_of("named", [f"{json.dumps(tool.name)} form {message} a{i}_arguments" for i, tool in tools]),
                one_of(
                    "addressed",
                    [f'{json.dumps(t.name)} {channel} "commentary" form {message} a{i}_arguments' for i, t in tools],
                ),
                *(f"a{i}_arguments: {tool.arguments}" for i, tool in tools),
            ]
        return StructuredOutput(grammar="\n".join([f"start: earlier* ({last})", *rules]))

    # -- reading ------------------------------------------------------------------------------------------------

    def read(self, takes_calls: bool, source: Source, output: Output) -> Steps:
        """`takes_calls`: whether tools were given. Text outside of messages is content where none follows it, else
        nothing."""
        has_content = False
        while (header := (yield from self._header(source, output))) is not None:
            found = _RECEIVER.search(header)
            receiver = found[1] if found else ""
            if takes_calls and receiver.startswith(_FUNCTIONS):
                yield from self._call(receiver.removeprefix(_FUNCTIONS), source, output)
            elif receiver or self._tags[CHANNEL].text + "analysis" in header:
                output.begin("reasoning")
                yield from self._text(source, output.text)
            else:
                output.begin("content")
                if has_content:
                    output.text("\n\n")
                has_content = True
                yield from self._text(source, output.text)

    def _header(self, source: Source, output: Output) -> Generator[None, None, str | None]:
        """Takes the next message's header; None: there is no further message."""
        start, channel, message = (self._tags[name].text for name in (START, CHANNEL, MESSAGE))
        outside: list[str] = []
        found = ""
        while True:
            while not source.ended and _ADDRESS.startswith(source.text) and source.text != _ADDRESS:
                yield
            if found != start and not source.text.startswith(_ADDRESS):
                found = yield from source.until([start, channel], outside.append)
                if not found:
                    output.begin("content")
                    output.text("".join(outside))
                    return None
            pieces = [found]
            found = yield from source.until([message, start, *self._ends], pieces.append)
            if found in ("", message):  # "": it was cut in a header
                return "".join(pieces) if found else None

    def _text(self, source: Source, emit: Callable[[str], None]) -> Steps:
        """Takes a message's text and its end. The next message ends it, too."""
        following = [self._tags[START].text, self._tags[CHANNEL].text]
        if (found := (yield from source.until([*self._ends, *following], emit))) in following:
            source.text = found + source.text

    def _call(self, name: str, source: Source, output: Output) -> Steps:
        pieces: list[str] = []

        def emit(text: str) -> None:
            pieces.append(text)
            output.arguments(text)

        output.call(name)
        yield from self._text(source, emit)
        output.calls_complete = json_type("".join(pieces)) is not None


class HarmonyDetokenizer(MarkedDetokenizer):
    """Counts the tokens of messages in the channel analysis."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._stand_ins = {tag.text: tag.name for tag in args[1]}
        self._header: str | None = ""
        """Header of the current message, until its text begins."""
        self._is_analysis = False
        self._count = self._num_reasoning = 0

    def push(self, token_id: int) -> str:
        text = super().push(token_id)
        name = self._stand_ins.get(text[-1:])
        if name == START:
            self._num_reasoning = self.num_reasoning_tokens
            self._header, self._is_analysis, self._count = "", False, 0
        self._count += 1
        if self._header is not None:
            self._header += text
            if name == MESSAGE:
                self._is_analysis, self._header = "analysis" in self._header, None
        elif name == END and self._is_analysis:
            self._num_reasoning += self._count
            self._is_analysis = False
        return text

    @property
    def num_reasoning_tokens(self) -> int:
        return self._num_reasoning + (self._count if self._is_analysis else 0)
