"""Reasoning: where it begins and ends, free while it lasts, with what follows held to a grammar."""

from pathlib import Path
from typing import Any

import pytest
from parsing import DEMO, MODELS, REASONING, Message, Model, message_of, read
from serving import user

from nanovllm import StructuredOutput
from nanovllm.serve.parsers import Delta, OutputParser
from nanovllm.text.checkpoint import CheckpointTokenizer


@pytest.mark.parametrize(
    "structured", [StructuredOutput(json={"type": "object"}), StructuredOutput(json_object=True),
                   StructuredOutput(choice=('{"a": 1}',)), StructuredOutput(regex=r'\{"a": [0-9]/?\}'),
                   StructuredOutput(regex=r'\{"a": [0-9](\/|\\|\\/)?(/)?\}')],
)  # fmt: skip
def test_reasoning_is_free_and_what_follows_is_held(models: dict[tuple[str, bool], Model], structured: Any) -> None:
    model = models["hermes", True]
    for prompt, begins in (("<think>\n", "think"), ("assistant\n", "<think>\nthink")):
        syntax = model.syntax(prompt, tools=None, structured=structured)
        text = begins + ' {"b": } hard\n</think>\n\n{"a": 1}'
        assert model.admits(syntax, text)
        assert not model.admits(syntax, begins + "\n</think>\n\nwords")
        assert not model.admits(syntax, '\n\n{"a": 1}')
        assert model.read(syntax, text, [2]) == [Delta("reasoning", 'think {"b": } hard'), Delta("content", '{"a": 1}')]
    assert model.syntax("<think>\n\n</think>\n\n", tools=None, structured=structured).structured is structured
    assert model.admits(model.syntax("assistant\n", tools=None, structured=structured), '{"a": 1}')


def test_reasoning_may_begin_after_a_line_break_and_have_no_end(models: dict[tuple[str, bool], Model]) -> None:
    for model in (models["hermes", True], models["hermes", False]):
        syntax = model.syntax("<think>\n", tools=None)
        assert model.read(syntax, "I think and think\n", [3]) == [Delta("reasoning", "I think and think\n")]
        for options in ({"tools": None}, {"choice": "required"}, {}):
            syntax = model.syntax("assistant\n", **options)  # type: ignore[arg-type]
            call = model.calls_text([("now", {})]) if options.get("choice") else "b"
            text = f"\n\n<think>\n\na\n</think>\n\n{call}"
            assert syntax.structured is None or model.admits(syntax, text)
            found = model.read(syntax, text, [1])
            assert found[0] == Delta("reasoning", "a")
            assert message_of(found).content == ("" if options.get("choice") else "b")
        plain = model.read(model.syntax("assistant\n", tools=None), "\n\nb", [1])
        assert plain == [Delta("content", "\n\nb")]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("key", [key for key in MODELS if REASONING.get(key[0]) == "think"])
def test_a_call_ends_the_reasoning(models: dict[tuple[str, bool], Model], key: tuple[str, bool], choice: str) -> None:
    """Qwen3, Qwen3.5 and Qwen3-Coder begin calls without an end of it."""
    model = models[key]
    made = [("get_weather", {"city": "Paris"}), ("now", {})]
    for prompt, begin in (("<think>\n", ""), ("assistant\n", "<think>\n")):
        syntax = model.syntax(prompt, choice)
        thoughts = f"{begin}I need < 2 calls.\n"
        text = thoughts + model.calls_text(made)
        assert model.admits(syntax, text)
        assert not model.admits(syntax, text.replace("city", "town"))
        for cuts in ([1], [5], None):
            assert message_of(model.read(syntax, text, cuts)) == Message("I need < 2 calls.", "", made)
        assert syntax.finish_reason("stop", model.reader(syntax, model.ids(text))) == "tool_calls"
        detokenizer = syntax.detokenizer()
        for token_id in model.ids(text):
            detokenizer.push(token_id)
        if key[1]:
            assert 0 <= detokenizer.num_reasoning_tokens - len(model.ids(thoughts)) <= 1
        no_call = f"{begin}I write {model.family} {model.write(Message(calls=[('other', {})]))} so.</think>b"
        found = message_of(model.read(syntax, no_call, [1]))
        assert found.content == "b" and found.calls == [] and "so." in str(found.reasoning)


def test_reasoning_tokens_are_counted(models: dict[tuple[str, bool], Model]) -> None:
    for prompt, text, expected, has_tokens in (
        ("<think>\n", "a b</think>c", "a b</think>", True),
        ("<think>\n", "a b c", "a b c", True),
        ("assistant\n", "<think>a</think>c", "<think>a</think>", True),
        ("assistant\n", "\n<think>a b</think>c", "\n<think>a b</think>", True),
        ("assistant\n", "\n<think>a b</think>c", "", False),
        ("assistant\n", "<think>a", "<think>a", True),
        ("assistant\n", "a b c</think>", "", True),
        ("assistant\n", "a <think>b</think>c", "", True),
    ):
        model = models["hermes", has_tokens]
        detokenizer = model.syntax(prompt, tools=None).detokenizer()
        for token_id in model.ids(text):
            detokenizer.push(token_id)
        assert detokenizer.num_reasoning_tokens == len(model.ids(expected)), text


def test_a_template_that_opens_reasoning_itself_wants_none_where_it_does_not() -> None:
    left_to_the_model = "hermes"
    for template, think, state in (
        (None, False, "none"), (None, True, "open"), ("nemotron3", False, "none"), ("nemotron3", True, "open"),
        (left_to_the_model, False, "none"), (left_to_the_model, True, "optional"),
    ):  # fmt: skip
        file = template and Path(__file__).parent / "templates" / f"{template}.jinja"
        tokenizer = CheckpointTokenizer(DEMO, file)
        prompt = tokenizer.render_chat(user("Hello!"), chat_template_kwargs={"enable_thinking": think})
        assert OutputParser(tokenizer).syntax(prompt).reasoning == state


@pytest.mark.parametrize("template", [None, "hermes"])
def test_an_answer_that_goes_on_begins_where_it_was_left(template: str | None) -> None:
    tokenizer = CheckpointTokenizer(DEMO, template and Path(__file__).parent / "templates" / f"{template}.jinja")
    parser = OutputParser(tokenizer)
    schema = StructuredOutput(json={"type": "object"})
    for asked, begun, state in (
        ("Hi", "<think>\nThe user asks", "open"), ("Hi", "<think>\nHm.\n</think>\n\nThe answer", "none"),
        ("What is <think>?", "<think>", "open"), ("Is </think> a tag?", "<think>a", "open"),
        ("Hi", "<think>a</think>b<think>c", "open"), ("Hi <think>", "<think>a</think>", "none"),
    ):  # fmt: skip
        messages = [*user(asked), {"role": "assistant", "content": begun}]
        options = {"add_generation_prompt": False, "continue_final_message": True}
        syntax = parser.syntax(tokenizer.render_chat(messages, **options), None, schema)
        assert syntax.reasoning == state, begun
        assert (syntax.structured == schema) == (state == "none")
    ids = tokenizer.encode("\n\nAnd why?\n</think>\n\nSo", add_special_tokens=False)
    for prompt, reasoning in (("<think>\nThe user asks.", "\n\nAnd why?"), ("<think>\n", "And why?")):
        for cuts in ([1], None):
            found = read(parser.syntax(prompt), ids, cuts)
            assert found == [Delta("reasoning", reasoning), Delta("content", "So")]
    for begun in ("The answer", "What is <think>?<|im_end|>\n<|im_start|>assistant\n"):
        assert parser.syntax(begun).reasoning == ("optional" if template else "none")
