"""The plan for one answer: which grammar the engine holds it to, and how its text is read."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from nanovllm.sampling_params import StructuredOutput
from nanovllm.serve.parsers.family import ToolFamily
from nanovllm.serve.parsers.hermes import Hermes
from nanovllm.serve.parsers.llama import Llama
from nanovllm.serve.parsers.mistral import MistralList, MistralNamed
from nanovllm.serve.parsers.qwen_coder import QwenCoder
from nanovllm.serve.parsers.reader import Output, Reader, Source, Steps, new_call_id
from nanovllm.serve.parsers.tags import MarkedDetokenizer, Tag, Tags
from nanovllm.serve.parsers.tools import ToolChoice, json_term
from nanovllm.serve.text import FrontTokenizer

TOOL_FAMILIES: dict[str, ToolFamily] = {
    "qwen3_coder": QwenCoder(),
    "hermes": Hermes(),
    "mistral": MistralNamed(),
    "mistral_list": MistralList(),
    "llama3_json": Llama(),
}
_MARKS_OF_FAMILY = (  # the first whose text is in a template
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[ARGS]", "mistral"),
    ("[TOOL_CALLS]", "mistral_list"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)
REASONING_TAGS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}

_TEXT = r"TEXT: /(.|\n)*/"

ReasoningState = Literal["none", "open", "optional"]
"""Whether an answer begins within reasoning, may begin with it, or has none."""


def tool_family_of(template: str) -> str | None:
    """The family whose calls a chat template writes."""
    return next((family for mark, family in _MARKS_OF_FAMILY if mark in template), None)


def reasoning_of(template: str) -> str | None:
    """The kind of reasoning that a chat template knows."""
    return next((kind for kind, (_, closing) in REASONING_TAGS.items() if closing in template), None)


@dataclass(frozen=True)
class Plan:
    """How one answer is made and read. Readers and detokenizers are made for each completion."""

    structured: StructuredOutput | None
    """For SamplingParams.structured_outputs."""
    reasoning: ReasoningState
    choice: ToolChoice | None
    marks: tuple[Tag, ...]
    thinks: tuple[Tag, ...]
    tokenizer: FrontTokenizer
    program: Callable[[Source, Output], Steps] | None

    def detokenizer(self, skip_special_tokens: bool = True) -> MarkedDetokenizer:
        inner = self.tokenizer.detokenizer(skip_special_tokens)
        return MarkedDetokenizer(inner, self.marks, self.thinks, self.reasoning == "open")

    def reader(self, new_id: Callable[[], str] = new_call_id) -> Reader | None:
        """None where the text is content and nothing else."""
        if self.program is None:
            return None
        stand_ins = {ord(tag.text): tag.name for tag in self.marks if tag.token_id is not None}
        return Reader(self.program, Output(new_id, stand_ins))

    def finish_reason(self, engine_reason: str, reader: Reader | None) -> str:
        """OpenAI's: "tool_calls" only where the model ended by itself after whole calls that it chose to make."""
        if engine_reason != "stop" or self.choice is None or reader is None or self.choice.mode == "named":
            return engine_reason
        return "tool_calls" if reader.num_calls and reader.calls_complete else "stop"


class OutputParser:
    """Makes plans for one model."""

    def __init__(
        self, tokenizer: FrontTokenizer, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> None:
        """"auto" chooses by the chat template's text, "none" is none. Raises ValueError for an unknown name."""
        self._tokenizer, self._tags = tokenizer, Tags(tokenizer)
        template = tokenizer.template(with_tools=True).source if tokenizer.has_chat_template else ""
        self.tool_family, self.reasoning = tool_family_of(template), reasoning_of(template)
        """The names of the parsers in use, None for none."""
        if tool_call_parser != "auto":
            self.tool_family = _known("tool_call_parser", tool_call_parser, [*TOOL_FAMILIES])
        if reasoning_parser != "auto":
            self.reasoning = _known("reasoning_parser", reasoning_parser, [*REASONING_TAGS])
        self._family = TOOL_FAMILIES[self.tool_family] if self.tool_family is not None else None
        names = REASONING_TAGS[self.reasoning] if self.reasoning is not None else ()
        self._thinks = tuple(self._tags[name] for name in names)
        self._left_to_model = self._thinks != () and not self._template_opens(self._thinks[0].name)

    def _template_opens(self, opening: str) -> bool:
        """Whether the template itself begins the reasoning, where it is asked for: then a prompt that ends without the
        tag wants none."""
        try:
            kwargs = {"enable_thinking": True, "thinking": True}
            prompt = self._tokenizer.render_chat([{"role": "user", "content": "x"}], chat_template_kwargs=kwargs)
        except ValueError:
            return False
        return prompt.rstrip().endswith(opening)

    def plan(self, prompt: str, choice: ToolChoice | None = None, structured: StructuredOutput | None = None) -> Plan:
        """For the answer to a rendered chat. Raises ValueError where the model's family has no tools or what is asked
        for does not go together."""
        if choice is not None and self._family is None:
            raise ValueError("tools: this model's chat template has no tool calls that the server knows")
        state = self._state(prompt)
        marks = [*self._thinks]
        if choice is not None and self._family is not None:
            marks += self._family.marks(self._tags)
        reads = bool(choice is not None or state != "none")
        return Plan(
            self._structured(state, choice, structured),
            state,
            choice,
            tuple(marks),
            self._thinks if state != "none" else (),
            self._tokenizer,
            partial(self._read, state, choice) if reads else None,
        )

    def _state(self, prompt: str) -> ReasoningState:
        """As the rendered prompt leaves it: templates open the tag, write an empty pair, or leave it to the model."""
        if not self._thinks:
            return "none"
        end = prompt.rstrip()
        if end.endswith(self._thinks[0].name):
            return "open"
        return "optional" if self._left_to_model and not end.endswith(self._thinks[1].name) else "none"

    # --- grammar

    def _structured(
        self, state: ReasoningState, choice: ToolChoice | None, wanted: StructuredOutput | None
    ) -> StructuredOutput | None:
        if choice is None or self._family is None:
            if wanted is None or state == "none":
                return wanted
            return self._grammar(state, "answer", "gap ", f"answer: {_term(wanted)}")
        is_free = choice.mode == "auto" and wanted is None
        calls = self._family.grammar(self._tags, choice.tools, choice.parallel, is_free)
        if is_free:
            return self._grammar(state, "body", "", calls)
        if choice.mode == "auto" and wanted is not None:
            return self._grammar(state, "(answer | body)", "gap ", f"{calls}\nanswer: {_term(wanted)}")
        return self._grammar(state, "body", "gap ", calls)  # with calls alone there is no content to hold to `wanted`

    def _grammar(self, state: ReasoningState, answer: str, gap: str, rules: str) -> StructuredOutput:
        """Reasoning as the state has it, and then what `answer` names; `gap`: what may stand between the two."""
        if state == "none":
            return StructuredOutput(grammar=f"start: {answer}\n{_TEXT}\n{rules}")
        opening, closing = self._thinks
        thoughts = f"thoughts: TEXT {closing.lark}"
        if closing.token_id is None:
            thoughts = f"thoughts[lazy]: TEXT {closing.lark}"
        reasoned = f"thoughts {gap}{answer}"
        start = reasoned if state == "open" else f"{answer} | {opening.lark} {reasoned}"
        return StructuredOutput(grammar=f"start: {start}\n{thoughts}\ngap: /\\n{{0,2}}/\n{_TEXT}\n{rules}")

    # --- reading

    def _read(self, state: ReasoningState, choice: ToolChoice | None, source: Source, output: Output) -> Steps:
        if state != "none":
            yield from self._read_reasoning(state, source, output)
        if choice is not None and self._family is not None:
            yield from self._family.read(self._tags, choice.tools, source, output)

    def _read_reasoning(self, state: ReasoningState, source: Source, output: Output) -> Steps:
        opening, closing = (tag.text for tag in self._thinks)
        if state == "optional":
            while opening.startswith(source.text) and source.text != opening and not source.ended:
                yield
            if not source.text.startswith(opening):
                return
            source.text = source.text[len(opening) :]
        output.begin("reasoning", strips=True)
        if (yield from source.until([closing], output.text)):
            output.begin("content", strips=True)


def _term(wanted: StructuredOutput) -> str:
    """A constraint as a term of a Lark grammar."""
    if wanted.json is not None:
        return json_term(json.loads(wanted.json) if isinstance(wanted.json, str) else wanted.json)
    if wanted.json_object:
        return json_term({"type": "object"})
    if wanted.choice is not None:
        return "(" + " | ".join(json.dumps(each) for each in wanted.choice) + ")"
    if wanted.regex is not None:
        return "/" + wanted.regex.replace("/", r"\/") + "/"
    raise ValueError("structured_outputs.grammar: cannot go with reasoning or tools")


def _known(option: str, name: str, known: list[str]) -> str | None:
    if name != "none" and name not in known:
        raise ValueError(f"{option}={name[:80]!r}: must be auto, none or one of {', '.join(known)}")
    return None if name == "none" else name
