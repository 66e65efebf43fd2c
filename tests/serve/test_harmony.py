"""gpt-oss: messages in channels, read back at any cut and held to by grammars."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import TAGS, Model, calls, message_of, steps, words

from nanovllm import StructuredOutput
from nanovllm.serve.parsers import Delta, OutputParser

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}{{ '<|channel|>' if false }}"
)
PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
START = "<|start|>assistant<|channel|>"
NEXT = "<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("harmony", True, tmp_path_factory.mktemp("harmony"))


def call_text(name: str, arguments: dict[str, Any], form: int = 0) -> str:
    heads = (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        f" to=functions.{name}<|channel|>commentary json<|message|>",
        f"<|channel|>commentary to=functions.{name}<|message|>",
    )
    return heads[form] + json.dumps(arguments, ensure_ascii=False)


@settings(max_examples=30, deadline=None)
@given(
    reasoning=st.none() | words, preamble=st.none() | words, content=words, call=st.none() | calls,
    form=st.integers(0, 2), cuts=steps,
)  # fmt: skip
def test_messages_are_admitted_and_read_back_at_any_cut(
    model: Model, reasoning: str | None, preamble: str | None, content: str, call: Any, form: int, cuts: list[int]
) -> None:
    syntax = model.syntax(PROMPT)
    text = "" if reasoning is None else f"<|channel|>analysis<|message|>{reasoning}{NEXT}"
    text += "" if preamble is None else f"<|channel|>commentary<|message|>{preamble}{NEXT}"
    text += call_text(*call, form) if call else f"<|channel|>final<|message|>{content}"
    assert model.admits(syntax, text)
    whole = model.read(syntax, text)
    assert model.read(syntax, text, cuts) == whole
    message = message_of(whole)
    said = [each for each in (preamble, None if call else content) if each is not None]
    assert (message.reasoning, message.content) == (reasoning, "\n\n".join(said))
    assert message.calls == ([call] if call else [])
    reader, detokenizer = syntax.reader(), syntax.detokenizer()
    assert reader is not None
    reader.push("".join(map(detokenizer.push, model.ids(text))))
    reader.finish()
    assert syntax.finish_reason("stop", reader) == ("tool_calls" if call else "stop")
    thoughts = f"<|channel|>analysis<|message|>{reasoning}<|end|>" if reasoning is not None else ""
    assert detokenizer.num_reasoning_tokens == len(model.ids(thoughts))


PIECES = [*TAGS["harmony"], "analysis", "final", " to=functions.now", "x", "\n", "{", "}"]


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES)).map("".join), cuts=steps)
def test_any_text_at_all_reads_alike_at_any_cut(model: Model, text: str, cuts: list[int]) -> None:
    syntax = model.syntax(PROMPT)
    assert model.read(syntax, text, cuts) == model.read(syntax, text)


def test_what_grammars_refuse(model: Model) -> None:
    thoughts = f"<|channel|>analysis<|message|>hm{NEXT}"
    auto, required = (model.syntax(PROMPT, choice) for choice in ("auto", "required"))
    wanted = StructuredOutput(json={"type": "object", "required": ["a"]})
    schema = model.syntax(PROMPT, structured=wanted, tools=None)
    good, bad = call_text("get_weather", {"city": "Rome"}), call_text("get_weather", {"town": "Rome"})
    answer = "<|channel|>final<|message|>"
    for syntax, text, is_admitted in (
        (auto, thoughts + good, True), (auto, thoughts + bad, False), (auto, call_text("other", {}), False),
        (required, good, True), (required, thoughts + good, True), (required, answer + "Rome", False),
        (schema, thoughts + answer + '{"a": 1}', True), (schema, answer + "words", False),
        (schema, '<|channel|>final <|constrain|>json<|message|>{"a": 1}', True), (schema, good, False),
    ):  # fmt: skip
        assert model.admits(syntax, text) == is_admitted, text
    assert model.syntax(PROMPT, tools=None).structured is None, "nothing was asked for"


def test_answers_that_are_cut_or_have_no_channel(model: Model) -> None:
    syntax = model.syntax(PROMPT, tools=None)
    for text, expected in (
        ("plain words", [Delta("content", "plain words")]),
        (" to be", [Delta("content", " to be")]),
        ("<|channel|>analysis<|message|>I thi", [Delta("reasoning", "I thi")]),
        ("<|channel|>ana", []),
        (call_text("now", {}), [Delta("reasoning", "{}")]),  # no tools were given
    ):
        assert model.read(syntax, text, [1]) == model.read(syntax, text) == expected
        detokenizer = syntax.detokenizer()
        for token_id in model.ids(text):
            detokenizer.push(token_id)
        assert detokenizer.num_reasoning_tokens == ("analysis" in text) * len(model.ids(text)), "up to the cut"
    cut = model.syntax(PROMPT)
    reader = model.reader(cut, model.ids(call_text("get_weather", {"city": "Rome"}))[:-3])
    reader.finish()
    assert cut.finish_reason("stop", reader) == "stop" and reader.output.num_calls == 1


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"<|channel|>analysis<|message|>a<|end|>stray{START}final<|message|>Hello<|return|>", "a", "Hello"),
        (f"stray<|channel|>analysis<|message|>a{START}final<|message|>Hello", "a", "Hello"),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>Hello", "a", "Hello"),
        (f"<|channel|>analysis<|end|>{START}final<|message|>Hello", None, "Hello"),
        (f"<|channel|>analysis{START}analysis<|message|>a", "a", ""),
        ("<|channel|>analysis<|message|>a<|end|>Hello", "a", "Hello"),
    ],
)
def test_what_stands_between_messages_is_passed_over(
    model: Model, text: str, reasoning: str | None, content: str
) -> None:
    syntax = model.syntax(PROMPT)
    found = model.read(syntax, text)
    assert model.read(syntax, text, [1]) == found
    assert (message_of(found).reasoning, message_of(found).content) == (reasoning, content)


def test_arguments_too_deep_to_be_read_are_passed_on(model: Model) -> None:
    syntax, text = model.syntax(PROMPT), "[" * 10**5 + "]" * 10**5
    found = model.read(syntax, f"<|channel|>commentary to=functions.now<|message|>{text}<|call|>")
    assert found[-1] == Delta("arguments", text)


def test_the_rest_of_a_message_is_content(model: Model) -> None:
    syntax = model.syntax(PROMPT + "<|channel|>final<|message|>The capital of", tools=None)
    assert syntax.reader() is None and syntax.reasoning == "none"


def test_a_schema_that_does_not_compile_is_named_by_its_tool(model: Model) -> None:
    model.check_blame(PROMPT)


def test_harmony_is_both_parsers_and_needs_its_tokens_or_their_template(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="harmony"):
        Model("harmony", False, tmp_path)
    tokenizer = model.tokenizer.with_template(TEMPLATE)
    found = OutputParser(tokenizer)
    assert (found.tool_family, found.reasoning) == ("harmony", "harmony")
    with pytest.raises(ValueError, match="both"):
        OutputParser(tokenizer, "none")
