"""Values of calls in families that write texts as they are: their types, bounds and names are those of the schema."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import MODELS, Model, message_of, random_output, read, steps

from nanovllm.serve.parsers import Syntax

FAMILIES = [key for key in MODELS if key[0] in ("qwen3_coder", "seed_oss", "glm45", "hy_v3", "minimax_m2")]
TEXT, NULL, COUNT, LIST = ({"type": kind} for kind in ("string", "null", "integer", "array"))
POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}
COLOUR = {"type": "string", "enum": ["red", "dark red"]}
LETTERS = {"type": "string", "pattern": "^[a-z]{2}$"}


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda key: key[0] + ("" if key[1] else "-text"))
def model(request: pytest.FixtureRequest, models: dict[tuple[str, bool], Model]) -> Model:
    return models[request.param]


def schema_of(value: Any, **root: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": value}, "required": ["v"], **root}


def syntax_of(model: Model, schema: dict[str, Any], strict: bool | None = None) -> Syntax:
    function = {"name": "f", "parameters": schema, "strict": strict}
    return model.syntax(model.closed, "required", tools=[{"type": "function", "function": function}])


def arguments_of(model: Model, syntax: Syntax, arguments: dict[str, str]) -> Any:
    """Arguments as they are read back from texts; None where the grammar does not admit these."""
    text = model.calls_text([("f", arguments)])
    if not model.admits(syntax, text):
        return None
    found = model.read(syntax, text)
    assert found == model.read(syntax, text, [1])
    [(_, read_back)] = message_of(found).calls
    return read_back


def loose_and_strict(
    model: Model, schema: dict[str, Any], texts: dict[str, Any]
) -> Iterator[tuple[Syntax, str, Any]]:
    """Each of these texts and its value, with a syntax that holds calls to the schema as usual, then a strict one."""
    for strict in (None, True):
        syntax = syntax_of(model, schema, strict)
        for text, value in texts.items():
            yield syntax, text, value


FEW = {"$anchor": "few", "anyOf": [COUNT, LETTERS]}
ROOT = {
    "$defs": {"Colour": COLOUR, "Again": {"$ref": "#/$defs/Colour"}, "a/b": LETTERS, "Few": FEW},
    "definitions": {"Tree": {"type": "array", "items": {"$ref": "#/definitions/Tree"}}},
}
OPTIONAL = {"anyOf": [TEXT, NULL]}
VALUES: list[tuple[Any, dict[str, Any]]] = [
    ({"type": ["string", "null"]}, {"null": None, "nul": "nul", "": "", "null\n.": "null\n.", '"a"': '"a"'}),
    (OPTIONAL, {"null": None, "a b": "a b", '"a"': '"a"', "nullable": "nullable", "5": "5", "[1]": "[1]"}),
    ({"type": ["integer", "string"]}, {"5": 5, "-5": -5, "5.5": "5.5", "05": "05", "5 km": "5 km", "true": "true"}),
    ({"type": ["boolean", "number", "string"]}, {"true": True, "5.5e3": 5500.0, "True": "True", "NaN": "NaN"}),
    ({"type": ["array", "string"]}, {'["a"]': ["a"], "[a](b)": "[a](b)", "a": "a", "{}": "{}"}),
    ({"type": ["object", "string"]}, {'{"a": 1}': {"a": 1}, "{": "{", '{"a': '{"a'}),
    ({"anyOf": [{"type": "array", "items": COUNT}, TEXT]}, {"[1]": [1], "a": "a", '["a"]': ..., "1": "1"}),
    ({"anyOf": [COUNT | {"maximum": 9}, TEXT]}, {"9": 9, "10": ..., "10 km": "10 km"}),
    ({"anyOf": [COUNT | {"maximum": 9}, LETTERS]}, {"9": 9, "10": ..., "ab": "ab", "abc": ..., "9a": ...}),
    ({}, {"5": 5, "null": None, "a": "a", '{"a": [1]}': {"a": [1]}, "{a}": "{a}", '"a"': '"a"'}),
    (True, {"5": 5, "[": "["}),
    ({"enum": ["a", 1, None, "1a"]}, {"a": "a", "1": 1, "null": None, "1a": "1a", "2": ..., "b": ...}),
    ({"const": "a b"}, {"a b": "a b", "a": ...}),
    (COUNT, {"5": 5, "a": ..., "null": ...}),
    ({"allOf": [{"$ref": "#/$defs/Colour"}], "description": "of it"}, {"dark red": "dark red", "blue": ...}),
    ({"$ref": "#/$defs/Again"}, {"red": "red", '"red"': ..., "blue": ...}),
    ({"$ref": "#/$defs/a~1b"}, {"ab": "ab", "ABC1": ...}),
    ({"anyOf": [{"$ref": "#/$defs/Colour"}, NULL]}, {"red": "red", "null": None, "blue": ...}),
    ({"type": "array", "items": {"$ref": "#/$defs/Again"}}, {'["red"]': ["red"], '["blue"]': ...}),
    ({"type": "array", "items": {"$ref": "#"}}, {'[{"v": []}]': [{"v": []}], "[[]]": ...}),
    ({"type": "array", "items": {"$ref": "#/properties/v"}}, {"[[], [[]]]": [[], [[]]], "[1]": ...}),
    ({"$ref": "#/$defs/Few/anyOf/1"}, {"ab": "ab", "ABC1": ...}),
    ({"$ref": "#few"}, {"5": 5, "ab": "ab", "ABC1": ...}),
    ({"type": "array", "items": {"$ref": "#few"}}, {'["ab", 5]': ["ab", 5], '["ABC1"]': ...}),
    ({"$ref": "#/definitions/Tree"}, {"[[], [[]]]": [[], [[]]], "[1]": ...}),
    (LETTERS, {"ab": "ab", "abc": ..., "AB": ..., "": ...}),
    ({"type": "string", "pattern": "a|^b"}, {"xa": "xa", "bx": "bx", "xb": ..., "a\nc": "a\nc"}),
    ({"type": "string", "pattern": "^/a/[^/]+$"}, {"/a/b": "/a/b", "/a/b/c": ...}),
    ({"type": "string", "minLength": 2, "maxLength": 3}, {"a": ..., "äß\n": "äß\n", "🐱🐱🐱🐱": ...}),
    ({"allOf": [{"minLength": 2}, {"pattern": "^a+$"}], "type": "string"}, {"a": ..., "aa": "aa", "bb": ...}),
    ({"anyOf": [TEXT | {"maxLength": 9000}, NULL]}, {"null": None, "5": "5", "null\na": "null\na", "b" * 9001: ...}),
    ({"type": ["integer", "array", "string"], "maxLength": 9000}, {"5 a": "5 a", "[1]": [1], "[": ..., "5": 5}),
    ({"anyOf": [LETTERS, NULL]}, {"null": None, "ab": "ab", "nul": ..., " null": ...}),
    ({"type": "string", "pattern": "^https?://", "maxLength": 5000}, {"https://a": "https://a", "a": ...}),
    ({"type": "string", "format": "date"}, {"2026-11-28": "2026-11-28", "2026-13-01": ..., "today": ...}),
]  # fmt: skip
"""Schemas, and texts with the values that they are read as; "...": those that the grammar does not admit."""


@pytest.mark.parametrize(("schema", "texts"), VALUES, ids=[json.dumps(schema)[:40] for schema, _ in VALUES])
def test_a_value_has_a_type_of_its_schema(model: Model, schema: Any, texts: dict[str, Any]) -> None:
    whole = schema_of(schema, **ROOT)
    for syntax, text, value in loose_and_strict(model, whole, texts):
        found = arguments_of(model, syntax, {"v": text})
        assert found == (None if value is ... else {"v": value}), text
        assert found is None or jsonschema.Draft202012Validator(whole).is_valid(found), text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "a"}, {"type": ["string", "null"]}, TEXT,
        {"anyOf": [TEXT | {"maxLength": 9000}, NULL]}, TEXT | {"minLength": 1, "maxLength": 9000},
    ],
)  # fmt: skip
def test_an_end_right_behind_the_beginning_ends_an_empty_text(
    models: dict[tuple[str, bool], Model], schema: Any
) -> None:
    """Where both are texts that share a line break; so a text that begins with the end is none."""
    model = models["qwen3_coder", False]
    syntax = syntax_of(model, schema_of(schema))
    begin, end = model.calls_text([("f", {"v": "#"})]).split("\n#\n")
    assert not model.admits(syntax, f"{begin}\n{end}and a\n{end}")
    assert model.admits(syntax, f"{begin}\nand a\n{end}")


FORMATS = {
    "time": ("10:20:30Z", "10:20"), "date-time": ("2026-11-28T10:20:30.5+01:00", "2026-11-28"),
    "duration": ("P1Y2M3DT4H", "1 day"), "email": ("a.b+c@d-e.org", "a@b@c"), "hostname": ("a-b.example", "-a"),
    "ipv4": ("10.0.255.1", "10.0.256.1"), "ipv6": ("1:2::3:4", "1:2:3"), "uri": ("https://a.b/c?d#e", "a b"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_kept(models: dict[tuple[str, bool], Model], name: str) -> None:
    for family in ("qwen3_coder", "hermes"):  # of which the second has the library's own
        model = models[family, True]
        good, bad = FORMATS[name]
        syntax = syntax_of(model, schema_of({"type": "string", "format": name}), True)
        assert arguments_of(model, syntax, {"v": good}) == {"v": good}
        assert arguments_of(model, syntax, {"v": bad}) is None


@pytest.mark.parametrize("bound", [{"pattern": "a(^b)"}, {"format": "colour"}])
def test_what_no_grammar_can_say_binds_strict_tools_alone(model: Model, bound: dict[str, str]) -> None:
    schema = schema_of({"type": "string", "maxLength": 3, **bound})
    syntax = syntax_of(model, schema)
    assert arguments_of(model, syntax, {"v": "abc"}) == {"v": "abc"}
    assert arguments_of(model, syntax, {"v": "abcd"}) is None
    with pytest.raises(ValueError, match=f"'f': {next(iter(bound))}="):
        syntax_of(model, schema, True)


def test_choices_that_contain_themselves_come_to_an_end(model: Model) -> None:
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(200)}
    for value in ({"$ref": "#/properties/v"}, {"anyOf": [TEXT, {"$ref": "#/properties/v"}]}, {"$ref": "#/$defs/d0"}):
        assert syntax_of(model, schema_of(value, **{"$defs": defs})).structured is not None
    defs["d200"] = {"pattern": "^a"}
    with pytest.raises(ValueError, match="'f': what it asks of texts has more than"):
        syntax_of(model, schema_of({"$ref": "#/$defs/d150"}, **{"$defs": defs}))


@pytest.mark.parametrize("name", ["$filter", "a b", "größe", "🐱", "a.b", "x" * 100, 'a"b', "<a", ""])
def test_parameters_have_any_name(model: Model, name: str) -> None:
    schema = {"type": "object", "properties": {name: TEXT}, "required": [name], "additionalProperties": COUNT}
    syntax = syntax_of(model, schema)
    assert arguments_of(model, syntax, {name: "a"}) == {name: "a"}
    assert arguments_of(model, syntax, {name: "a", "größe b": "5"}) == {name: "a", "größe b": 5}
    assert arguments_of(model, syntax, {name: "a", "other": "b"}) is None
    assert arguments_of(model, syntax, {"other": "5"}) is None


def test_parameters_that_no_schema_names(model: Model) -> None:
    for others, admitted in ((True, True), ({}, True), (False, False), (None, False), (TEXT, True)):
        more = {} if others is None else {"additionalProperties": others}
        syntax = syntax_of(model, schema_of(TEXT, **more))
        found = arguments_of(model, syntax, {"v": "1", "w": "5"})
        assert found == ({"v": "1", "w": "5" if others == TEXT else 5} if admitted else None)
    syntax = syntax_of(model, {"type": "object"})
    assert arguments_of(model, syntax, {"a b": "5", "c": "d"}) == {"a b": 5, "c": "d"}
    syntax = syntax_of(model, {"type": "object", "required": ["w"], "additionalProperties": COUNT})
    assert arguments_of(model, syntax, {"w": "1"}) == {"w": 1} and arguments_of(model, syntax, {"v": "1"}) is None


def test_an_objects_schema_may_be_elsewhere(model: Model) -> None:
    """As tools write it that make schemas of types."""
    for root in ({"$ref": "#/definitions/F"}, {"allOf": [{"$ref": "#/definitions/F"}, {"required": ["v"]}]}):
        syntax = syntax_of(model, {**root, "definitions": {"F": {"type": "object", "properties": {"v": COUNT}}}})
        assert arguments_of(model, syntax, {"v": "5"}) == {"v": 5} and arguments_of(model, syntax, {"v": "a"}) is None


@settings(max_examples=25, deadline=None)
@given(picked=st.lists(st.sampled_from([schema for schema, _ in VALUES]), min_size=1, max_size=3), seed=st.integers(0))
def test_whatever_the_grammar_admits_is_valid(model: Model, picked: list[Any], seed: int) -> None:
    properties = {"v": picked[0], **{f"p{i}": one for i, one in enumerate(picked[1:])}}
    schema = {"type": "object", "properties": properties, "required": ["v"], "additionalProperties": COUNT, **ROOT}
    syntax = syntax_of(model, schema)
    ids, whole = random_output(model, syntax, seed, 150)
    deltas = read(syntax, ids, [1 + seed % 7])
    assert deltas == read(syntax, ids)
    for _, arguments in message_of(deltas).calls if whole else ():
        jsonschema.Draft202012Validator(schema).validate(arguments)


PIECES = [
    "<tool_call>", "</tool_call>", "<minimax:tool_call>", "</minimax:tool_call>", "<function=f>", '<invoke name="f">',
    "</function>", "</invoke>", "f", "\n", "<parameter=", '<parameter name="', "<arg_key>", ">", '">', "</arg_key>",
    "</parameter>", "</arg_value>", "<arg_value>", "v", "n", "null", "5", "[", "]", "{", '"', "\\", "-", "NaN", "ü",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30), cuts=steps)
def test_malformed_parameters_read_alike_at_any_cut_and_are_kept(
    model: Model, pieces: list[str], cuts: list[int]
) -> None:
    properties = {"v": {"type": ["string", "null", "array"]}, "n": COUNT, "vn": TEXT}
    syntax = syntax_of(model, {"type": "object", "properties": properties, "additionalProperties": True})
    begin = model.calls_text([("f", {"v": "#1", "n": "5"})])
    for start in ("", begin[: begin.index("#1")], begin[: begin.index("5")]):
        text = start + "".join(f"{piece}#{i};" if len(piece) > 3 else piece for i, piece in enumerate(pieces))
        whole = model.read(syntax, text)
        assert model.read(syntax, text, cuts) == whole
        shown = "".join(delta.text for delta in whole)
        assert [i for i in range(len(pieces)) if f"#{i};" in text and f"#{i};" not in shown] == []


def test_values_that_are_too_deep_or_too_long_for_a_reader_of_json(model: Model) -> None:
    syntax, deep, long = syntax_of(model, schema_of({"type": ["string", "array", "integer"]})), "[" * 10**5, "9" * 5000
    for text, value in ((deep + deep.replace("[", "]"), f'"{deep + deep.replace("[", "]")}"'), (long, long)):
        found = model.read(syntax, model.calls_text([("f", {"v": text})]))
        assert found[-1].text == f'{{"v": {value}}}'


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
        "where": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["tags"],
    "additionalProperties": False,
    "$defs": {"point": {
        "type": "object", "properties": {"next": {"$ref": "#/$defs/point"}, "x": {"type": "number"}},
        "required": ["x"], "additionalProperties": False,
    }},
}  # fmt: skip


def test_values_within_values_are_held_to_their_schemas(models: dict[tuple[str, bool], Model]) -> None:
    """In Gemma 4's notation, whose keys have no quotes."""
    model = models["gemma4", True]

    def tools(parameters: Any, strict: bool = True) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}]

    syntax = model.syntax(model.closed, "required", tools=tools(NESTED))
    for arguments in ({"tags": ["a"]}, {"tags": ["a", "b"], "where": None}, {"tags": ["b"], "where": {"x": 1.5}},
                      {"tags": ["b"], "where": {"next": {"next": {"x": 1}, "x": 2}, "x": 3}}):  # fmt: skip
        text = model.calls_text([("f", arguments)])
        assert model.admits(syntax, text), text
        assert message_of(model.read(syntax, text, [1])).calls == [("f", arguments)]
    for arguments in ({"tags": []}, {"tags": ["a", "b", "a"]}, {"tags": ["c"]}, {"tags": ["a"], "where": {"next": {}}},
                      {"tags": ["a"], "where": {"x": 1, "y": 2}}, {"tags": "a"}):  # fmt: skip
        assert not model.admits(syntax, model.calls_text([("f", arguments)])), arguments
    with pytest.raises(ValueError, match=r"^tools: function 'f': uniqueItems: must be absent with strict=true"):
        model.syntax(tools=tools({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}))
    with pytest.raises(ValueError, match=r"^tools: function 'f': the parameter 'a:b' must be a word"):
        model.syntax(tools=tools({"type": "object", "properties": {"a:b": {}}}, strict=False))


def test_pythons_constants_are_read_as_json_where_no_text_may_stand(model: Model) -> None:
    """An answer that is not held to a grammar may have them, as in the templates of Qwen3.5 and Nemotron 3."""
    values = {"True": True, "False": False, "None": None, " True": True, "[1]": [1]}
    for text, value in values.items():
        syntax = syntax_of(model, schema_of({"type": ["boolean", "null", "array"]}))
        found = model.read(syntax, model.calls_text([("f", {"v": text})]))
        assert message_of(found).calls == [("f", {"v": value})]
    found = model.read(syntax_of(model, schema_of(TEXT)), model.calls_text([("f", {"v": "True"})]))
    assert message_of(found).calls == [("f", {"v": "True"})]


def test_spellings_of_python_are_read_as_json(models: dict[tuple[str, bool], Model]) -> None:
    """Templates before Gemma 4's latest show None."""
    model = models["gemma4", True]
    text = '<|tool_call>call:now{a:None,b: True , c:[ ],<|"|>d<|"|>:x-1}<tool_call|>'
    found = message_of(model.read(model.syntax(), text, [1])).calls
    assert found == [("now", {"a": None, "b": True, "c": [], "d": "x-1"})]
