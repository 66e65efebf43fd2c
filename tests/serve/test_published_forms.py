"""A turn with calls, as a template writes it, is what the grammar admits and what is read back, however it is cut."""

import json
from typing import Any

import pytest
from parsing import Message, Model, message_of, read
from test_round_trip import TEMPLATES, tokenizer_of

from nanovllm.serve.parsers import OutputParser, check_tools
from nanovllm.serve.parsers.families import FORMS, HARMONY, tool_family_of

PROPERTIES = {
    "city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}, "several": {"type": "array"},
    "sure": {"type": "boolean"}, "none": {"type": ["string", "null"]},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": {
        "type": "object", "properties": properties}}}
    for name, properties in (("get_weather", PROPERTIES), ("now", {}))
]  # fmt: skip
DEEP = {"a": [1, 2.5, {"b": [], "c": "d"}], "e": {}}
CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "one": [("get_weather", {"city": "Paris"})],
    "of all types": [("get_weather", {"city": "Zürich 🐱\nand more", "days": -3, "deep": DEEP, "sure": False})],
    "lists": [("get_weather", {"several": ["x", "y z", 7], "none": "a text"})],
    "no arguments": [("now", {})],
    "nothing but a null": [("get_weather", {"none": None})],
    "three": [("get_weather", {"city": "Rome", "days": 2}), ("now", {}), ("get_weather", {"city": ""})],
}
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "</s>", "<turn|>", "[e~[", "<SPECIAL_12>", "<seed:eos>", "<hy_eos>",
        "<|eos|>", "[|endofturn|]", "<|user|>", "<|observation|>", "<end_of_turn>")  # fmt: skip
LOST = {
    ("llama4_pythonic", name) for name in ("of all types", "lists", "nothing but a null", "three")
} | {("llama3", "three"), ("gemma4", "nothing but a null")}  # fmt: skip
"""Calls that templates show otherwise than models write them: all values as texts, one call alone, Python's None."""
SHOWN = [name for name, source in TEMPLATES.items() if tool_family_of(source) not in (None, HARMONY, "granite")]
"""Templates that show calls."""


def turn(template: str, calls: list[tuple[str, dict[str, Any]]], words: str = "", thoughts: str | None = None) -> str:
    """Text that an assistant wrote in a turn, as the template shows it."""
    made = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": json.dumps(values)}}
        for number, (name, values) in enumerate(calls)
    ]
    question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": words}
    answer |= ({"tool_calls": made} if made else {}) | ({"reasoning_content": thoughts} if thoughts else {})
    tokenizer = tokenizer_of(template)
    before, whole = (
        tokenizer.render_chat(chat, TOOLS, add_generation_prompt=False)
        for chat in ([question], [question, answer])
    )
    text = whole.removeprefix(before)
    return min((text.split(end)[0] for end in ENDS), key=len).rstrip("\n")


def opening_of(model: Model) -> str:
    """Text with which calls begin."""
    written = FORMS[model.family]
    return written.tags[0] if written.is_tagged else written.bare


@pytest.mark.parametrize(
    ("template", "name"), [(template, name) for template in SHOWN for name in CALLS if (template, name) not in LOST]
)
def test_calls_that_a_template_shows_are_admitted_and_read_back(
    models: dict[tuple[str, bool], Model], template: str, name: str
) -> None:
    family = tool_family_of(TEMPLATES[template])
    assert family is not None
    model = models[family, True]
    text = turn(template, CALLS[name])
    syntax, text = model.syntax(model.closed, tools=TOOLS), text[text.index(opening_of(model)) :]
    assert model.admits(syntax, text) or family == "mistral_list", text  # whose template adds ids
    for cuts in (None, [1], [3, 1, 2]):
        assert message_of(model.read(syntax, text, cuts)).calls == CALLS[name], text


@pytest.mark.parametrize("calls", [[], CALLS["one"], CALLS["three"]], ids=["words", "a call", "calls"])
@pytest.mark.parametrize("template", ["ernie45", "hunyuan_a13b"])
def test_words_in_tags_of_their_own_are_read_without_them(
    template: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    """Behind thoughts; a later tag of the first kind is a word like others."""
    tokenizer = tokenizer_of(template)
    parser, words = OutputParser(tokenizer), "Words with <answer> and <response>.\n\nMore <b>."
    text = turn(template, calls, words, "Thoughts.").removeprefix("<|im_start|>assistant\n").removeprefix("<think>\n")
    syntax = parser.syntax("<think>\n", check_tools(TOOLS, "auto", None) if calls else None)
    for cuts in (None, [1], [3, 1, 2]):
        assert message_of(read(syntax, tokenizer.encode(text), cuts)) == Message("Thoughts.", words, calls)


def test_granites_words_behind_thoughts() -> None:
    tokenizer = tokenizer_of("granite3")
    syntax = OutputParser(tokenizer).syntax("<|start_of_role|>assistant<|end_of_role|>")
    text = "<think>Thoughts.</think><response>Words.</response>"
    for cuts in (None, [1]):
        assert message_of(read(syntax, tokenizer.encode(text), cuts)) == Message("Thoughts.", "Words.", [])


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("template", ["nemotron2", "nemotron3", "glm45", "minimax_m2"])
def test_line_breaks_stand_before_and_behind_calls(
    models: dict[tuple[str, bool], Model], template: str, choice: str
) -> None:
    """As templates write them: behind reasoning that the prompt closes, up to three of them, and at a turn's end."""
    family = tool_family_of(TEMPLATES[template])
    assert family is not None
    model = models[family, True]
    text = model.calls_text(CALLS["one"])
    for prompt, before in (("<think></think>", "\n"), ("<think>\n", "Thoughts.\n</think>\n\n\n")):
        syntax = model.syntax(prompt, choice, tools=TOOLS)
        for after in ("",) if template == "minimax_m2" else ("", "\n"):
            assert model.admits(syntax, before + text + after)
            for cuts in (None, [1]):
                found = message_of(model.read(syntax, before + text + after, cuts))
                assert (found.content, found.calls) == ("", CALLS["one"])


@pytest.mark.parametrize("choice", [None, "auto"])
def test_words_behind_reasoning_that_the_prompt_closes_begin_with_no_line_break(
    models: dict[tuple[str, bool], Model], choice: str | None
) -> None:
    model = models["glm45", True]
    for prompt in ("<|assistant|>\n<think></think>", "<think>Thoughts.</think>"):
        syntax = model.syntax(prompt, tools=TOOLS, choice=choice) if choice else model.syntax(prompt, tools=None)
        for cuts in (None, [1]):
            assert message_of(model.read(syntax, "\nWords.\n\nMore.", cuts)).content == "Words.\n\nMore."
