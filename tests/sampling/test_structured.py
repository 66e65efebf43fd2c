"""Constrained outputs: what comes out fits, whatever the model would rather say, and nobody else notices."""

import json
import re
from typing import Any

import pytest
from sampling_engines import PROMPT, Engines

from nanovllm import LLM, SamplingParams, StructuredOutput
from nanovllm.engine.sampling import structured
from nanovllm.engine.sampling.structured import Matcher, StructuredOutputs
from nanovllm.text.checkpoint import CheckpointTokenizer

pytest.importorskip("llguidance")

HOT: dict[str, Any] = {"temperature": 1.5, "max_tokens": 200}
ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 12},
        "number": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["street", "number"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "array of objects": {"type": "array", "items": ADDRESS, "minItems": 2, "maxItems": 3},
    "references": {"$defs": {"node": {"type": "object", "properties": {
                       "value": {"type": "integer", "minimum": 0, "maximum": 9},
                       "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                       "required": ["value", "next"], "additionalProperties": False}}, "$ref": "#/$defs/node"},
    "unicode names": {"type": "object", "properties": {"größe €": {"type": "boolean"}, "\"": {"type": "null"}},
                      "required": ["größe €", "\""], "additionalProperties": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(engines: Engines) -> LLM:
    return engines.get()


def test_hard_schemas_at_a_high_temperature(llm: LLM) -> None:
    """All schemas in one batch, several seeds, beside plain rows that stay what they are."""
    jsonschema = pytest.importorskip("jsonschema")
    plain = SamplingParams(temperature=0.8, seed=1, max_tokens=40)
    (alone,) = llm.generate([PROMPT], plain, use_tqdm=False)
    wanted = [schema for schema in SCHEMAS.values() for _ in range(4)]
    params = [SamplingParams(**HOT, seed=i, structured_outputs=StructuredOutput(json=s)) for i, s in enumerate(wanted)]
    outputs = llm.generate([PROMPT] * (len(params) + 2), [plain, *params, plain], use_tqdm=False)
    assert outputs[0].token_ids == outputs[-1].token_ids == alone.token_ids
    num_ended = 0
    for output, schema in zip(outputs[1:-1], wanted, strict=True):
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            num_ended += 1
            jsonschema.validate(json.loads(output.text), schema)
    assert num_ended >= len(wanted) - 3, "outputs are short, save lists that a model may draw out"


def test_what_many_prompts_share_is_read_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's bad words are tokenized and its choices written as a grammar once, not for each of its prompts."""
    encoded, texts = [], []
    encode, of_value = CheckpointTokenizer.encode, structured._text
    monkeypatch.setattr(CheckpointTokenizer, "encode", lambda self, text, **options: (
        encoded.append(text), encode(self, text, **options))[1])
    monkeypatch.setattr(structured, "_text", lambda *given: (texts.append(given), of_value(*given))[1])
    choice = StructuredOutput(choice=[f"number {i}" for i in range(50)])
    params = SamplingParams(max_tokens=20, bad_words=["zebra one", "zebra two"], structured_outputs=choice)
    outputs = llm.generate([[5, 6, 7]] * 20, params, use_tqdm=False)
    assert all(output.outputs[0].text.startswith("number ") for output in outputs)
    assert len(encoded) <= 4 and len(texts) <= 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_regex_choice_and_grammar(engines: Engines, ranks: int) -> None:
    llm = engines.get(tensor_parallel_size=ranks)
    choices = ("red kite", "blue kite (old)", "a.b*c")
    lark = 'start: "(" start ")" | WORD\nWORD: /[a-c]{1,3}/'
    kinds: list[dict[str, Any]] = [{"regex": r"[a-f]{3}-\d{2}"}, {"choice": choices}, {"grammar": lark}]
    params = [
        SamplingParams(temperature=1.5, seed=i, max_tokens=60, structured_outputs=StructuredOutput(**kind))
        for i, kind in enumerate(kinds)
    ]
    texts = [output.text for output in llm.generate([PROMPT] * 3, params, use_tqdm=False)]
    assert re.fullmatch(r"[a-f]{3}-\d{2}", texts[0])
    assert texts[1] in choices
    assert re.fullmatch(r"\(*[a-c]{1,3}\)*", texts[2]) and texts[2].count("(") == texts[2].count(")")


SQL = """
    root ::= select " where " condition   # as llama.cpp writes grammars
    select ::= "SELECT " column " from " table
    column ::= "col_1" | "col_2"
    table ::= "table_" [1-9]{1,3}
    condition ::= column "=" [0-9] | "(" condition " or " condition ")"
"""


def test_a_grammar_in_gbnf(llm: LLM) -> None:
    wanted = StructuredOutput(grammar=SQL)
    params = [SamplingParams(temperature=1.5, seed=i, max_tokens=120, structured_outputs=wanted) for i in range(6)]
    outputs = llm.generate([PROMPT] * 6, params, use_tqdm=False)
    ended = [output.text for output in outputs if output.finish_reason == "stop"]
    assert ended
    for text in ended:
        head, condition = text.split(" where ")
        assert re.fullmatch(r"SELECT col_[12] from table_[1-9]{1,3}", head)
        while (shorter := re.sub(r"\(c or c\)|col_[12]=[0-9]", "c", condition)) != condition:
            condition = shorter
        assert condition == "c"


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (StructuredOutput(json={"type": "no such type"}), "json"),
        (StructuredOutput(json="{not json"), "json"),
        (StructuredOutput(regex="(unclosed"), "regex"),
        (StructuredOutput(grammar="start: missing_rule"), "grammar"),
    ],
)
def test_what_does_not_compile_is_refused(llm: LLM, wanted: StructuredOutput, field: str) -> None:
    with pytest.raises(ValueError, match=rf"StructuredOutput\.{field}=.*must compile"):
        llm.add_request(PROMPT, SamplingParams(structured_outputs=wanted))
    assert llm.is_finished()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("root ::= other", "Rule 'other' not found"),
        ('other ::= "x"', "No 'root' rule found"),
        ('root ::= "x" $', "Expected name at line 1"),
        ('root ::= "\\', "it ends within an escape"),
        ("root ::= " + "(" * 5000 + '"x"' + ")" * 5000, "its groups nest too deep"),
        ('root ::= r0\nr600 ::= "x"\n' + "\r".join(f"r{i} ::= r{i + 1}" for i in range(600)), "it has 602 rules"),
        ('root ::= "' + "x" * 16374 + '"', "it has 16385 bytes, at most 16384"),
    ],
)
def test_what_is_wrong_in_gbnf_is_named(llm: LLM, grammar: str, reason: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutput(grammar=grammar))
    with pytest.raises(ValueError, match=rf"StructuredOutput\.grammar=.*{reason}"):
        llm.add_request(PROMPT, params)


def chain(length: int) -> dict[str, Any]:
    """Objects that refer to one another, one within the other."""
    links = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"],
                  "additionalProperties": False}
        for i in range(length - 1)
    }  # fmt: skip
    return {"$defs": {**links, f"d{length - 1}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def wide(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(count)},
            "required": [f"p{i}" for i in range(count)], "additionalProperties": False}  # fmt: skip


def rules(count: int) -> str:
    return "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(count - 2)) + f'r{count - 2}: "b"'


LARGEST = {
    "references": StructuredOutput(json=chain(500)),
    "properties": StructuredOutput(json=wide(1000)),
    "rules": StructuredOutput(grammar=rules(500)),
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_that_is_let_in_is_served(llm: LLM, name: str) -> None:
    """In another process a stack that is too small would end it; here it would end the tests."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=60, structured_outputs=LARGEST[name])
    outputs = llm.generate([PROMPT] * 3, params, use_tqdm=False)
    assert {output.finish_reason for output in outputs} <= {"length", "stop"}


TOO_LARGE = {
    "references": StructuredOutput(json=chain(501)),
    "more references": StructuredOutput(json=chain(1000)),
    "references within a grammar": StructuredOutput(grammar="// %json {\nstart: %json " + json.dumps(chain(501))),
    "properties": StructuredOutput(json=wide(1001)),
    "bytes": StructuredOutput(json={"enum": ["x" * (128 << 10)]}),
    "depth": StructuredOutput(json='{"items": ' * 9000 + "{}" + "}" * 9000),
    "choices": StructuredOutput(choice=[f"choice {i}" for i in range(20_000)]),
    "rules": StructuredOutput(grammar=rules(501)),
    "regex": StructuredOutput(regex="a" * ((16 << 10) + 1)),
    "masks": StructuredOutput(json={"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1000)}}),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_would_hold_up_every_step_is_refused(llm: LLM, name: str) -> None:
    with pytest.raises(ValueError, match=r"StructuredOutput\.\w+=.*must compile, but: ") as error:
        llm.add_request(PROMPT, SamplingParams(structured_outputs=TOO_LARGE[name]))
    assert len(str(error.value)) < 500
    assert llm.is_finished()


def test_a_failing_constraint_ends_its_own_request_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SamplingParams(temperature=0.8, seed=1, max_tokens=20)
    (alone,) = llm.generate([PROMPT], plain, use_tqdm=False)
    accept = Matcher.accept
    seen: list[int] = []

    def fails_at_the_third(self: Matcher, token_id: int) -> None:
        accept(self, token_id)
        seen.append(token_id)
        if len(seen) == 3:
            self.error = "structured_outputs: broken for the test"

    monkeypatch.setattr(Matcher, "accept", fails_at_the_third)
    constrained = SamplingParams(**HOT, seed=1, structured_outputs=StructuredOutput(regex="a{30}"))
    first, second = llm.generate([PROMPT] * 2, [constrained, plain], use_tqdm=False)
    assert (first.finish_reason, first.outputs[0].stop_reason) == ("abort", "structured_outputs: broken for the test")
    assert second.token_ids == alone.token_ids
    assert llm.is_finished() and llm.engine.loop._num_sampling == 0


def test_without_a_way_out(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    """The grammar is done, but min_tokens forbids the end, or no token that fits is allowed: the request ends, and only
    it, and nothing is written to the terminal."""
    wanted = StructuredOutput(choice=["yes"])
    params = SamplingParams(temperature=1.0, seed=1, min_tokens=10, max_tokens=20, structured_outputs=wanted)
    lost = "structured_outputs: token 0 does not fit; other options may leave none"
    forbidden = "they left no token to sample"
    never = [
        (SamplingParams(structured_outputs={"regex": regex}, **options), why)
        for regex, options, why in (
            ("yes", {"bad_words": ["y", "yes", "ye"]}, lost),
            ("yes", {"allowed_token_ids": [0, 5]}, lost),
            ("!!", {"allowed_token_ids": [5, 6]}, f"allowed_token_ids, structured_outputs: {forbidden}"),
            ("!!", {"bad_words": ["!"]}, f"bad_words, structured_outputs: {forbidden}"),
        )
    ]
    output, *others = llm.generate([PROMPT] * 5, [params, *(each for each, _ in never)], use_tqdm=False)
    assert output.finish_reason in ("stop", "abort") and output.text.startswith("yes")
    assert llm.tokenizer.encode("!") == [0], "what is sampled where nothing is left"
    for other, (_, why) in zip(others, never, strict=True):
        assert (len(other.token_ids), other.finish_reason, other.outputs[0].stop_reason) == (1, "abort", why)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("eos_ids", [[1023], [1021, 1023, 5000]])
def test_every_end_of_text_ends_a_grammar(llm: LLM, eos_ids: list[int]) -> None:
    """Also where the model names several, some that it has no logits for; masks are filled side by side."""
    constraints = StructuredOutputs(llm.engine.tokenizer.own, 1024, eos_ids)
    token = llm.tokenizer.encode("a")[0]
    matchers = [constraints.matcher(StructuredOutput(regex="a{1,3}")) for _ in range(3)]
    matchers[1].accept(token)
    matchers[2].error = "structured_outputs: broken for the test"
    masks = constraints.fill_masks(matchers)
    allowed = [{i for i in range(1024) if mask[i // 32] >> (i % 32) & 1} for mask in masks]
    ends = {i for i in eos_ids if i < 1024}
    assert token in allowed[0] and not ends & allowed[0]
    assert ends <= allowed[1] and len(allowed[2]) == 1024
    for end in ends:
        matchers[1].accept(end)
        assert matchers[1].error is None


def test_an_end_of_text_that_is_text_can_follow_as_a_draft(llm: LLM) -> None:
    """Where the grammar admits its text; where the output ends with it, nothing follows."""
    token = llm.tokenizer.encode("a")[0]
    constraints = StructuredOutputs(llm.engine.tokenizer.own, 1024, [token])
    matcher = constraints.matcher(StructuredOutput(regex="ba{3}c"))
    assert matcher.after(token) is None and matcher.error is None
    matcher.accept(llm.tokenizer.encode("b")[0])
    following = matcher.after(token)
    matcher.accept(token)
    assert following is not None and following.error is matcher.error is None
    assert (constraints.fill_masks([following]) == constraints.fill_masks([matcher])).all()
