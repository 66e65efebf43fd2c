"""Syntaxes made from a chat template: which grammar the engine holds an answer to, and how its text is read."""

import json
from functools import partial

from nanovllm.engine.sampling.grammar_limits import is_too_long
from nanovllm.sampling_params import StructuredOutput
from nanovllm.serve.parsers.bare_keys import BareKeys
from nanovllm.serve.parsers.calls import ToolFamily
from nanovllm.serve.parsers.families import (
    FORMS,
    HARMONY,
    REASONING_LABELS,
    REASONING_TAGS,
    answer_tags_of,
    reasoning_of,
    tool_family_of,
)
from nanovllm.serve.parsers.harmony import Harmony, HarmonyDetokenizer
from nanovllm.serve.parsers.pythonic import Pythonic
from nanovllm.serve.parsers.reader import Output, Source, Steps
from nanovllm.serve.parsers.syntax import ReasoningState, Syntax, term
from nanovllm.serve.parsers.tags import Tags
from nanovllm.serve.parsers.tools import ToolChoice
from nanovllm.text.checkpoint import CheckpointTokenizer

_KINDS: dict[str, type[ToolFamily]] = {"gemma4": BareKeys, "lfm2": Pythonic, "llama4_pythonic": Pythonic}
"""Families whose arguments are not JSON and have no parameters in tags."""
_TEXT = r"TEXT: /(.|\n)*/"
_GAP = r"gap: /\n{0,3}/"


class OutputParser:
    """Makes the syntaxes of one model's answers."""

    def __init__(
        self, tokenizer: CheckpointTokenizer, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> None:
        """"auto" chooses by the chat template's text, "none" is none. Raises ValueError for an unknown name."""
        self._tokenizer, tags = tokenizer, Tags(tokenizer)
        template = tokenizer.template(with_tools=True).source if tokenizer.has_chat_template else ""
        self.tool_family, self.reasoning = tool_family_of(template), reasoning_of(template)
        """The names of the parsers in use, None for none."""
        if tool_call_parser != "auto":
            self.tool_family = _known("tool_call_parser", tool_call_parser, [*FORMS, HARMONY])
        if reasoning_parser != "auto":
            self.reasoning = _known("reasoning_parser", reasoning_parser, [*REASONING_TAGS, HARMONY])
        if (self.tool_family == HARMONY) != (self.reasoning == HARMONY):
            raise ValueError("tool_call_parser, reasoning_parser: 'harmony' must be both of them or none")
        self._harmony = Harmony(tags) if self.reasoning == HARMONY else None
        form = FORMS.get(self.tool_family or "")
        kind = _KINDS.get(self.tool_family or "", ToolFamily)
        self._family = None if form is None else kind(form, tags)
        names = REASONING_TAGS.get(self.reasoning or "", ())
        self._thinks = tuple(tags[name] for name in names)
        self._around = tuple(tags[name] for name in (answer_tags_of(template) if self._thinks else ()))
        """Tags around the words of an answer."""
        self._label = REASONING_LABELS.get(self.reasoning or "", "")
        self._opened = tuple(name + label for name in names[:1] for label in ("", self._label.rstrip()))
        """Ends of prompts after which an answer begins with its reasoning."""
        added = tokenizer.added_tokens_decoder.values()
        self._boundaries = [each.content for each in added if each.special and each.content not in names]
        """Tokens that no answer has within its text: what stands before one is no part of it."""
        self._left_to_model = self._thinks != () and not self._template_opens()

    def _template_opens(self) -> bool:
        """Whether the template itself begins the reasoning, where it is asked for: then a prompt that ends without the
        tag wants none."""
        try:
            kwargs = {"enable_thinking": True, "thinking": True}
            prompt = self._tokenizer.render_chat([{"role": "user", "content": "x"}], chat_template_kwargs=kwargs)
        except ValueError:
            return False
        return prompt.rstrip().endswith(self._opened)

    def syntax(self, prompt: str, choice: ToolChoice | None = None, wanted: StructuredOutput | None = None) -> Syntax:
        """Syntax of the answer to a rendered chat. Raises ValueError if the model's family has no tools or the
        requested features do not go together."""
        if self._harmony is not None:
            return self._harmony_syntax(self._harmony, prompt, choice, wanted)
        if choice is not None and self._family is None:
            raise ValueError("tools: this model's chat template has no tool calls that the server knows")
        state, thinks = self._state(prompt), self._thinks
        marks = [*thinks, *self._around]
        is_closed = prompt.endswith(tuple(tag.name for tag in thinks[1:]))
        is_new = prompt.rstrip().endswith((*self._opened, *(tag.name for tag in thinks)))
        if choice is not None and self._family is not None:
            marks += self._family.marks
            thinks += (self._family.opening,) if self._family.is_tagged else ()
        reads = bool(choice is not None or state != "none" or self._around or is_closed)
        return Syntax(
            self._structured(state, choice, wanted),
            state,
            choice,
            tuple(marks),
            thinks if state != "none" else (),
            self._tokenizer,
            partial(self._read, state, choice, is_new) if reads else None,
        )

    def _harmony_syntax(
        self, harmony: Harmony, prompt: str, choice: ToolChoice | None, wanted: StructuredOutput | None
    ) -> Syntax:
        if not harmony.begins_message(prompt):  # the prompt ends within a message: what follows is the rest of it
            return Syntax(wanted, "none", choice, (), (), self._tokenizer, None)
        return Syntax(
            harmony.grammar(choice, wanted),
            "optional",
            choice,
            harmony.marks,
            (),
            self._tokenizer,
            partial(harmony.read, choice is not None),
            HarmonyDetokenizer,
        )

    def _state(self, prompt: str) -> ReasoningState:
        """State in which the rendered prompt leaves reasoning: templates and beginnings of an answer open the tag,
        write a pair, or leave it to the model."""
        if not self._thinks:
            return "none"
        opened, closed = (prompt.rfind(tag.name) for tag in self._thinks)
        last = max(opened, closed)
        if last >= 0 and not any(token in prompt[last:] for token in self._boundaries):
            return "open" if opened > closed else "none"
        return "optional" if self._left_to_model else "none"

    # --- grammar

    def _structured(
        self, state: ReasoningState, choice: ToolChoice | None, wanted: StructuredOutput | None
    ) -> StructuredOutput | None:
        if choice is None or self._family is None:
            if wanted is None or state == "none":
                return wanted
            return self._grammar(state, "answer", "gap ", f"answer: {term(wanted)}")
        made = self._calling(self._family, state, choice, wanted)
        is_long = is_too_long(made.grammar or "")  # in forms whose rules are more than the schemas are long
        return self._calling(self._family, state, choice.freed(), wanted) if is_long else made

    def _calling(
        self, family: ToolFamily, state: ReasoningState, choice: ToolChoice, wanted: StructuredOutput | None
    ) -> StructuredOutput:
        is_free, answer = choice.mode == "auto" and wanted is None, "body"
        rules = family.grammar(choice.tools, choice.parallel, is_free)
        if choice.mode == "auto" and wanted is not None:  # with calls alone there is no content to hold to `wanted`
            answer, rules = "(answer | body)", f"{rules}\nanswer: {term(wanted)}"
        return self._grammar(state, answer, "" if is_free else "gap ", rules, family.is_tagged)

    def _grammar(
        self, state: ReasoningState, answer: str, gap: str, rules: str, has_early: bool = False
    ) -> StructuredOutput:
        """Reasoning as the state has it, and then what `answer` names; `gap`: what may stand between the two. Calls may
        also end the reasoning, where the rule `early` is there."""
        if state == "none":
            return StructuredOutput(grammar=f"start: {gap}{answer}\n{_GAP}\n{_TEXT}\n{rules}")
        opening, closing = self._thinks
        reasoned = f"thoughts {gap}{answer}"
        if has_early:
            reasoned = f"({reasoned} | early)"
        label = f"{json.dumps(self._label)} " if self._label else ""
        start = reasoned if state == "open" else f"{answer} | gap {opening.lark} {label}{reasoned}"
        thoughts = closing.text_before("thoughts")
        return StructuredOutput(grammar=f"start: {start}\n{thoughts}\n{_GAP}\n{_TEXT}\n{rules}")

    # --- reading

    def _read(
        self, state: ReasoningState, choice: ToolChoice | None, is_new: bool, source: Source, output: Output
    ) -> Steps:
        """`is_new`: there is no text behind the tag of the reasoning in the prompt."""
        if is_new and state == "none":
            output.begin("content", strips=True)
        if state != "none":
            yield from self._read_reasoning(state, choice, is_new, source, output)
        around = [tag.text for tag in self._around]
        if choice is not None and self._family is not None:
            yield from self._family.read(choice.tools, source, output, around)
            return
        for text in around:
            if (yield from source.until([text], output.text)):
                output.begin("content", strips=True)

    def _read_reasoning(
        self, state: ReasoningState, choice: ToolChoice | None, is_new: bool, source: Source, output: Output
    ) -> Steps:
        opening, closing = (tag.text for tag in self._thinks)
        if state == "optional":
            while opening.startswith(text := source.text.lstrip("\n")) and text != opening and not source.ended:
                yield
            if not text.startswith(opening):
                return
            source.text = text[len(opening) :]
            while self._label.startswith(source.text) and source.text != self._label and not source.ended:
                yield
            source.text = source.text.removeprefix(self._label)
        output.begin("reasoning", strips=is_new or state == "optional")
        ends = [closing]
        if choice is not None and self._family is not None and self._family.is_tagged:
            ends.append(self._family.opening.text)
        while (found := (yield from source.until(ends, output.text))) not in ("", closing):
            assert choice is not None and self._family is not None
            yield from self._family.read_opened(choice.tools, found, True, source, output)
            if output.num_calls:
                break
        if found:
            output.begin("content", strips=True)


def _known(option: str, name: str, known: list[str]) -> str | None:
    if name != "none" and name not in known:
        raise ValueError(f"{option}={name[:80]!r}: must be auto, none or one of {', '.join(known)}")
    return None if name == "none" else name
