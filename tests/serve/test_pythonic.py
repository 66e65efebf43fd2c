"""Calls that are written as Python's: literals of it, read back as JSON; nothing of them is run."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import MODELS, VALIDATORS, Model, message_of, random_output, read, steps
from test_tool_values import COUNT, LETTERS, NESTED, NULL, POINT, ROOT, TEXT, loose_and_strict, schema_of, syntax_of

FAMILIES = [key for key in MODELS if key[0] in ("lfm2", "llama4_pythonic")]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda key: key[0])
def model(request: pytest.FixtureRequest, models: dict[tuple[str, bool], Model]) -> Model:
    return models[request.param]


def written(model: Model, call: str) -> str:
    return f"<|tool_call_start|>[{call}]<|tool_call_end|>" if model.family == "lfm2" else f"[{call}]"


FLAG = {"type": ["boolean", "null"]}
VALUES: list[tuple[Any, dict[str, Any]]] = [
    (TEXT, {"'a'": "a", '"it\'s"': "it's", r"'it\'s\n'": "it's\n", "''": "", "'a\nb'": "a\nb", "5": ..., "a": ...}),
    (COUNT, {"5": 5, "-5": -5, "'5'": ..., "True": ..., "2.5": ...}),
    (FLAG, {"True": True, "False": False, "None": None, "'True'": ...}),
    ({"anyOf": [COUNT | {"maximum": 9}, NULL]}, {"9": 9, "10": ..., "None": None}),
    ({"enum": ["a", 1, None, True]}, {"'a'": "a", '"a"': "a", "1": 1, "None": None, "True": True, "False": ...}),
    ({"$ref": "#/$defs/Again"}, {"'dark red'": "dark red", '"red"': "red", "'blue'": ...}),
    (LETTERS, {"'ab'": "ab", '"ab"': "ab", "'abc'": ..., '"abc"': ...}),
    ({"type": "string", "maxLength": 9000, "minLength": 1}, {"'a'": "a", r'"a\n"': "a\n", "''": ..., '""': ...}),
    ({"type": "array", "items": COUNT}, {"[]": [], "[1, 2]": [1, 2], "[1,2]": [1, 2], "['a']": ..., "(1, 2)": ...}),
    (POINT, {"{'x': 1.5}": {"x": 1.5}, '{"x": 2}': {"x": 2}, "{'x': 'a'}": ..., "{}": ..., "{'y': 1}": ...}),
    ({"type": "object"}, {"{'a b': [None, {'c': 'd'}]}": {"a b": [None, {"c": "d"}]}, "{}": {}, "{a: 1}": ...}),
    ({}, {"'a'": "a", "1": 1, "None": None, "[True]": [True], "a": ..., "{'a': 1}": {"a": 1}}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "texts"), VALUES, ids=[json.dumps(schema)[:40] for schema, _ in VALUES])
def test_a_value_has_a_type_of_its_schema(model: Model, schema: Any, texts: dict[str, Any]) -> None:
    for syntax, text, value in loose_and_strict(model, schema_of(schema, **ROOT), texts):
        call = written(model, f"f(v={text})")
        assert model.admits(syntax, call) == (value is not ...), text
        if value is not ...:
            found = model.read(syntax, call)
            assert message_of(found).calls == [("f", {"v": value})] and found == model.read(syntax, call, [1])


READ = {
    r"'\x41\u00e9\U0001F408\101\a\/\d'": "Aé🐈A\a\\/\\d", r"'\U00110000'": "\\U00110000",
    r"'\ud83d\ude00'": "😀", "'a\\\nb'": "ab",
    "1_000": 1000, "0x1f": 31, ".5": 0.5, "-2.": -2.0, "1e5": 1e5, "null": None, "true": True, "Rome": "Rome",
    "(1, 'a')": [1, "a"], "{1: 2}": {"1": 2}, " [ ] ": [], "{ }": {}, "[{'a': (1, 2)}]": [{"a": [1, 2]}],
    "'<|tool_call_end|>'": "<|tool_call_end|>", "' ), f(v=1'": " ), f(v=1",
}  # fmt: skip


@pytest.mark.parametrize("text", READ)
def test_literals_that_no_grammar_asks_for_are_read(model: Model, text: str) -> None:
    syntax = syntax_of(model, {"type": "object"})
    for call in (f"f(v={text})", f"f( v = {text} , w='b')"):
        found = model.read(syntax, written(model, call))
        expected = {"v": READ[text], "w": "b"} if "w=" in call else {"v": READ[text]}
        assert message_of(found).calls == [("f", expected)]
        assert found == model.read(syntax, written(model, call), [1])


@pytest.mark.parametrize("text", ["__import__('os').getcwd()", "f'{1}'", "1 + 1", "[x for x in 'a']", "open", "{1}"])
def test_nothing_is_run(model: Model, text: str) -> None:
    found = model.read(syntax_of(model, {"type": "object"}), written(model, f"f(v={text})"))
    arguments = "".join(delta.text for delta in found if delta.kind == "arguments")
    assert arguments == '{"v": "open"}' if text == "open" else not arguments.endswith("}")


def test_values_of_any_depth_and_length_are_read_in_time(model: Model) -> None:
    syntax, many, begin = syntax_of(model, {"type": "object"}), 2 * 10**4, time.thread_time()
    for text in ("[" * many + "]" * many, "9" * many, "1." + "9" * many, "'" + r"\n" * many + "'", "(" * many):
        found = model.read(syntax, written(model, f"f(v={text})"), [50])
        assert len(found[1].text) >= many
    assert time.thread_time() - begin < 20


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3), max_leaves=8,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(value=LITERALS, other=LITERALS, cuts=steps)
def test_whatever_python_writes_is_read_back_at_any_cut(model: Model, value: Any, other: Any, cuts: list[int]) -> None:
    syntax = syntax_of(model, {"type": "object"})
    text = written(model, f"f(a={value!r}, b={other!r}), f()")
    found = model.read(syntax, text, cuts)
    assert message_of(found).calls == [("f", {"a": value, "b": other}), ("f", {})] and found == model.read(syntax, text)


PIECES = [*"()[]{},=:'\"\\ \n1x", "f(", "None", "<|tool_call_end|>"]


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=20), cuts=steps)
def test_malformed_calls_read_alike_at_any_cut_and_are_kept(model: Model, pieces: list[str], cuts: list[int]) -> None:
    syntax = syntax_of(model, {"type": "object"})
    begin, _ = written(model, "f(a=1#").split("#")
    text = begin + "".join(f"{each}#{i};" for i, each in enumerate(pieces))
    found = model.read(syntax, text, cuts)
    assert found == model.read(syntax, text)
    shown = "".join(delta.text for delta in found)
    assert [i for i in range(len(pieces)) if f"#{i};" not in shown] == []


def test_values_within_values_are_held_to_their_schemas(model: Model) -> None:
    syntax = syntax_of(model, NESTED, True)
    for arguments in ({"tags": ["a"]}, {"tags": ["a", "b"], "where": None}, {"tags": ["b"], "where": {"x": 1.5}},
                      {"tags": ["b"], "where": {"next": {"next": {"x": 1}, "x": 2}, "x": 3}}):  # fmt: skip
        text = model.calls_text([("f", arguments)])
        assert model.admits(syntax, text), text
        assert message_of(model.read(syntax, text, [1])).calls == [("f", arguments)]
    for arguments in ({"tags": []}, {"tags": ["a", "b", "a"]}, {"tags": ["c"]}, {"tags": ["a"], "where": {"next": {}}},
                      {"tags": ["a"], "where": {"x": 1, "y": 2}}, {"tags": "a"}):  # fmt: skip
        assert not model.admits(syntax, model.calls_text([("f", arguments)])), arguments
    with pytest.raises(ValueError, match=r"the parameter 'a b' must be a word"):
        syntax_of(model, {"type": "object", "properties": {"a b": {}}})


def test_whatever_the_grammar_admits_is_valid(model: Model) -> None:
    for seed in range(30):
        syntax = model.syntax(model.closed, "required")
        ids, whole = random_output(model, syntax, seed, 150)
        deltas = read(syntax, ids, [1 + seed % 7])
        assert deltas == read(syntax, ids)
        for name, arguments in message_of(deltas).calls if whole else ():
            VALIDATORS[name].validate(arguments)


def test_a_call_of_llama_4_between_words_is_a_call(models: dict[tuple[str, bool], Model]) -> None:
    model = models["llama4_pythonic", True]
    text = "See [1]: [get_weather(city='[Paris]'), now()] and [2]"
    found = model.read(model.syntax(), text, [1])
    assert message_of(found).content == "See [1]: and [2]"
    assert message_of(found).calls == [("get_weather", {"city": "[Paris]"}), ("now", {})]
