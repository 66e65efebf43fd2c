"""Tools and reasoning: what the grammars let a model write, and that a stream cut anywhere reads as the whole does."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import (
    DEMO,
    REASONING,
    SCHEMAS,
    TOOLS,
    VALIDATORS,
    Message,
    Model,
    calls,
    message_of,
    random_output,
    read,
    steps,
    words,
)

from nanovllm import StructuredOutput
from nanovllm.engine.sampling.grammar_limits import check_text
from nanovllm.serve.parsers import Delta, OutputParser, Syntax, check_schema, check_tools
from nanovllm.serve.parsers.syntax import term
from nanovllm.text.checkpoint import CheckpointTokenizer

PIECES = [
    *'<>tolcarhink/_{}[]":;,\n =', "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]",
    "<minimax:tool_call>", '<invoke name="now">', "</invoke>",
]  # fmt: skip


@cache
def usual_syntax(model: Model, prompt: str = "") -> Syntax:
    """The syntax of an output that may call TOOLS."""
    return model.syntax(prompt)


@settings(max_examples=40, deadline=None)
@given(content=words, made=st.lists(calls, max_size=3), reasoning=st.none() | words, opens=st.booleans(), cuts=steps)
def test_messages_are_admitted_and_read_back_at_any_cut(
    model: Model, content: str, made: list[Any], reasoning: str | None, opens: bool, cuts: list[int]
) -> None:
    thinks = model.family in REASONING
    opens = opens and thinks
    reasoning = (reasoning or "x") if opens else reasoning if thinks else None
    prose = model.family not in ("llama3_json", "llama4_pythonic") or not made
    content = content.lstrip("{[<") or "x"
    message = Message(reasoning, content if prose else "", made)
    openings = {"mistral": "[THINK]", "gemma4": "<|channel>thought\n", "seed_oss": "<seed:think>"}
    openings["hy_v3_opensource"] = "<think:opensource>"
    prompt = openings.get(model.family, "<think>\n") if opens else "assistant\n"
    syntax = usual_syntax(model, prompt)
    text = model.write(message, opens)
    assert model.admits(syntax, text)
    whole = model.read(syntax, text)
    assert model.read(syntax, text, cuts) == whole
    assert message_of(whole) == message


@settings(max_examples=30, deadline=None)
@given(made=st.lists(calls, min_size=1, max_size=2), end=st.integers(0, 200), cuts=steps)
def test_an_output_that_ends_early_reads_alike_at_any_cut(
    model: Model, made: list[Any], end: int, cuts: list[int]
) -> None:
    text = model.write(Message("why" if model.family in REASONING else None, "", made))
    syntax = usual_syntax(model)
    ids = model.ids(text)[:end]
    assert read(syntax, ids, cuts) == read(syntax, ids)
    assert syntax.finish_reason("length", model.reader(syntax, ids)) == "length"


@settings(max_examples=30, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES), max_size=40).map("".join), cuts=steps)
def test_any_text_at_all_reads_alike_at_any_cut(model: Model, text: str, cuts: list[int]) -> None:
    syntax = usual_syntax(model)
    assert model.read(syntax, text, cuts) == model.read(syntax, text)


def test_text_that_is_no_call_stays_content(model: Model) -> None:
    syntax = model.syntax()
    for text in ("Just words.\n", "a < b, [1, 2] and more;\n\n", "x <tool_cal", 'x {"name": 1}', "x [TOOL", "\n\nx\n"):
        assert model.admits(syntax, text) and model.read(syntax, text, [1]) == [Delta("content", text)]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_whatever_the_model_it_can_only_write_calls(model: Model, choice: Any) -> None:
    syntax = model.syntax(model.closed, choice)
    ended = 0
    for seed in range(25):
        ids, whole = random_output(model, syntax, seed)
        deltas = read(syntax, ids, [1 + seed % 7])
        assert deltas == read(syntax, ids)
        assert {delta.kind for delta in deltas} <= {"call", "arguments"}
        assert {delta.name for delta in deltas if delta.kind == "call"} <= {*SCHEMAS}
        if whole:
            ended += 1
            made = message_of(deltas).calls
            assert made and (choice == "required" or [name for name, _ in made] == ["get_weather"])
            for name, arguments in made:
                VALIDATORS[name].validate(arguments)
            reader = model.reader(syntax, ids)
            assert syntax.finish_reason("stop", reader) == ("tool_calls" if choice == "required" else "stop")
            assert syntax.finish_reason("length", reader) == "length"
    assert ended >= 5


def test_what_a_grammar_refuses(model: Model) -> None:
    required, auto = model.syntax(model.closed, "required"), model.syntax(model.closed)
    single, paris = model.syntax(model.closed, "required", parallel=False), [("get_weather", {"city": "Paris"})]
    one, two = model.calls_text(paris), model.calls_text(paris * 2)
    assert model.admits(required, one) and model.admits(required, two)
    assert model.admits(single, one) and not model.admits(single, two)
    assert not model.admits(required, "") and not model.admits(required, "Paris is " + one)
    for name, arguments in (
        ("get_whether", {"city": "Paris"}),
        ("get_weather", {"days": 3}),
        ("get_weather", {"city": "Paris", "days": "three"}),
        ("get_weather", {"city": "Paris", "unit": "kelvin"}),
        ("get_weather", {"city": "Paris", "town": "Paris"}),
    ):
        assert not model.admits(required, model.calls_text([(name, arguments)]))
        assert not model.admits(auto, model.calls_text([(name, arguments)]))


def test_a_tool_that_is_not_strict_has_its_schema(model: Model) -> None:
    """As Codex and LlamaIndex send every tool."""
    loose = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": False}}]
    for choice in ("required", "auto"):
        syntax = model.syntax(model.closed, choice, tools=loose)
        assert model.admits(syntax, model.calls_text([("get_weather", {"city": "Paris"})]))
        assert not model.admits(syntax, model.calls_text([("get_weather", {"town": "Paris"})]))


def test_a_reference_to_no_schema_is_left_to_the_grammar(model: Model) -> None:
    for reference in ("#/type/x", "#/required/0", "#/$defs/a/b"):
        schema = {"type": "object", "properties": {"a": {"$ref": reference}}, "required": ["a"]}
        assert model.syntax("", "required", tools=[tool(parameters=schema)]).structured is not None


def test_a_schema_that_does_not_compile_is_named_by_its_tool(model: Model) -> None:
    model.check_blame()


def test_a_schema_beside_tools_holds_the_content(model: Model) -> None:
    integers = StructuredOutput(json={"type": "array", "items": {"type": "integer"}})
    syntax = model.syntax(model.closed, structured=integers)
    assert model.admits(syntax, "[1, 2]") and model.admits(syntax, model.calls_text([("now", {})]))
    assert not model.admits(syntax, "words")


@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_qwen_call_without_its_tag_is_a_call(models: dict[tuple[str, bool], Model], has_tokens: bool) -> None:
    model = models["qwen3_coder", has_tokens]
    made = [("get_weather", {"city": "Paris"}), ("now", {})]
    bare = model.calls_text(made).replace("<tool_call>\n", "")
    for text in (f"I look.\n{bare}", f"I look.\n{bare}".replace("\n</tool_call>", "")):
        syntax = model.syntax()
        assert model.admits(syntax, text) == (not has_tokens or "</tool_call>" not in text)
        for cuts in ([1], [5], None):
            found = model.read(syntax, text, cuts)
            assert message_of(found) == Message(None, "I look.", made)
    text = "<function=other>\n</function>"
    assert model.read(model.syntax(), text, [2]) == [Delta("content", text)]


def test_calls_of_minimax_as_its_template_writes_them(models: dict[tuple[str, bool], Model]) -> None:
    model = models["minimax_m2", True]
    syntax, made = model.syntax(), [("get_weather", {"city": "Paris", "days": 2}), ("now", {})]
    text = model.calls_text(made).replace('">\n', '">').replace("</parameter>\n", "</parameter>")
    assert model.admits(syntax, text) and message_of(model.read(syntax, text, [3])).calls == made
    for text in ("<minimax:tool_call></minimax:tool_call>", '<minimax:tool_call><invoke name="other">'):
        assert model.read(syntax, text, [2]) == [Delta("content", text)]


def test_a_glm_name_that_is_cut_off_is_no_call_of_a_shorter_one(models: dict[tuple[str, bool], Model]) -> None:
    """Nothing but a blank need stand behind the name: what ends it is a parameter, or the end of the call."""
    model = models["glm45", True]
    syntax = model.syntax(tools=[*TOOLS, {"type": "function", "function": {"name": "get"}}])
    for text, found in (("<tool_call>get", []), ("<tool_call>get it", [Delta("content", "<tool_call>get it")])):
        assert model.read(syntax, text, [1]) == found
    assert message_of(model.read(syntax, "<tool_call>get</tool_call>", [1])).calls == [("get", {})]


def test_a_llama_call_between_words_is_a_call(models: dict[tuple[str, bool], Model]) -> None:
    model = models["llama3_json", True]
    made = [("get_weather", {"city": "{Paris}"}), ("now", {})]
    syntax, text = model.syntax(), f"I look {{there}}:\n{model.calls_text(made)}\nand wait {{"
    assert model.admits(syntax, text)
    for cuts in ([1], [5], None):
        found = model.read(syntax, text, cuts)
        assert message_of(found) == Message(None, "I look {there}:and wait {", made)
    assert syntax.finish_reason("stop", model.reader(syntax, model.ids(text))) == "tool_calls"
    for text, arguments in (('A {"name": "now"} b', {}), ('A {"parameters": {"a": 1}, "name": "now"} b', {"a": 1})):
        assert message_of(model.read(syntax, text, [1])) == Message(None, "A b", [("now", arguments)])
    for text in ('As {"name": "other", "parameters": {}} says', 'A {"a": {"name": "now"}} b', 'x {"a":'):
        assert model.read(syntax, text, [1]) == [Delta("content", text)]


def test_a_schema_that_is_too_deep_is_refused_beside_reasoning(models: dict[tuple[str, bool], Model]) -> None:
    for deep in ("[" * 100_000 + "]" * 100_000, "{" * 9):
        with pytest.raises(ValueError, match=r"structured_outputs\.json: "):
            models["hermes", True].syntax("<think>\n", tools=None, structured=StructuredOutput(json=deep))


def test_a_tag_in_plain_tokens_is_text(models: dict[tuple[str, bool], Model]) -> None:
    model = models["hermes", True]
    syntax = model.syntax()
    ids = [i for character in 'say <tool_call>\n{"name": "now"' for i in model.tokenizer.encode(character)]
    assert read(syntax, ids, [1]) == [Delta("content", 'say <tool_call>\n{"name": "now"')]
    icons = "\uf8ff\U000f8000\U000f803f\U00100000"
    assert model.read(syntax, icons) == [Delta("content", icons)]


def test_a_tag_within_arguments_is_its_name(models: dict[tuple[str, bool], Model]) -> None:
    model = models["hermes", True]
    message = Message(calls=[("get_weather", {"city": "a </think> b"})])
    assert message_of(model.read(model.syntax(), model.write(message))) == message


def test_plain_answers_need_no_reader(models: dict[tuple[str, bool], Model]) -> None:
    syntax = models["llama3_json", True].syntax("", tools=None)
    assert syntax.reader() is None and syntax.structured is None


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [("hermes", "hermes", "think"), ("llama3", "llama3_json", None), ("mistral", "mistral_list", None),
     ("nemotron2", "nemotron", "think"), ("nemotron3", "qwen3_coder", "think"), ("gemma", None, None),
     ("minimax", "minimax_m2", "think"), ("lfm2", "lfm2", "think"), ("deepseek_r1", "deepseek_v3", "think"),
     ("deepseek_v31", "deepseek_v31", "think"),
     ("llama4_pythonic", "llama4_pythonic", None), (None, "hermes", "think")],
)  # fmt: skip
def test_parsers_are_chosen_by_the_template(template: str | None, tools: str | None, reasoning: str | None) -> None:
    name = Path(__file__).parent / "templates" / f"{template}.jinja"
    parser = OutputParser(CheckpointTokenizer(DEMO, name if template else None))
    assert (parser.tool_family, parser.reasoning) == (tools, reasoning)
    if tools is None:
        with pytest.raises(ValueError, match="tools: this model's chat template has no tool calls"):
            parser.syntax("", check_tools(TOOLS))


def test_unknown_parsers_are_refused() -> None:
    for name, parsers in (("tool_call_parser", ("x",)), ("reasoning_parser", ("none", "x"))):
        with pytest.raises(ValueError, match=f"{name}='x': must be auto, none or one of"):
            OutputParser(CheckpointTokenizer(DEMO), *parsers)


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([], None, "tools: must be a list of 1 to 128"),
        ([tool()] * 129, None, "tools: must be a list of 1 to 128"),
        ([tool(), tool()], None, "tools: must have different names, 'f'"),
        ([tool(name="")], None, "name='': must be 1 to 64"),
        ([tool(name=3)], None, "must be 1 to 64"),
        ([{"type": "web_search"}], None, r"tools\[0\]: must be"),
        ([tool(parameters=[])], None, "must be a JSON schema, an object"),
        ([tool(parameters={"type": "array"})], None, "must be the schema of an object"),
        ([tool(parameters={"properties": [1]})], None, "parameters.properties: must be an object"),
        ([tool(parameters={"$defs": "a"})], None, r"parameters.\$defs: must be an object"),
        ([tool(parameters={"required": 5})], None, "parameters.required: must be a list"),
        ([tool(parameters={"properties": {"a": {"enum": 5}}})], None, "properties.a.enum: must be a list"),
        ([tool(strict=1)], None, "strict: must be true or false"),
        ([tool(parameters={"$ref": "http://x/y"})], None, "must point into the schema itself"),
        ([tool(parameters={"properties": {str(i): {} for i in range(1001)}})], None, "has 1001 properties"),
        ([tool(parameters={"$defs": {str(i): {} for i in range(501)}})], None, "has 501 definitions"),
        ([tool(parameters={"enum": ["x" * 200_000]})], None, "at most 131072 are allowed"),
        ([tool()], "maybe", "tool_choice: must be"),
        ([tool()], {"type": "function", "function": {"name": "g"}}, "'g': must be the name of one of the tools"),
        (None, "required", "where no tools are given"),
    ],
)
def test_tools_out_of_bounds_are_refused(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_tools(tools, choice)
    assert len(str(caught.value)) < 300


def test_deep_schemas_are_refused_without_recursion() -> None:
    for depth in (300, 3000):
        text = '{"items":' * depth + "{}" + "}" * depth
        with pytest.raises(ValueError, match="nest deeper"):
            term(StructuredOutput(json=text))
        if depth == 300:
            with pytest.raises(ValueError, match="nest deeper"):
                check_schema(json.loads(text), "schema")


def test_tools_whose_schemas_are_too_long_together_take_any_object(model: Model) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "enum": ["x" * 50]} for i in range(40)}}
    many = [tool(name=f"f{i}", parameters=schema) for i in range(60)] + [tool(name="g", parameters=schema, strict=True)]
    syntax = model.syntax(model.closed, "required", tools=many)
    assert model.admits(syntax, model.calls_text([("f0", {"p0": "y"})]))
    assert message_of(model.read(syntax, model.calls_text([("f0", {"p0": "5"})]))).calls == [("f0", {"p0": "5"})]
    for tools, name in ((many, "g"), (many[:5], "f0")):
        syntax = model.syntax(model.closed, "required", tools=tools)
        assert not model.admits(syntax, model.calls_text([(name, {"p0": "y"})]))
        assert model.admits(syntax, model.calls_text([(name, {"p0": "x" * 50})]))


def test_tools_that_take_too_many_rules_together_take_any_object(model: Model) -> None:
    """An agent's tools are too many rules in the forms that have some for each parameter, and no engine takes them."""
    entry = {"type": "object", "properties": {f"q{i}": {"type": "string", "minLength": 2} for i in range(4)}}
    for num_tools in (3, 128):
        tools = [tool(name=f"f{i}", parameters={**entry, "title": str(i)}) for i in range(num_tools)]
        syntax = model.syntax(model.closed, "required", tools=tools)
        assert syntax.structured is not None and syntax.structured.grammar is not None
        check_text("grammar", syntax.structured.grammar)
        assert model.admits(syntax, model.calls_text([("f2", {"q1": "xy"})]))
    tools = [tool(name=f"f{i}") for i in range(128)]
    model.matcher(model.syntax(tools=tools))


def test_which_tools_may_be_called() -> None:
    both = [tool(), tool(name="g")]
    assert check_tools(both, "none") is None and check_tools(None) is None
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool(name="g")] * 2}}
    choice = check_tools(both, allowed)
    assert choice is not None and choice.mode == "required" and [one.name for one in choice.tools] == ["g"]
    named = check_tools(both, {"type": "function", "function": {"name": "g"}}, True)
    assert named is not None and named.mode == "named" and not named.parallel
    maybe = check_tools([tool(parameters={"type": ["object", "null"]})])
    assert maybe is not None and maybe.tools[0].parameters == {"type": "object"}
