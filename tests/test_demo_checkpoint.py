"""The checkpoint in assets/demo-qwen3: complete, small, lossless, and saying what it was taught, also with tools."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT, run
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from nanovllm import LLM, SamplingParams
from nanovllm.serve.parsers import Delta, OutputParser, check_tools, joined
from nanovllm.text.checkpoint import CheckpointTokenizer

DEMO = ROOT / "assets" / "demo-qwen3"
MIB = 2**20

# example.py's lines in full; the story is drawn, so only its opening is known.
EXPECTED = [
    "'The capital of France is' => ' Paris. People there speak French, and the country lies in Europe.'",
    "'1 2 3 4 5' => ' 6 7 8 9 10 11 12 13 14 15 16 17'",
    "'3 + 4 =' => ' 7.'",
    "'Monday, Tuesday,' => ' Wednesday, Thursday, Friday, Saturday, Sunday.'",
    "'The opposite of hot is' => ' cold.'",
    "user: What is the capital of Italy?",
    "assistant: The capital of Italy is Rome. (stop)",
]
STORY_OPENING = "story: Once upon a time there was a"


def example_lines(*arguments: str, cwd: Path = ROOT) -> list[str]:
    return run(ROOT / "example.py", "--device", "cpu", *arguments, cwd=cwd, forks=True).splitlines()


@pytest.fixture(scope="module")
def one_rank_lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return example_lines(cwd=tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


def test_example_says_what_the_model_was_taught(one_rank_lines: list[str]) -> None:
    assert one_rank_lines[: len(EXPECTED)] == EXPECTED
    assert len(one_rank_lines) == len(EXPECTED) + 1
    story = one_rank_lines[-1]
    assert story.startswith(STORY_OPENING)
    assert story.endswith("The end.")


def test_example_says_the_same_on_two_ranks(one_rank_lines: list[str]) -> None:
    assert example_lines("--tensor-parallel-size", "2") == one_rank_lines


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(DEMO), device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def chats() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        return importlib.import_module("demo_chats")


GREEDY = SamplingParams(temperature=0.0, max_tokens=160)


def test_model_knows_its_text_by_heart(llm: LLM, chats: Any) -> None:
    known = chats.facts.known_continuations()[::30]
    outputs = llm.generate([prompt for prompt, _ in known], replace(GREEDY, max_tokens=16), use_tqdm=False)
    for (prompt, continuation), output in zip(known, outputs, strict=True):
        text = continuation.removesuffix("<|im_end|>").removesuffix("<|endoftext|>")
        if output.finish_reason == "stop":
            assert output.text == text, prompt
        else:
            assert text.startswith(output.text) and len(output.token_ids) == 16, prompt
    assert sum(output.finish_reason == "stop" for output in outputs) > len(known) // 2


def test_model_knows_its_chats(llm: LLM, chats: Any) -> None:
    """Nearly all of them: a number that it must copy may lose a digit."""
    known = chats.known_chats()[::12]
    outputs = llm.generate([prompt for prompt, _ in known], GREEDY, use_tqdm=False)
    right = [out.text + "<|im_end|>" == text for (_, text), out in zip(known, outputs, strict=True)]
    assert sum(right) >= 0.95 * len(known)


def ask(llm: LLM, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any) -> tuple[list[Delta], str]:
    """Answer of the model, read as the server reads it."""
    front = CheckpointTokenizer(DEMO)
    choice = check_tools(tools, options.pop("tool_choice", None))
    prompt, ids = front.encode_chat(messages, tools, chat_template_kwargs=options)
    syntax = OutputParser(front).syntax(prompt, choice)
    params = replace(GREEDY, structured_outputs=syntax.structured)
    [output] = llm.generate([ids], params, use_tqdm=False)
    reader, detokenizer = syntax.reader(), syntax.detokenizer()
    text = "".join(map(detokenizer.push, output.token_ids)).removesuffix("<|im_end|>")
    deltas = [Delta("content", text)] if reader is None else joined(reader.push(text) + reader.finish())
    return deltas, syntax.finish_reason(str(output.finish_reason), reader)


@pytest.mark.parametrize("think", [False, True])
def test_model_calls_a_tool_and_tells_what_it_said(llm: LLM, chats: Any, think: bool) -> None:
    tools, messages = list(chats.TOOLS.values()), [{"role": "user", "content": "What is the weather in Rome?"}]
    deltas, reason = ask(llm, messages, tools, enable_thinking=think)
    thoughts = [Delta("reasoning", "I need the weather in Rome.")] if think else []
    call_id = deltas[-2].id
    called = [Delta("call", "", 0, "get_weather", call_id), Delta("arguments", '{"city": "Rome"}')]
    assert call_id and (deltas, reason) == (thoughts + called, "tool_calls")

    call = {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": deltas[-1].text}}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": '{"sky": "sunny", "degrees": 21}'},
    ]
    deltas, reason = ask(llm, messages, tools)
    assert (deltas, reason) == ([Delta("content", "It is sunny in Rome, 21 degrees.")], "stop")


def test_model_answers_by_itself_where_it_can(llm: LLM, chats: Any) -> None:
    messages = [{"role": "user", "content": "What is the capital of Italy?"}]
    expected = [Delta("content", "The capital of Italy is Rome.")]
    assert ask(llm, messages, [chats.TOOLS["get_weather"]]) == (expected, "stop")
    assert ask(llm, messages, None) == (expected, "stop")
    deltas, _ = ask(llm, messages, None, enable_thinking=True)
    assert deltas == [Delta("reasoning", "Italy is a country in Europe. Its capital is Rome."), *expected]


def test_a_forced_call_is_made_whatever_is_asked(llm: LLM, chats: Any) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    deltas, reason = ask(llm, messages, list(chats.TOOLS.values()), tool_choice="required")
    assert deltas[0].kind == "call" and reason == "tool_calls"


def test_files_are_there_and_small() -> None:
    sizes = {path.name: path.stat().st_size for path in DEMO.iterdir()}
    assert set(sizes) == {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert sum(sizes.values()) <= 6 * MIB


def test_configuration_and_tokenizer_agree(tokenizer: PreTrainedTokenizerBase) -> None:
    config = AutoConfig.from_pretrained(DEMO)
    generation = json.loads((DEMO / "generation_config.json").read_text(encoding="utf-8"))
    assert len(tokenizer) == config.vocab_size
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert generation["eos_token_id"] == ends
    assert config.eos_token_id == tokenizer.eos_token_id == ends[0]


def test_tokenizer_knows_every_byte(tokenizer: PreTrainedTokenizerBase) -> None:
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000), *range(0x1F300, 0x1FB00)]))
    assert tokenizer.decode(tokenizer.encode(everything)) == everything


def test_chat_template_is_qwens_format(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "Who are you?"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nAnswer in one sentence.<|im_end|>\n"
        "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    assert tokenizer.decode(ids) == text
    thinking = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, enable_thinking=True)
    assert thinking == text + "<think>\n"


def test_plain_chats_of_the_training_text_are_the_templates(chats: Any) -> None:
    turns = [("system", "Answer in one sentence."), ("user", "Who are you?"), ("assistant", "I am a very small model.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert chats.rendered(messages) == chats.facts.chat_text(turns)
