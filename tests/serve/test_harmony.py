"""gpt-oss: messages in channels, read back at any cut and held to by grammars."""

import json
from pathlib import Path
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import ARGUMENTS, DEMO, TOOLS, message_of, read

from nanovllm import StructuredOutput
from nanovllm.serve.parsers import Delta, OutputParser, Plan, check_tools
from nanovllm.text.checkpoint import CheckpointTokenizer

TOKENS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}{{ '<|channel|>' if false }}"
)
PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
NEXT = "<|end|><|start|>assistant"
steps = st.lists(st.integers(1, 7), min_size=1, max_size=8)
words = st.text(st.characters(exclude_categories=["Cs", "Co"]), min_size=1, max_size=20).map(lambda t: t.strip() or "x")
calls = st.sampled_from([*ARGUMENTS]).flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(ARGUMENTS[name])))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    folder = tmp_path_factory.mktemp("harmony")
    content = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    first = 1 + max(token["id"] for token in content["added_tokens"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [
        {"id": first + i, "content": name, "special": True, **flags} for i, name in enumerate(TOKENS)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return CheckpointTokenizer(folder)


@pytest.fixture(scope="module")
def parser(tokenizer: CheckpointTokenizer) -> OutputParser:
    found = OutputParser(tokenizer)
    assert (found.tool_family, found.reasoning) == ("harmony", "harmony")
    return found


@pytest.fixture(scope="module")
def library(tokenizer: CheckpointTokenizer) -> Any:
    backend = tokenizer.backend_tokenizer
    eos = backend.token_to_id("<|return|>")
    return llguidance.LLTokenizer(backend.to_str(), n_vocab=len(tokenizer), eos_token=eos)


def admits(library: Any, tokenizer: CheckpointTokenizer, plan: Plan, text: str) -> bool:
    assert plan.structured is not None and plan.structured.grammar is not None
    matcher = llguidance.LLMatcher(library, llguidance.LLMatcher.grammar_from_lark(plan.structured.grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


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
    parser: OutputParser, tokenizer: CheckpointTokenizer, library: Any, reasoning: str | None, preamble: str | None,
    content: str, call: Any, form: int, cuts: list[int],
) -> None:  # fmt: skip
    plan = parser.plan(PROMPT, check_tools(TOOLS))
    text = "" if reasoning is None else f"<|channel|>analysis<|message|>{reasoning}{NEXT}"
    text += "" if preamble is None else f"<|channel|>commentary<|message|>{preamble}{NEXT}"
    text += call_text(*call, form) if call else f"<|channel|>final<|message|>{content}"
    assert admits(library, tokenizer, plan, text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = read(plan, ids)
    assert read(plan, ids, cuts) == whole
    message = message_of(whole)
    said = [each for each in (preamble, None if call else content) if each is not None]
    assert (message.reasoning, message.content) == (reasoning, "\n\n".join(said))
    assert message.calls == ([call] if call else [])
    reader, detokenizer = plan.reader(), plan.detokenizer()
    assert reader is not None
    reader.push("".join(map(detokenizer.push, ids)))
    reader.finish()
    assert plan.finish_reason("stop", reader) == ("tool_calls" if call else "stop")
    thoughts = f"<|channel|>analysis<|message|>{reasoning}<|end|>" if reasoning is not None else ""
    assert detokenizer.num_reasoning_tokens == len(tokenizer.encode(thoughts, add_special_tokens=False))


PIECES = [*TOKENS, "analysis", "final", " to=functions.now", "x", "\n", "{", "}"]


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES)), cuts=steps)
def test_any_text_at_all_reads_alike_at_any_cut(
    parser: OutputParser, tokenizer: CheckpointTokenizer, text: list[str], cuts: list[int]
) -> None:
    plan = parser.plan(PROMPT, check_tools(TOOLS))
    ids = tokenizer.encode("".join(text), add_special_tokens=False)
    assert read(plan, ids, cuts) == read(plan, ids)


def test_what_grammars_refuse(parser: OutputParser, tokenizer: CheckpointTokenizer, library: Any) -> None:
    thoughts = f"<|channel|>analysis<|message|>hm{NEXT}"
    auto, required = (parser.plan(PROMPT, check_tools(TOOLS, choice)) for choice in ("auto", "required"))
    schema = parser.plan(PROMPT, None, StructuredOutput(json={"type": "object", "required": ["a"]}))
    good, bad = call_text("get_weather", {"city": "Rome"}), call_text("get_weather", {"town": "Rome"})
    answer = "<|channel|>final<|message|>"
    for plan, text, is_admitted in (
        (auto, thoughts + good, True), (auto, thoughts + bad, False), (auto, call_text("other", {}), False),
        (required, good, True), (required, thoughts + good, True), (required, answer + "Rome", False),
        (schema, thoughts + answer + '{"a": 1}', True), (schema, answer + "words", False),
        (schema, '<|channel|>final <|constrain|>json<|message|>{"a": 1}', True), (schema, good, False),
    ):  # fmt: skip
        assert admits(library, tokenizer, plan, text) == is_admitted, text
    assert parser.plan(PROMPT).structured is None, "nothing was asked for"


def test_answers_that_are_cut_or_have_no_channel(parser: OutputParser, tokenizer: CheckpointTokenizer) -> None:
    plan = parser.plan(PROMPT)
    for text, expected in (
        ("plain words", [Delta("content", "plain words")]),
        (" to be", [Delta("content", " to be")]),
        ("<|channel|>analysis<|message|>I thi", [Delta("reasoning", "I thi")]),
        ("<|channel|>ana", []),
        (call_text("now", {}), [Delta("reasoning", "{}")]),  # no tools were given
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert read(plan, ids, [1]) == read(plan, ids) == expected
    cut = parser.plan(PROMPT, check_tools(TOOLS))
    reader = cut.reader()
    assert reader is not None
    ids = tokenizer.encode(call_text("get_weather", {"city": "Rome"}), add_special_tokens=False)[:-3]
    reader.push("".join(map(cut.detokenizer().push, ids)))
    reader.finish()
    assert cut.finish_reason("stop", reader) == "stop" and reader.num_calls == 1


def test_the_rest_of_a_message_is_content(parser: OutputParser) -> None:
    plan = parser.plan(PROMPT + "<|channel|>final<|message|>The capital of")
    assert plan.reader() is None and plan.reasoning == "none"


def test_harmony_needs_its_tokens_and_is_both_parsers(tokenizer: CheckpointTokenizer) -> None:
    with pytest.raises(ValueError, match="harmony"):
        OutputParser(CheckpointTokenizer(Path(DEMO)), "harmony", "harmony")
    with pytest.raises(ValueError, match="both"):
        OutputParser(tokenizer, "none")
