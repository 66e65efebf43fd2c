"""Grammars made of JSON schemas admit what is valid under them, whatever the schema, or the schema is refused."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import ROOT

llguidance = pytest.importorskip("llguidance")

from nanovllm.engine.sampling.grammar_compiler import GrammarCompiler  # noqa: E402
from nanovllm.engine.sampling.schema_repairs import move_bounds  # noqa: E402

COMPILER = GrammarCompiler((ROOT / "assets" / "demo-qwen3" / "tokenizer.json").read_text(), 1030, [1029])
CLOSE = set('"}],:0123456789.-')
"""Characters that end a value soon."""

BOUNDS = st.sampled_from([0, 1, -1, 2, -3, 10, 0.5, 2.5, -0.5, 0.25, -2.25, 1.0, 0.001])
KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
NUMBERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["number", "integer", ["number", "null"]])},
    optional={**dict.fromkeys(KEYS, BOUNDS), "multipleOf": st.sampled_from([0.5, 0.25, 2, 3])},
)
MERGED = st.lists(NUMBERS, min_size=2, max_size=2)
VALUES = st.one_of(
    NUMBERS, NUMBERS, MERGED.map(lambda two: {"allOf": two}), MERGED.map(lambda two: {"anyOf": two}),
    MERGED.map(lambda two: two[0] | {"$ref": "#/$defs/number"}), st.just({"type": "string", "maxLength": 2}),
    st.just({"enum": [1, "a", None, [1]]}),
)  # fmt: skip
NAMES = ("a", "ab", "x_1", "score")
OBJECTS = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3)},
    optional={
        "required": st.sets(st.sampled_from(NAMES[:2])).map(sorted),
        "additionalProperties": st.one_of(st.booleans(), VALUES),
        "patternProperties": st.dictionaries(
            st.sampled_from(["^score$", "^x_", "[0-9]$", "^(a|score)$", "^a", "z"]), VALUES, max_size=1
        ),
    },
)
SCHEMAS = st.one_of(VALUES, OBJECTS, st.lists(OBJECTS, min_size=2, max_size=2).map(lambda two: {"allOf": two}))


def texts(start: Any, rng: random.Random, count: int) -> list[str]:
    """Texts on random ways through a grammar that came to an end. Fails where the library gives up on one."""
    found = []
    for _ in range(count):
        matcher, written = start.deep_copy(), ""
        while len(written) < 120:
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
            assert not matcher.is_error(), (written, matcher.get_error())
            if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.3):
                found.append(written)
                break
            pieces = {int(i): PIECES[i] for i in allowed if i < len(PIECES) and PIECES[i].isascii()}
            if not pieces:
                break
            closing = [i for i, piece in pieces.items() if set(piece) <= CLOSE]
            token_id = rng.choice(closing if closing and rng.random() < 0.7 else [*pieces])
            matcher.consume_token(token_id)
            written += pieces[token_id]
    return found


PIECES = [COMPILER._tokenizer.decode_str([i]) for i in range(1000)]


@settings(max_examples=150, deadline=None)
@given(SCHEMAS, NUMBERS, st.integers(0, 1 << 30))
def test_what_is_admitted_is_valid(schema: dict[str, Any], shared: dict[str, Any], seed: int) -> None:
    schema = {**schema, "$defs": {"number": shared}}
    try:
        start = COMPILER.check("json", json.dumps(schema))
    except ValueError:
        return
    for text in texts(start, random.Random(seed), 4):
        with suppress(OverflowError):  # which is of the validator, for 1e999
            jsonschema.validate(json.loads(text), schema)


def admits(kind: str, constraint: str, text: str) -> bool:
    matcher = COMPILER.compile(kind, constraint)
    ids = COMPILER._tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "outside", "inside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0", "0.0", "-0", "0.6"], ["0.001", "0.5", "0.25"]),
        ({"exclusiveMinimum": 0, "maximum": 0.001}, ["0"], ["0.001", "0.0002"]),
        ({"exclusiveMinimum": 2, "exclusiveMaximum": 2.5}, ["2", "2.5"], ["2.1", "2.4999"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0", "0", "-0.6"], ["-0.5", "-0.1"]),
        ({"minimum": -2.5, "exclusiveMaximum": -2}, ["-2", "-2.0"], ["-2.1", "-2.5"]),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0"], ["0.1"]),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, ["0"], ["0.1"]),
        ({"minimum": 0, "exclusiveMinimum": False, "maximum": 0.5}, [], ["0", "0.1"]),
        ({"multipleOf": 0.25, "minimum": 0.3, "maximum": 0.5}, ["0.25", "0.75"], ["0.50"]),
        ({"multipleOf": 0.25, "minimum": -0.5, "maximum": 0}, ["-0.75", "0.25"], ["-0.50", "-0.25", "0"]),
        ({"multipleOf": 0.1, "minimum": 0.25, "maximum": 1.5}, ["0.2", "1.6"], ["0.3", "1.5"]),
        ({"allOf": [{"multipleOf": 0.25}, {"exclusiveMinimum": 0.25, "maximum": 0.5}]}, ["0.25", "0.75"], ["0.50"]),
    ],
)
def test_bounds_that_the_library_gets_wrong(schema: dict[str, Any], outside: list[str], inside: list[str]) -> None:
    schema = {"type": "number", **schema}
    assert [text for text in inside + outside if admits("json", json.dumps(schema), text)] == inside
    within = f'start: "<" %json {json.dumps(schema)} ">"'
    assert [text for text in inside + outside if admits("grammar", within, f"<{text}>")] == inside


def test_bounds_move_where_they_must() -> None:
    """Data and names that look like bounds stay."""
    same: dict[str, Any] = {"properties": {"exclusiveMinimum": {"const": {"exclusiveMinimum": 0}}}, "maximum": 0.5}
    whole = {"exclusiveMinimum": 0, "maximum": 1}
    for schema in (same, whole):
        before = json.dumps(schema)
        move_bounds(schema)
        assert json.dumps(schema) == before


PARTS: dict[str, Callable[[Any], Any]] = {
    "#/$defs/x": lambda part: {"x": part},
    "#/$defs/x/allOf/0": lambda part: {"x": {"allOf": [part]}},
    "#/$defs/a%20b": lambda part: {"a b": part},
    "#/$defs/a~1b": lambda part: {"a/b": part},
    "#name": lambda part: {"x": {"$anchor": "name", "allOf": [part]}},
}
"""References, and the definitions in which they name a part."""


@pytest.mark.parametrize(
    ("pattern", "is_refused"),
    [("^score$", True), ("^(a|score)$", True), ("^[a]$", True), ("^a|b$", False), ("^s", False), ("score", False)],
)
@pytest.mark.parametrize("reference", [None, *PARTS])
def test_patterns_of_declared_names(pattern: str, is_refused: bool, reference: str | None) -> None:
    number = {"type": "integer"}
    declared = {"type": "object", "properties": {"score": number, "a": number}, "additionalProperties": False}
    patterns = {"patternProperties": {pattern: number}}
    schema: dict[str, Any] = declared | patterns
    if reference is not None:
        schema = {"$defs": PARTS[reference](patterns), "allOf": [declared, {"$ref": reference}]}
    try:
        COMPILER.check("json", json.dumps(schema))
    except ValueError as error:
        assert is_refused and "must match other names than the declared properties" in str(error)
    else:
        assert not is_refused
