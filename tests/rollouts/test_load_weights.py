"""Weights that a caller hands in, of any type and layout; what is wrong with them is named, and can be repaired."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from stepping import drain, tokens_of
from tiny_policy import GREEDY, OPTIONS, PROMPTS, VOCAB, Policy, expect_texts_of, greedy, texts

from nanovllm import LLM, SamplingParams

Weights = dict[str, torch.Tensor]


def test_weights_of_another_type_are_rounded(llm: LLM, policies: tuple[Policy, Policy]) -> None:
    """Like a checkpoint of that type; tensors may be views and need not be contiguous, in any order."""
    strided = {name: value.double().t().contiguous().t() if value.ndim == 2 else value.double()
               for name, value in policies[1].weights.items()}  # fmt: skip
    llm.load_weights(reversed(strided.items()))
    expect_texts_of(policies[1], llm)


def test_views_of_one_buffer_are_sent_without_it(
    llm: LLM, policies: tuple[Policy, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trainers keep their parameters: each would otherwise take the whole buffer along to the workers."""
    weights = policies[1].weights
    flat = torch.cat([value.flatten() for value in weights.values()])
    parts = flat.split([value.numel() for value in weights.values()])
    views = {name: part.view_as(weights[name]) for name, part in zip(weights, parts, strict=True)}
    processes, sent = llm.engine.executor.processes, []
    send_call = processes.send_call

    def counted_send(method: str, *args: Any) -> None:
        sent.append(len(pickle.dumps(args)))
        send_call(method, *args)

    monkeypatch.setattr(processes, "send_call", counted_send)
    llm.load_weights(views.items())
    assert processes.size == 1 or sum(sent) < 1.5 * flat.nbytes
    expect_texts_of(policies[1], llm)


def test_a_request_that_ends_with_the_last_old_step_is_reported(llm: LLM, policies: tuple[Policy, Policy]) -> None:
    """Also where the load fails: what it had to collect is the next step's to report."""
    request_id = llm.add_request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=1))
    assert llm.step() == []  # launched, not collected
    with pytest.raises(ValueError, match="missing"):
        llm.load_weights([])
    llm.load_weights(policies[1].weights.items())
    assert tokens_of(drain(llm)) == {request_id: greedy(policies[0], PROMPTS[0], 1)}


def spoil(weights: Weights, how: str) -> Iterator[Any]:
    """The second half of a load goes wrong."""
    items = list(weights.items())
    name, value = items[len(items) // 2]
    yield from items[: len(items) // 2]
    if how == "interrupted":
        raise KeyboardInterrupt("Ctrl-C")
    replacement = {
        "missing": [],
        "surplus": [("model.layers.7.mlp.up_proj.weight", value), (name, value)],
        "repeated": [(name, value), (name, value)],
        "misshapen": [(name, value[:-1])],
        "wrong type": [(name, value.long())],
        "without data": [(name, value.to("meta"))],
        "sparse": [(name, value.to_sparse())],
        "no tensor": [(name, value.numpy())],
        "a name alone": [name],
    }
    yield from replacement[how]
    yield from items[len(items) // 2 + 1 :]


@pytest.mark.parametrize("how", ["missing", "surplus", "repeated", "misshapen", "wrong type", "without data",
                                 "sparse", "no tensor", "a name alone", "interrupted"])  # fmt: skip
def test_a_mistake_is_named_and_can_be_repaired(
    llm: LLM, policies: tuple[Policy, Policy], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a load succeeds nothing runs; then the request that was waiting does, and the engine is as good as new."""
    weights = policies[1].weights
    monkeypatch.setattr("nanovllm.executor.local._BUCKET_BYTES", 50_000)  # so that some of it has arrived
    request_id = llm.add_request(PROMPTS[1], GREEDY)
    name = list(weights)[len(weights) // 2]
    said = {"surplus": "model.layers.7.mlp.up_proj.weight", "interrupted": "Ctrl-C"}.get(how, name)
    with pytest.raises(KeyboardInterrupt if how == "interrupted" else ValueError, match=said):
        llm.load_weights(spoil(weights, how))
    with pytest.raises(RuntimeError, match="until load_weights"):
        llm.step()
    with pytest.raises(RuntimeError, match="until load_weights"):
        texts(llm)
    llm.load_weights(weights.items())
    assert tokens_of(drain(llm)) == {request_id: greedy(policies[1], PROMPTS[1])}
    expect_texts_of(policies[1], llm)


@pytest.mark.parametrize("how", ["missing", "surplus", "repeated", "misshapen", "wrong type", "without data",
                                 "in a folder", "cut off"])  # fmt: skip
def test_what_can_be_looked_at_before_is_refused_before_anything_is_written(
    llm: LLM, policies: tuple[Policy, Policy], how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine goes on with its weights, and so does a request that has begun."""
    first, second = policies
    monkeypatch.setattr("nanovllm.executor.local._BUCKET_BYTES", 50_000)  # so that some of it could have been written
    before = llm.checksum()
    request_id = llm.add_request(PROMPTS[1], GREEDY)
    outputs = [output for _ in range(3) for output in llm.step()]
    in_folder = how in ("in a folder", "cut off")
    loads: list[Any] = [list(spoil(second.weights, "missing" if in_folder else how))]
    if in_folder:
        file = tmp_path / "model.safetensors"
        save_file(second.weights if how == "cut off" else dict(loads[0]), file)
        loads = [tmp_path]
    content = file.read_bytes() if in_folder else b""
    for keep in (0, 200, -1) if how == "cut off" else (None,):  # its length, its header, its last byte
        if in_folder:
            file.write_bytes(content[:keep])
        with pytest.raises(ValueError, match=None if keep is None else "model.safetensors"):
            llm.load_weights(loads[0])
    assert llm.checksum() == before
    assert tokens_of(outputs + drain(llm)) == {request_id: greedy(first, PROMPTS[1])}
    expect_texts_of(first, llm)


@pytest.mark.parametrize("given", [None, 5, Policy])
def test_what_are_no_weights_changes_nothing(llm: LLM, policies: tuple[Policy, Policy], given: Any) -> None:
    for call in (llm.load_weights, llm.update):
        with pytest.raises(TypeError, match=r"weights: must be a folder or \(name, tensor\) pairs, found"):
            call(given)
    expect_texts_of(policies[0], llm)


def test_a_tied_model_may_bring_its_head(tmp_path: Path) -> None:
    tied = Policy(tmp_path, seed=5, tie_word_embeddings=True)
    assert "lm_head.weight" in tied.weights
    without = [(name, value) for name, value in tied.weights.items() if name != "lm_head.weight"]
    with LLM(tied.folder, **OPTIONS) as llm:
        for given in (tied.weights.items(), without):
            llm.load_weights(given)
            expect_texts_of(tied, llm)
        with pytest.raises(ValueError, match="surplus weight 'more'"):
            llm.load_weights([("lm_head.weight", torch.ones(VOCAB, 64)), ("more", torch.ones(1))])
