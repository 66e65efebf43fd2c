"""JSON and tool calls that are drafted are as valid as without drafts, counted, and the same."""

import json
import random

import jsonschema
import pytest
import torch
from serve.parsing import DEMO
from test_speculation import OBJECT, draft_always, params, right, start, use

from nanovllm import LLM, SamplingParams
from nanovllm.serve.parsers import OutputParser, Syntax, check_tools
from nanovllm.text.checkpoint import CheckpointTokenizer

LIST = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4}
NESTED = {
    "type": "object", "properties": {"colours": LIST, "place": OBJECT}, "required": ["place", "colours"],
    "additionalProperties": False,
}  # fmt: skip
SCHEMAS = {"go": OBJECT, "paint": NESTED}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in SCHEMAS.items()]
PROMPTS = ["Go north.", 'go {"place": "north", "count": 1, "flag": true}']


def syntaxes() -> list[Syntax]:
    tokenizer, tools = CheckpointTokenizer(DEMO), check_tools(TOOLS, "required", False)
    return [OutputParser(tokenizer, family, "none").syntax("", tools) for family in ("hermes", "qwen3_coder", "glm45")]


def requests(of_calls: list[Syntax], count: int) -> tuple[list[str], list[SamplingParams]]:
    """Prompts, each `count` times, and parameters: JSON by schema, then calls as each family writes them."""
    constraints = [{"json": schema} for schema in SCHEMAS.values()]
    constraints += [syntax.structured.given for syntax in of_calls if syntax.structured is not None]
    every = [(prompt, each) for each in constraints for prompt in PROMPTS for _ in range(count)]
    given = [
        params(temperature=(0.0, 0.7, 1.2)[seed % 3], seed=seed, max_tokens=160, ignore_eos=False,
               structured_outputs=each, stop=["never"] if seed % 2 else [])
        for seed, (_, each) in enumerate(every)
    ]  # fmt: skip
    return [prompt for prompt, _ in every], given


def is_valid(kind: int, ids: list[int], of_calls: list[Syntax], llm: LLM) -> bool:
    """Whether an answer is what the schema of this number says, or a call that its tool's says."""
    try:
        if kind < len(SCHEMAS):
            text = llm.tokenizer.decode(ids, skip_special_tokens=True)
            jsonschema.validate(json.loads(text), [*SCHEMAS.values()][kind])
            return True
        syntax = of_calls[kind - len(SCHEMAS)]
        reader, detokenizer = syntax.reader(), syntax.detokenizer()
        assert reader is not None
        deltas = [*reader.push("".join(map(detokenizer.push, ids)) + detokenizer.flush()), *reader.finish()]
        [name] = [delta.name for delta in deltas if delta.kind == "call"]
        jsonschema.validate(json.loads("".join(one.text for one in deltas if one.kind == "arguments")), SCHEMAS[name])
        return reader.output.calls_complete
    except (ValueError, jsonschema.ValidationError):
        return False


def answers(llm: LLM, of_calls: list[Syntax], count: int) -> tuple[list[list[int]], list[bool]]:
    found = [one.outputs[0].token_ids for one in llm.generate(*requests(of_calls, count), use_tqdm=False)]
    each = len(PROMPTS) * count
    return found, [is_valid(number // each, ids, of_calls, llm) for number, ids in enumerate(found)]


@pytest.mark.parametrize("count", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_as_many_answers_are_valid_with_drafts(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(1)
    torch.manual_seed(1)
    of_calls = syntaxes()
    with start(0, {}) as llm:
        ids, expected = answers(llm, of_calls, count)
        prompts = [llm.tokenizer(prompt)["input_ids"] for prompt in requests(of_calls, count)[0]]
    assert sum(expected) == len(expected) == 10 * count
    draft_always(monkeypatch)
    half = right([a + b for a, b in zip(prompts, ids, strict=True)], 0.5)
    for k, drafter in ((7, half), (3, None))[:count]:
        with start(k, {}) as llm:
            use(llm, drafter)
            assert answers(llm, of_calls, count) == (ids, expected)
            stats = llm.stats()
            assert stats.spec_decode_num_accepted_tokens > 25 * count
            assert stats.spec_decode_num_accepted_tokens < 0.9 * stats.spec_decode_num_draft_tokens
