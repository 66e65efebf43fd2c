"""Plans made from a chat template: which grammar the engine holds an answer to, and how its text is read."""

from functools import partial

from nanovllm.sampling_params import StructuredOutput
from nanovllm.serve.parsers.calls import ToolFamily
from nanovllm.serve.parsers.families import FORMS, HARMONY, REASONING_TAGS, reasoning_of, tool_family_of
from nanovllm.serve.parsers.harmony import Harmony, HarmonyDetokenizer
from nanovllm.serve.parsers.plan import Plan, ReasoningState, term
from nanovllm.serve.parsers.reader import Output, Source, Steps
from nanovllm.serve.parsers.tags import Tags
from nanovllm.serve.parsers.tools import ToolChoice
from nanovllm.text.checkpoint import CheckpointTokenizer

_TEXT = r"TEXT: /(.|\n)*/"


class OutputParser:
    """Makes plans for one model."""

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
        self._family = None if form is None else ToolFamily(form, tags)
        names = REASONING_TAGS.get(self.reasoning or "", ())
        self._thinks = tuple(tags[name] for name in names)
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
        """Plan for the answer to a rendered chat. Raises ValueError if the model's family has no tools or the requested
        features do not go together."""
        if self._harmony is not None:
            return self._harmony_plan(self._harmony, prompt, choice, structured)
        if choice is not None and self._family is None:
            raise ValueError("tools: this model's chat template has no tool calls that the server knows")
        state = self._state(prompt)
        marks = [*self._thinks]
        if choice is not None and self._family is not None:
            marks += self._family.marks
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

    def _harmony_plan(
        self, harmony: Harmony, prompt: str, choice: ToolChoice | None, structured: StructuredOutput | None
    ) -> Plan:
        if not harmony.begins_message(prompt):  # the prompt ends within a message: what follows is the rest of it
            return Plan(structured, "none", choice, (), (), self._tokenizer, None)
        return Plan(
            harmony.grammar(choice, structured),
            "optional",
            choice,
            harmony.marks,
            (),
            self._tokenizer,
            partial(harmony.read, choice is not None),
            HarmonyDetokenizer,
        )

    def _state(self, prompt: str) -> ReasoningState:
        """State in which the rendered prompt leaves reasoning: templates open the tag, write an empty pair, or leave it
        to the model."""
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
            return self._grammar(state, "answer", "gap ", f"answer: {term(wanted)}")
        is_free = choice.mode == "auto" and wanted is None
        calls = self._family.grammar(choice.tools, choice.parallel, is_free)
        if is_free:
            return self._grammar(state, "body", "", calls)
        if choice.mode == "auto" and wanted is not None:
            return self._grammar(state, "(answer | body)", "gap ", f"{calls}\nanswer: {term(wanted)}")
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
        start = reasoned if state == "open" else f"{answer} | gap {opening.lark} {reasoned}"
        return StructuredOutput(grammar=f"start: {start}\n{thoughts}\ngap: /\\n{{0,2}}/\n{_TEXT}\n{rules}")

    # --- reading

    def _read(self, state: ReasoningState, choice: ToolChoice | None, source: Source, output: Output) -> Steps:
        if state != "none":
            yield from self._read_reasoning(state, source, output)
        if choice is not None and self._family is not None:
            yield from self._family.read(choice.tools, source, output)

    def _read_reasoning(self, state: ReasoningState, source: Source, output: Output) -> Steps:
        opening, closing = (tag.text for tag in self._thinks)
        if state == "optional":
            while opening.startswith(text := source.text.lstrip("\n")) and text != opening and not source.ended:
                yield
            if not text.startswith(opening):
                return
            source.text = text[len(opening) :]
        output.begin("reasoning", strips=True)
        if (yield from source.until([closing], output.text)):
            output.begin("content", strips=True)


def _known(option: str, name: str, known: list[str]) -> str | None:
    if name != "none" and name not in known:
        raise ValueError(f"{option}={name[:80]!r}: must be auto, none or one of {', '.join(known)}")
    return None if name == "none" else name
