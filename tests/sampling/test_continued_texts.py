"""Texts of a SentencePiece tokenizer continue their prompts: nothing is lost where an output begins."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece_like
from sampling_engines import DEMO
from tokenizers import Tokenizer

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.sampling_params import StructuredOutput

OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 64, "max_num_seqs": 8}
PROMPT = [1, 263, 264, 265]  # The capital is
WORDS: dict[str, Any] = {
    "temperature": 2.0, "seed": 1, "max_tokens": 6, "ignore_eos": True, "allowed_token_ids": [*range(276, 400)],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_like.save(tmp_path_factory.mktemp("tokenizer"), size=1024)


@pytest.fixture(scope="module", params=[1, 2])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    """One engine, and a fleet of two, whose rows are written here."""
    engine = LLM(DEMO, tokenizer=str(folder), data_parallel_size=request.param, **OPTIONS)
    yield engine
    engine.close()


def gained(folder: Path, ids: list[int]) -> str:
    """The text of an output as the library decodes it behind the prompt."""
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return library.decode([*PROMPT, *ids]).removeprefix(library.decode(PROMPT))


def test_outputs_begin_with_their_blanks(llm: LLM, folder: Path) -> None:
    params = SamplingParams(n=4, logprobs=0, **WORDS)
    [output] = llm.generate(PROMPT, params)
    for one in output.outputs:
        assert one.text == gained(folder, one.token_ids)
        found = zip(one.token_ids, one.logprobs, strict=True)
        assert one.text == "".join(logprobs[token_id].decoded_token for token_id, logprobs in found)
    assert any(one.text.startswith(" ") for one in output.outputs)


def test_a_stop_string_finds_the_first_blank(llm: LLM, folder: Path) -> None:
    options = WORDS | {"allowed_token_ids": [267]}  # " Paris"
    [output] = llm.generate(PROMPT, SamplingParams(stop=[" Paris"], **options))
    [found] = output.outputs
    assert (found.text, found.stop_reason, len(found.token_ids)) == ("", " Paris", 1)


@pytest.mark.parametrize("wanted", [{"regex": " (dog|true)"}, {"choice": [" dog", " true"]}, {"regex": "dog|true"}])
def test_what_a_grammar_admits_is_the_text(llm: LLM, wanted: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutput(**wanted), max_tokens=20, seed=3)
    [output] = llm.generate(PROMPT, params)
    assert re.fullmatch(wanted.get("regex") or "|".join(wanted["choice"]), output.outputs[0].text)


def test_streamed_texts_begin_with_their_blanks(folder: Path) -> None:
    params = SamplingParams(n=4, **WORDS)
    ids: list[list[int]] = [[] for _ in range(params.n)]
    texts = [""] * params.n

    async def run() -> None:
        engine = await AsyncLLM.start(DEMO, tokenizer=str(folder), **OPTIONS)
        async with engine:
            async for delta in engine.generate(PROMPT, params):
                texts[delta.index] += delta.text
                ids[delta.index] += delta.token_ids

    asyncio.run(run())
    assert texts == [gained(folder, one) for one in ids] and any(text.startswith(" ") for text in texts)


def test_an_output_that_was_begun_elsewhere_keeps_its_first_blank(llm: LLM) -> None:
    """As those of a replica that was lost: a stop string finds it."""
    params = SamplingParams(stop=[" Paris Paris"], **(WORDS | {"allowed_token_ids": [267]}))
    number = llm.add_request(PROMPT, params, output_token_ids=[267])
    outputs: list[Any] = []
    while not any(output.finished for output in outputs):
        outputs += [output for output in llm.step() if output.request_id == number]
    assert [token_id for output in outputs for token_id in output.new_token_ids][-1:] == [267]
    assert sum(len(output.new_token_ids) for output in outputs) == 1
    assert outputs[-1].stop_reason == " Paris Paris"
