"""The syntax of one answer: what it is held to, and how its text is read."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from nanovllm.engine.sampling.grammar_compiler import regex_term
from nanovllm.engine.sampling.grammar_limits import check_text
from nanovllm.errors import short
from nanovllm.sampling_params import StructuredOutput
from nanovllm.serve.parsers.reader import Output, Reader, Source, Steps
from nanovllm.serve.parsers.tags import MarkedDetokenizer, Tag
from nanovllm.serve.parsers.tools import ToolChoice, json_term
from nanovllm.text.checkpoint import CheckpointTokenizer

_PLACE = re.compile(r"at (\d+)\(\d+\): ")
_EXCERPT = re.compile(r"\s\d+ \| ")
"""The place in a compiler's words, which comes first, and the lines of the grammar around it, which come last."""
ReasoningState = Literal["none", "open", "optional"]
"""Whether an answer begins within reasoning, may begin with it, or has none."""


@dataclass(frozen=True)
class Syntax:
    """Syntax of one answer: its grammar and how it is read. Readers and detokenizers are made for each completion."""

    structured: StructuredOutput | None
    """Value for SamplingParams.structured_outputs."""
    reasoning: ReasoningState
    choice: ToolChoice | None
    marks: tuple[Tag, ...]
    thinks: tuple[Tag, ...]
    tokenizer: CheckpointTokenizer
    program: Callable[[Source, Output], Steps] | None
    detokenizer_kind: type[MarkedDetokenizer] = MarkedDetokenizer

    def detokenizer(self, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> MarkedDetokenizer:
        inner = self.tokenizer.detokenizer(skip_special_tokens, prompt)
        return self.detokenizer_kind(inner, self.marks, self.thinks, self.reasoning == "open")

    def tags_seen(self, skip_special_tokens: bool) -> dict[int, str]:
        """Texts of tags that the engine sees, by the characters that stand for them in a detokenizer's text."""
        known = self.tokenizer.added_tokens_decoder
        return {
            ord(tag.text): "" if skip_special_tokens and known[tag.token_id].special else tag.name
            for tag in self.marks
            if tag.token_id is not None
        }

    def reader(self) -> Reader | None:
        """Reader for one completion; None where the text is content and nothing else."""
        if self.program is None:
            return None
        stand_ins = {ord(tag.text): tag.name for tag in self.marks if tag.token_id is not None}
        return Reader(self.program, Output(stand_ins))

    def blame(self, why: str) -> tuple[str | None, str]:
        """The name of the tool whose part of the grammar does not compile, None where it is another part, and what is
        wrong with it. `why`: the compiler's words."""
        place = _PLACE.match(why)
        reason = _EXCERPT.split(why)[0][place.end() if place else 0 :]
        if place is None or self.choice is None or self.structured is None or self.structured.grammar is None:
            return None, reason
        lines, number = self.structured.grammar.split("\n"), int(place[1]) - 1
        rule = next((line for line in lines[number::-1] if line[0] != " "), "")
        prefix = f" {rule.partition('_')[0]}_"  # of the rules that are one tool's alone
        for name in (tool.name for tool in self.choice.tools):
            own = [line for line in lines if re.match(rf'(\w+:|  \|) \(?"{name}" ', line)]
            if lines[number] in own or any(prefix in line for line in own):
                return name, reason
        return None, reason

    def finish_reason(self, engine_reason: str, reader: Reader | None) -> str:
        """OpenAI's: "tool_calls" only where the model ended by itself after whole calls that it chose to make."""
        if engine_reason != "stop" or self.choice is None or reader is None or self.choice.mode == "named":
            return engine_reason
        return "tool_calls" if reader.output.num_calls and reader.output.calls_complete else "stop"


def term(wanted: StructuredOutput) -> str:
    """A constraint as a term of a Lark grammar."""
    if wanted.json is not None:
        try:
            text = wanted.json if isinstance(wanted.json, str) else json.dumps(wanted.json)
            check_text("json", text)
            return json_term(json.loads(text))
        except (ValueError, TypeError) as error:
            raise ValueError(f"structured_outputs.json: not a JSON schema: {short(error)}") from None
    if wanted.json_object:
        return json_term({"type": "object"})
    if wanted.choice is not None:
        return "(" + " | ".join(json.dumps(each) for each in wanted.choice) + ")"
    if wanted.regex is not None:
        return regex_term(wanted.regex)
    raise ValueError("structured_outputs.grammar: cannot go with reasoning or tools")
