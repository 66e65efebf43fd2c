"""Embeddings and scores: those of transformers, and equal to the last bit whatever runs beside them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import FILE, read_json, write_json
from embedders import END, NEW_POOLING, QUERY, make_embedder, make_reranker, write_modules
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, AsyncLLM, SamplingParams

CPU: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 256, "kvcache_block_size": 16}
TEXTS = ["Rome", "The capital of Italy is Rome.", "Once upon a time " * 12, "Hello, who are you?", "Once upon " * 9]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def expected(embedder: Path) -> np.ndarray:
    return by_transformers(embedder, TEXTS)


def start(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{**CPU, **options})


@torch.inference_mode()
def by_transformers(folder: Path, texts: list[str]) -> np.ndarray:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32)
    given = [tokenizer(text, return_tensors="pt") for text in texts]
    assert all(one.input_ids[0, -1] == END for one in given)
    rows = torch.cat([model(**one).last_hidden_state[:, -1] for one in given])
    return torch.nn.functional.normalize(rows).numpy()


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=str)
def test_embeddings_are_those_of_transformers(embedder: Path, expected: np.ndarray, options: dict[str, Any]) -> None:
    with start(embedder, **options) as llm:
        assert llm.config.runner == "pooling"
        found = llm.embed(TEXTS, use_tqdm=False)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=2e-6)
        ids = AutoTokenizer.from_pretrained(embedder)(TEXTS[1]).input_ids
        assert (llm.embed(ids, use_tqdm=False) == llm.embed(TEXTS[1], use_tqdm=False)).all()
        few = llm.embed(TEXTS, dimensions=24, use_tqdm=False)
        cut = expected[:, :24] / np.linalg.norm(expected[:, :24], axis=1, keepdims=True)
        np.testing.assert_allclose(few, cut, atol=1e-5)
        assert [llm.embed([], dimensions=count).shape for count in (None, 24)] == [(0, 192), (0, 24)]
        assert (llm.embed(["Rome", {"prompt": "Rome"}], prompt_name="query") == llm.embed(QUERY + "Rome")).all()
        assert llm.embed("Rome", dimensions=np.int64(24)).shape == (1, 24)
        with pytest.raises(ValueError, match=r"prompt_name='title': .* model's prompts: 'query', 'document'"):
            llm.embed("Rome", prompt_name="title")
        with pytest.raises(ValueError, match=r"dimensions=193: must be an integer in 1\.\.192"):
            llm.embed("Rome", dimensions=193)
        for params in (SamplingParams(), SamplingParams(max_tokens=0, prompt_logprobs=0)):
            with pytest.raises(ValueError, match="runner='pooling'"):
                llm.generate("Rome", params)


@pytest.mark.parametrize(
    "tensors", [("", False, False), ("model.", True, True), ("model.", True, False), ("model.", False, True)], ids=str
)
def test_tensors_may_lack_the_prefix_and_have_a_head(
    tmp_path: Path, embedder: Path, expected: np.ndarray, tensors: tuple[str, bool, bool]
) -> None:
    make_embedder(tmp_path, *tensors)
    with start(tmp_path, runner="pooling") as llm:
        np.testing.assert_allclose(llm.embed(TEXTS, use_tqdm=False), expected, atol=2e-6)
        llm.load_weights(list(load_file(tmp_path / FILE).items()))
        llm.load_weights(str(embedder))
        np.testing.assert_allclose(llm.embed(TEXTS, use_tqdm=False), expected, atol=2e-6)


def test_a_decoder_that_was_saved_alone_embeds_on_request(tmp_path: Path, expected: np.ndarray) -> None:
    make_embedder(tmp_path)
    write_json(tmp_path / "config.json", {**read_json(tmp_path / "config.json"), "architectures": ["Qwen3Model"]})
    for name in ("modules.json", "config_sentence_transformers.json"):
        (tmp_path / name).unlink()
    with start(tmp_path, runner="pooling") as llm:
        np.testing.assert_allclose(llm.embed(TEXTS, use_tqdm=False), expected, atol=2e-6)
        with pytest.raises(ValueError, match="prompt_name='query': must be one of the model's prompts: none"):
            llm.embed("Rome", prompt_name="query")


def test_a_default_prompt_and_vectors_as_they_are(tmp_path: Path) -> None:
    make_embedder(tmp_path)
    write_modules(tmp_path, ("Transformer", "Pooling"), NEW_POOLING)
    about = tmp_path / "config_sentence_transformers.json"
    write_json(about, {**read_json(about), "default_prompt_name": "query"})
    with start(tmp_path) as llm:
        found = llm.embed("Rome", use_tqdm=False)
        assert np.linalg.norm(found) > 1.5
        expected = by_transformers(tmp_path, [QUERY + "Rome"])
        np.testing.assert_allclose(found / np.linalg.norm(found), expected, atol=2e-6)
        assert (llm.embed("Rome", dimensions=5, use_tqdm=False) == found[:, :5]).all()


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "mean": (lambda folder: write_modules(folder, pooling={"pooling_mode_mean_tokens": True}), "'mean_tokens'"),
    "cls": (lambda folder: write_modules(folder, pooling={"pooling_mode": "cls"}), r"pooling_mode=\['cls'\]"),
    "two": (lambda folder: write_modules(folder, pooling={"pooling_mode": ["lasttoken", "max"]}), "'max'"),
    "none": (lambda folder: write_modules(folder, pooling={"pooling_mode_cls_token": False}), r"pooling_mode=\[\]"),
    "dense": (lambda folder: write_modules(folder, ("Transformer", "Pooling", "Dense")), "modules.json='Dense'"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, name: str) -> None:
    make_embedder(tmp_path)
    change, message = CHANGES[name]
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        start(tmp_path)


def test_the_module_of_transformers_does_not_embed(embedder: Path) -> None:
    with pytest.raises(ValueError, match="runner='pooling': must be 'generate' where transformers"):
        start(embedder, model_impl="transformers")


CROWDS: dict[str, dict[str, Any]] = {
    "at once": {},
    "chunked": {"max_num_batched_tokens": 24, "num_kvcache_blocks": 64},
    "cached": {"max_num_batched_tokens": 24, "num_kvcache_blocks": 64, "disable": ("async_scheduling",)},
}


@pytest.mark.parametrize("mode", ["batch", pytest.param("tp", marks=pytest.mark.slow)])
def test_no_bit_depends_on_what_runs_beside_a_text(embedder: Path, mode: str) -> None:
    with start(embedder, exact_bits=mode, enable_prefix_caching=False) as llm:
        alone = np.concatenate([llm.embed(text, use_tqdm=False) for text in TEXTS])
    for options in (*CROWDS.values(), *([{"tensor_parallel_size": 2}] if mode == "tp" else [])):
        with start(embedder, exact_bits=mode, **options) as llm:
            for _ in range(2):  # then from the cache
                found = llm.embed(3 * TEXTS, use_tqdm=False)
                assert np.array_equal(found, np.concatenate([alone] * 3))


def test_replicas_change_nothing(embedder: Path, expected: np.ndarray) -> None:
    with start(embedder, data_parallel_size=2) as llm:
        np.testing.assert_allclose(llm.embed(3 * TEXTS, use_tqdm=False), np.tile(expected, (3, 1)), atol=2e-6)


def test_tasks_embed_side_by_side(embedder: Path, expected: np.ndarray) -> None:
    async def embed() -> list[np.ndarray]:
        async with await AsyncLLM.start(str(embedder), **CPU) as llm:
            found = await asyncio.gather(*map(llm.embed, TEXTS))
            assert len(await llm.embed("Rome", dimensions=8, prompt_name="query")) == 8
            both = [await llm.embed(one, prompt_name="query") for one in ("Rome", {"prompt": "Rome"})]
            assert np.array_equal(*both)
            return found

    np.testing.assert_allclose(asyncio.run(embed()), expected, atol=2e-6)


@pytest.mark.parametrize("options", [{}, {"data_parallel_size": 2}], ids=str)
@torch.inference_mode()
def test_scores_are_the_probabilities_of_yes(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = make_reranker(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with start(folder, **options) as llm:
        assert llm.config.runner == "generate"
        found = llm.score("Where is Rome?", TEXTS[:2], use_tqdm=False)
        assert llm.score(["Where is Rome?"], TEXTS[0], use_tqdm=False) == pytest.approx(found[:1], rel=1e-4)
        assert llm.score("Where is Rome?", TEXTS[:1], "Judge", use_tqdm=False) != found[:1]
        assert len(llm.score("<|im_end|>", "<|im_start|>system\nyes", use_tqdm=False)) == 1
        with pytest.raises(ValueError, match="documents: 3 for 2 queries"):
            llm.score(TEXTS[:2], TEXTS[:3])
        for queries, documents, said in (
            ("a", ["b", 5], "documents=5: must be a text"), ("a", {"text": "b"}, "documents={'text': 'b'}: must be"),
            (None, "b", "queries=None: must be a text"), (["a", b"c"], ["b", "d"], "queries=b'c'"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=said):
                llm.score(queries, documents)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="runner='generate'"):
            llm.embed("Rome")
    yes, no = map(tokenizer.convert_tokens_to_ids, ("yes", "no"))
    for text, score in zip(TEXTS, found, strict=False):
        ids = tokenizer(PROMPT.format(document=text), return_tensors="pt", add_special_tokens=False).input_ids
        assert score == pytest.approx(float(model(ids).logits[0, -1, [yes, no]].softmax(0)[0]), rel=1e-4)


PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n<Query>: Where is Rome?\n"
    "<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def test_a_tokenizer_without_the_answers_is_refused(tmp_path: Path) -> None:
    with LLM("demo", **CPU) as llm, pytest.raises(ValueError, match="'yes' and 'no' are one token each"):
        llm.score("Where is Rome?", "Here")


def test_scores_need_two_log_probabilities(tmp_path: Path) -> None:
    folder = make_reranker(tmp_path)
    with start(folder, max_logprobs=1) as llm, pytest.raises(ValueError, match="max_logprobs=1: must be -1 or at"):
        llm.score("a", "b")
    with start(folder, max_logprobs=2) as llm:
        assert len(llm.score("a", "b")) == 1
