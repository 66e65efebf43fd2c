"""Requests that cannot be served are refused before anything is lost, naming the option, the value and the bound."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig

DEMO = Path(EngineConfig("demo").model)
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "num_kvcache_blocks": 3, "kvcache_block_size": 16}
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
VOCAB = json.loads((DEMO / "config.json").read_text())["vocab_size"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Three blocks of 16 tokens: a request of 48 fits, though max_model_len is 64."""
    with LLM("demo", **OPTIONS) as llm:
        yield llm


BAD_PROMPTS = {
    "no token": ([], r"at least one token"),
    "no text": ("", r"at least one token"),
    "id = vocab_size": ([5, VOCAB], rf"token id {VOCAB} must be in 0\.\.{VOCAB - 1}"),
    "negative id": ([5, -1], r"token id -1 must be in 0\.\."),
    "huge id": ([5, 2**40], rf"token id {2**40} must be in 0\.\."),
    "beyond 64 bits": ([2**64], rf"token id {2**64} must be in 0\.\."),
    "no common integer type": ([-1, 2**63], r"token id -1 must be in 0\.\."),
    "float id": ([5, 2.0], r"token id 2\.0 must be an integer"),
    "NaN id": ([math.nan], r"token id nan must be an integer"),
    "bool id": ([5, True], r"token id True must be an integer"),
    "text id": (["5"], r"token id '5' must be an integer"),
    "nested": ([[5]], r"must be an integer"),
    "half a surrogate pair": ("a \ud83d b", r"text: must not hold half a surrogate pair alone, found '\\ud83d' at 2"),
    "None": ([None], r"token id None must be an integer"),
    "never fits the cache": ([5] * 48, r"prompt of 48 tokens: .*KV cache tokens .*=48"),
    "far too long": ([5] * 5000, r"prompt of 5000 tokens"),
}


def test_a_request_that_may_draw_nothing(llm: LLM) -> None:
    eos = llm.engine.model_config.eos_token_ids[0]
    forms = [tokens[0] for tokens in llm.engine.book._sampling._words("a")]  # at the start, and after a blank
    left = {"allowed_token_ids": [eos, 7], "min_tokens": 2}
    for options in ({"allowed_token_ids": [eos], "min_tokens": 1}, {"allowed_token_ids": forms, "bad_words": ["a"]}):
        with pytest.raises(ValueError, match=r"prompts\[0\].*allowed_token_ids=.*must hold a token"):
            llm.generate([[5, 6]], SamplingParams(max_tokens=3, **options), use_tqdm=False)
    for options in (left, {"allowed_token_ids": [eos], "min_tokens": 1, "ignore_eos": True}):
        [output] = llm.generate([[5, 6]], SamplingParams(max_tokens=3, **options), use_tqdm=False)
        assert set(output.token_ids) <= set(options["allowed_token_ids"])


def test_a_bad_prompt_is_named_once_and_by_who_found_it(llm: LLM) -> None:
    with pytest.raises(TypeError) as caught:
        llm.generate([[5], 3.5], PARAMS, use_tqdm=False)  # type: ignore[list-item]
    assert str(caught.value) == "prompts[1]: must be a str or a list of token ids, found float"
    assert caught.traceback[-1].name == "as_token_ids"


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_stops_the_call_and_nothing_else(name: str, llm: LLM) -> None:
    prompt, pattern = BAD_PROMPTS[name]
    [expected] = llm.generate([[5, 6, 7]], PARAMS, use_tqdm=False)
    request_id = llm.add_request([5, 6, 7], PARAMS)
    gained = [token_id for output in llm.step() for token_id in output.new_token_ids]
    before = llm.engine.book.num_requests
    with pytest.raises(ValueError, match=r"prompts\[1\].*" + pattern):
        llm.generate([[5, 6], prompt, [7]], PARAMS, use_tqdm=False)
    with pytest.raises(ValueError, match=pattern):
        llm.add_request(prompt, PARAMS)
    assert llm.engine.book.num_requests == before, "nothing of a refused call is started"
    while not llm.is_finished():
        for output in llm.step():
            assert output.request_id == request_id
            gained += output.new_token_ids
    assert gained == expected.token_ids
    llm.engine.scheduler.check_integrity()


def test_prompts_up_to_the_bound_are_served() -> None:
    with LLM("demo", **{**OPTIONS, "num_kvcache_blocks": 8}) as llm:
        [output] = llm.generate([[5] * 63], PARAMS, use_tqdm=False)
        assert len(output.token_ids) == 1
        with pytest.raises(ValueError, match=r"prompt of 64 tokens: must be shorter than max_model_len=64"):
            llm.generate([[5] * 64], PARAMS, use_tqdm=False)
        only_prompt = SamplingParams(max_tokens=0)
        assert llm.generate([[5] * 64], only_prompt, use_tqdm=False)[0].token_ids == []
        with pytest.raises(ValueError, match=r"prompt of 65 tokens: must be at most max_model_len=64$"):
            llm.generate([[5] * 65], only_prompt, use_tqdm=False)


@pytest.mark.parametrize(
    "prompts",
    [5, None, b"bytes", {"a", "b"}, [b"bytes"], [np.zeros((1, 1), int)], [None], [5, "text"]],
)
def test_what_is_no_prompt(prompts: Any, llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"prompts.*must be a str"):
        llm.generate(prompts, PARAMS, use_tqdm=False)
    assert llm.is_finished()


def test_images_beside_a_prompt_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(ValueError, match="images, sound and files are not taken: the engine serves text alone"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": "x"}})  # type: ignore[dict-item]


@pytest.mark.parametrize("prompt", [{}, {"text": "a"}, {"prompt": "a", "multi_modal_data": {}}, {"prompt": None}])
def test_a_dict_that_is_no_prompt(prompt: Any, llm: LLM) -> None:
    for call in (llm.generate, llm.add_request, lambda prompt: llm.generate([prompt])):
        with pytest.raises(ValueError, match=r"prompt={.*must have one entry, 'prompt' or 'prompt_token_ids'"):
            call(prompt)


def test_parameters_that_do_not_go_with_the_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"sampling_params: 3 given, must be one or as many as prompts \(2\)"):
        llm.generate([[5], [6]], [PARAMS] * 3, use_tqdm=False)
    with pytest.raises(ValueError, match=r"0 given"):
        llm.generate([[5], [6]], [], use_tqdm=False)
    wrong: list[Any] = [5, {"temperature": 0}, "greedy", [PARAMS, None], [PARAMS, {"temperature": 0}]]
    for params in wrong:
        with pytest.raises(TypeError, match="must be SamplingParams"):
            llm.generate([[5], [6]], params, use_tqdm=False)
    with pytest.raises(TypeError, match="must be SamplingParams"):
        llm.add_request([5], {"temperature": 0})  # type: ignore[arg-type]
    assert llm.is_finished()


def test_too_little_memory_for_a_block() -> None:
    pattern = r"cpu_kvcache_gib=1e-07: leaves 107 bytes .* must leave at least [1-9]\d* .*one block"
    with pytest.raises(ValueError, match=pattern):
        LLM("demo", device="cpu", cpu_kvcache_gib=1e-7)


def test_more_memory_than_the_machine_has() -> None:
    with pytest.raises(ValueError, match=r"cpu_kvcache_gib=1000000000\.0: must be at most \d+\.\d"):
        LLM("demo", device="cpu", cpu_kvcache_gib=1e9)
    with pytest.raises(ValueError, match=r"num_kvcache_blocks=1000000000.*must be"):
        LLM("demo", device="cpu", num_kvcache_blocks=10**9)


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"device='cuda': torch sees no GPU"):
            LLM("demo", device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2: must be at most the 1 GPUs here"):
        LLM("demo", device="cuda", tensor_parallel_size=2)
    shared = {"device": "cuda", "tensor_parallel_size": 2, "share_gpus": True}
    with pytest.raises(ValueError, match=r"num_kvcache_blocks=None: must be given where 2 ranks share 1 GPUs"):
        LLM("demo", **shared)
    with pytest.raises(ValueError, match=r"disable='peer_all_reduce': must go with enforce_eager=True where ranks"):
        LLM("demo", **shared, num_kvcache_blocks=8, disable=("peer_all_reduce",))


def test_weights_that_the_machine_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so before it loads them."""
    monkeypatch.setattr("nanovllm.runner.footprint.usable_memory", lambda: 2**20)
    monkeypatch.setattr("nanovllm.runner.rank_weights.load_checkpoint", lambda *_: pytest.fail("loads"))
    with pytest.raises(ValueError, match=r"model='.*demo-qwen3': .* \d\.\d GiB in float32, must be at most 0\.0"):
        LLM("demo", device="cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped checkpoint, to spoil."""
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def refuse(folder: Path, kind: type[Exception], pattern: str, **options: Any) -> None:
    with pytest.raises(kind, match=pattern):
        LLM(str(folder), **{**OPTIONS, **options})


def test_overrides_that_change_nothing(folder: Path) -> None:
    wrong = {"max_position_embedings": 4096}
    pattern = r"hf_overrides: 'max_position_embedings' is no entry .*; did you mean 'max_position_embeddings'\?"
    refuse(folder, ValueError, pattern, hf_overrides=wrong)
    refuse(folder, ValueError, pattern, hf_overrides={"text_config": wrong})
    refuse(folder, ValueError, pattern, hf_overrides=wrong, model_impl="transformers")
    refuse(folder, ValueError, "hf_overrides: 5 is no entry", hf_overrides={5: 4096})


def test_a_file_in_place_of_a_folder_or_of_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    refuse(folder, ValueError, r"tokenizer='.*model\.safetensors': must be a folder", tokenizer=str(weights))
    refuse(folder, FileNotFoundError, r"tokenizer='none': no such folder, and not a hub id", tokenizer="none")
    refuse(weights, ValueError, r"model='.*model\.safetensors': must be a folder")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refuse(folder, ValueError, r"model\.safetensors: a pointer of Git LFS.*git lfs pull")


BAD_CHATS: dict[str, tuple[Any, type[Exception], str]] = {
    "text": ("hi", TypeError, r"messages: must be a list of"),
    "one message": ({"role": "user", "content": "hi"}, TypeError, r"messages: must be a list of"),
    "no message": (["hi"], ValueError, r"messages\[0\]: must be a dict with a 'role'"),
    "no role": ([{"foo": "x"}], ValueError, r"messages\[0\]: must be a dict with a 'role'"),
    "no content": ([{"role": "user"}], ValueError, r"messages: the chat template cannot render them"),
    "one of several": ([[{"role": "user", "content": "hi"}], [{}]], ValueError, r"messages\[1\]\[0\]: must be a dict"),
    "mixed": ([{"role": "user", "content": "hi"}, [{}]], ValueError, r"messages\[0\]: must be a list"),
    "an empty one": ([[]], ValueError, r"messages\[0\]: must be a list of at least one"),
    "an image": ([{"role": "user", "content": [{"type": "image_url"}]}], ValueError, r"\[0\]: .*images, sound"),
    "an image beside a text": (
        [{"role": "user", "content": [{"type": "text", "text": "hi", "image": "x"}]}],
        *(ValueError, r"\[0\]: .*images, sound"),
    ),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_what_is_no_chat(name: str, llm: LLM) -> None:
    messages, kind, pattern = BAD_CHATS[name]
    with pytest.raises(kind, match=pattern):
        llm.chat(messages, PARAMS, use_tqdm=False)
    assert llm.is_finished()


def test_a_tokenizer_that_cannot_be_loaded_is_found_before_tokens_are_made(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    refuse(folder, ValueError, r"tokenizer='.*model': cannot be loaded: .*from one of: \S")
    with LLM(str(folder), **OPTIONS, skip_tokenizer_init=True) as llm:
        assert llm.generate([[5, 6]], PARAMS, use_tqdm=False)[0].token_ids
