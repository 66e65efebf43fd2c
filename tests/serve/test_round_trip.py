"""Whatever an answer held can be sent back: in each dialect, as its clients do, to each family's template."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conversation import USAGE, message_format, of_messages, of_responses, response_format
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.serve.api import fields as api
from nanovllm.serve.api.messages import LeftOut, template_values
from nanovllm.serve.formats import chat
from nanovllm.serve.parsers import Delta
from nanovllm.serve.parsers.families import FORMS, HARMONY, tool_family_of
from nanovllm.text.call_messages import arguments
from nanovllm.text.checkpoint import CheckpointTokenizer
from nanovllm.text.template import ChatTemplate

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = {path.stem: path.read_text("utf-8") for path in (Path(__file__).parent / "templates").glob("*.jinja")}
LOST = {
    "llama3": {"Thoughts"}, "deepseek_r1": {"Thoughts"}, "mistral": {"Thoughts", "Words"}, "minimax": {"Thoughts"},
    "nemotron2": {"Thoughts"}, "mistral_ids": {"Thoughts"}, "llama4_pythonic": {"Thoughts"},
    "deepseek_v31": {"Thoughts"}, "lfm2_first": {"Thoughts"},
}  # fmt: skip
"""Parts that a template writes nowhere beside a call, in whichever form it is given."""
THOUGHTS, WORDS = Delta("reasoning", "Thoughts."), Delta("content", "Words.")


def call(number: int, text: str) -> list[Delta]:
    name = ("get_weather", "get_time")[number]
    return [Delta("call", "", number, name, f"call_{number:024x}"), Delta("arguments", text, number)]


PARIS, ROME = call(0, '{"city": "Paris"}'), call(1, '{"city": "Rome", "when": [1, 2]}')
ANSWERS = {
    "words": [WORDS],
    "thoughts and words": [THOUGHTS, WORDS],
    "a call": PARIS,
    "words and a call": [WORDS, *PARIS],
    "thoughts and a call": [THOUGHTS, *PARIS],
    "all of them": [THOUGHTS, WORDS, *PARIS],
    "two calls": [*PARIS, *ROME],
    "all of them and two calls": [THOUGHTS, WORDS, *PARIS, *ROME],
    "a call that was cut": [THOUGHTS, WORDS, *call(0, '{"city": "Paris", "unit": "cel')],
    "a second call that was cut": [WORDS, *PARIS, *call(1, '{"city": "Rome')],
    "a call cut at its start": call(0, ""),
}


def sent_to_chat(answer: list[Delta]) -> list[dict[str, Any]]:
    message = chat._message(answer)
    results = [
        {"role": "tool", "tool_call_id": one["id"], "content": [{"type": "text", "text": f"result of {i}"}]}
        for i, one in enumerate(message.get("tool_calls", []))
    ]
    return [{"role": "user", "content": "Hi"}, message, *(results or [{"role": "user", "content": "And?"}])]


def sent_to_responses(answer: list[Delta]) -> list[dict[str, Any]]:
    writer = response_format({})
    writer.add(answer)
    writer.finish("length", None, USAGE)
    items = writer.answer["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"result of {i}"}
        for i, item in enumerate(item for item in items if item["type"] == "function_call")
    ]
    ending = results or [{"role": "user", "content": "And?"}]
    return list(of_responses({"input": [{"role": "user", "content": "Hi"}, *items, *ending]})["messages"])


def sent_to_messages(answer: list[Delta]) -> list[dict[str, Any]]:
    writer = message_format()
    writer.add(answer)
    writer.finish("length", None, USAGE)
    blocks = writer.answer["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": f"result of {i}"}
        for i, block in enumerate(block for block in blocks if block["type"] == "tool_use")
    ]
    messages = [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": blocks},
        {"role": "user", "content": results or "And?"},
    ]  # fmt: skip
    return list(of_messages({"messages": messages, "max_tokens": 5})["messages"])


DIALECTS: dict[str, Callable[[list[Delta]], list[dict[str, Any]]]] = {
    "chat": sent_to_chat, "responses": sent_to_responses, "messages": sent_to_messages,
}  # fmt: skip


@cache
def tokenizer_of(template: str) -> CheckpointTokenizer:
    tokenizer = CheckpointTokenizer(ROOT / "assets" / "demo-qwen3")
    tokenizer.special_tokens |= {"bos_token": "<s>", "eos_token": "</s>"}
    return tokenizer.with_template(TEMPLATES[template])


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    tools = [{"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}]
    fields = api.read(api.ChatFields, {"messages": messages})[0]
    values = template_values(fields.messages, LeftOut("messages"))
    return tokenizer_of(template).encode_chat(values, tools)[0]


def test_every_family_has_a_template() -> None:
    assert {tool_family_of(source) for source in TEMPLATES.values()} >= {*FORMS, HARMONY}


def test_templates_of_other_forms_are_of_no_known_family() -> None:
    """Command R and Muse Glimmer write parameters, too, but in forms of their own."""
    others = "Action: [{\"tool_name\": \"x\", \"parameters\": {}}]", "{\"description\": 1, \"parameters\": 2}"
    for source in others:
        assert tool_family_of(source) is None


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("template", sorted(TEMPLATES.keys() - {"gemma", "granite3"}))
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_taken_back_and_shown(template: str, dialect: str, name: str) -> None:
    answer = ANSWERS[name]
    text = rendered(template, DIALECTS[dialect](answer))
    num_calls = sum(delta.kind == "call" for delta in answer)
    expected = ["Words"] if WORDS in answer else []
    if num_calls:
        expected += ["Thoughts"] if THOUGHTS in answer else []
        expected = [one for one in expected if one not in LOST.get(template, ())]
        expected += [delta.name for delta in answer if delta.kind == "call"]
        expected += [f"result of {i}" for i in range(num_calls)]
        if dialect != "messages" or "cut" not in name:  # there the arguments of a call that was cut are empty
            expected += [city for city in ("Paris", "Rome") if any(city in delta.text for delta in answer)]
    assert [one for one in expected if one not in text] == []
    assert "'text'" not in text and '"type": "text"' not in text
    places = [text.find(one) for one in ("get_weather", "get_time")[:num_calls]]
    assert places == sorted(places)


def test_thoughts_and_words_before_a_call_are_written_as_harmony_does() -> None:
    text = rendered("gpt_oss", sent_to_chat(ANSWERS["all of them"]))
    head = "<|start|>assistant<|channel|>analysis<|message|>Thoughts.<|end|>"
    words = "<|start|>assistant<|channel|>commentary<|message|>Words.<|end|>"
    assert head + words + "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>" in text


def test_ids_are_named_where_a_template_shows_names_in_them_alone() -> None:
    call, result = sent_to_chat(PARIS)[1:]
    text = rendered("kimi_k2", [*sent_to_chat(ANSWERS["two calls"]), call, result])
    names = ("get_weather:0", "get_time:1", "get_weather:2")
    for name in names:
        assert f"<|tool_call_begin|>functions.{name}<|tool_call_argument_begin|>" in text
    assert [text.count(f"## Return of functions.{name}\nresult of") for name in names] == [1, 1, 1]


def test_calls_are_words_for_a_template_that_shows_none() -> None:
    """LFM2's first; what a client spells out is no token in them either."""
    given = {"city": 'a "b" <|im_end|>', "sure": True, "none": None, "n": [1, {"x": "y"}]}
    chat = [{"role": "user", "content": "Hi"}, *sent_to_chat([WORDS, *call(0, json.dumps(given)), *ROME])[1:]]
    text = rendered("lfm2_first", chat)
    shown = 'city="a \\"b\\" <|im_end|>", sure=True, none=None, n=[1, {"x": "y"}]'
    rome = 'get_time(city="Rome", when=[1, 2])'
    assert f"Words.<|tool_call_start|>[get_weather({shown}), {rome}]<|tool_call_end|><|im_end|>" in text
    assert "result of 0" in text and "result of 1" in text


def test_thoughts_that_a_template_wants_as_a_part_are_one() -> None:
    """As Ministral 3's does."""
    source = TEMPLATES["mistral_args"].replace("{%- if message.content %}{{- message.content }}{% endif %}", """
        {%- if message.content is string %}{{- message.content }}{% else %}{% for part in message.content %}
        {%- if part.type == 'thinking' %}{{- '[THINK]' + part.thinking + '[/THINK]' }}
        {%- else %}{{- part.text }}{% endif %}
        {%- endfor %}{% endif %}""").replace("message.reasoning_content", "false")
    for name, shown in (("thoughts and a call", ""), ("all of them and two calls", "Words.")):
        text = ChatTemplate(source).render(sent_to_chat(ANSWERS[name]))
        assert f"[THINK]Thoughts.[/THINK]{shown}[TOOL_CALLS]get_weather[ARGS]" in text
    assert "[/INST]Words.[TOOL_CALLS]get_weather" in ChatTemplate(source).render(sent_to_chat([WORDS, *PARIS]))


def test_words_in_parts_beside_a_call_are_a_text() -> None:
    """Kimi-K2's template goes through parts in messages without calls alone."""
    user, message, result = sent_to_chat(ANSWERS["words and a call"])
    message["content"] = [{"type": "text", "text": "Some"}, {"type": "text", "text": "words."}]
    text = rendered("kimi_k2", [user, message, result])
    assert "</think>Some\nwords.<|tool_calls_section_begin|>" in text and "result of 0" in text


def test_results_stay_beside_their_calls() -> None:
    chat = sent_to_chat(ANSWERS["two calls"])
    chat[2:] = chat[:1:-1]  # results may come in any order
    for template in ("llama3", "gpt_oss"):
        text = rendered(template, chat)
        places = [text.index(one) for one in ("get_weather", "result of 0", "get_time", "result of 1")]
        assert places == sorted(places), template


def test_tools_without_description_or_parameters_are_shown() -> None:
    """gpt-oss' template fails without a description, others without parameters or properties."""
    user, bare = [{"role": "user", "content": "Hi"}], {"type": "function", "function": {"name": "look"}}
    asks = "{% for tool in tools or [] %}{{ tool.function.name + ': ' + FIELD }}{% endfor %}"
    fields = ("tool.function.description", "tool.function.parameters.properties | tojson")
    for field, shown in zip(fields, ("", "{}"), strict=True):
        template = ChatTemplate(asks.replace("FIELD", field))
        for extra in ({}, {"parameters": {"type": "object"}}, {"description": None, "parameters": None}):
            tool = {**bare, "function": {"name": "look", **extra}}
            assert template.render(user, [tool]) == f"look: {shown}"
    assert ChatTemplate("{{ tools | tojson }}").render(user, [bare]) == json.dumps([bare])


def test_a_call_that_a_template_cannot_show_is_an_error() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% if m.tool_calls %}called{% endif %}{% endfor %}")
    with pytest.raises(ValueError, match="shows no tool call"):
        template.render(sent_to_chat(PARIS))


PLAIN = st.none() | st.booleans() | st.integers() | st.text()
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def is_begun(part: Any, whole: Any) -> bool:
    """Whether a value has nothing that another has not."""
    if isinstance(whole, dict):
        return isinstance(part, dict) and all(key in whole and is_begun(part[key], whole[key]) for key in part)
    if isinstance(whole, list):
        return isinstance(part, list) and all(map(is_begun, part, whole)) and len(part) <= len(whole)
    if isinstance(whole, str):
        return isinstance(part, str) and whole.startswith(part)
    return bool(part == whole)


@given(value=st.dictionaries(st.text(), VALUES), at=st.floats(0, 1), ascii=st.booleans())
def test_arguments_that_were_cut_are_those_that_were_there(value: dict[str, Any], at: float, ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    assert arguments(text) == value
    cut = arguments(text[: max(1, int(at * len(text)))])
    if "\ufffd" not in str(cut):  # half of a surrogate pair
        assert is_begun(cut, value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}), (" \n", {}), ('{"contents": "cut he', {"contents": "cut he"}), ("cut", {"arguments": "cut"}),
        ('{"a": [1, {"b": tru', {"a": [1, {}]}), ('["a"]', {"arguments": '["a"]'}), ('{"a": "\\', {"a": ""}),
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}), ('{"a": "\\\\ud83d"}', {"a": "\\ud83d"}),
        ('{"a"}', {"arguments": '{"a"}'}),
    ],
)  # fmt: skip
def test_arguments_are_an_object(text: str, expected: dict[str, Any]) -> None:
    assert arguments(text) == expected


def test_arguments_of_any_depth_and_length_are_read_in_time() -> None:
    for text in ("[" * 100_000, '{"a":' * 100_000, '{"' + "a" * 200_000, '{"a": "' + "\\" * 200_001):
        assert isinstance(arguments(text), dict)
