"""New weights on a live engine: as if it had been started with them, with requests in flight, and after mistakes."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_model, save
from comparing import Expected
from safetensors.torch import save_file
from workload import Request, assert_outputs, make_requests, run, run_alone

from nanovllm import LLM, SamplingParams

REQUESTS = make_requests()
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "num_kvcache_blocks": 24}
Weights = dict[str, torch.Tensor]


class Model:
    """A checkpoint, its tensors, and the texts of an engine that was started with it."""

    def __init__(self, folder: Path, seed: int) -> None:
        model = make_model(seed=seed)
        self.folder = str(save(model, folder))
        self.weights: Weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        with LLM(self.folder, **OPTIONS, disable=("async_scheduling",), enable_prefix_caching=False) as llm:
            self.expected: list[Expected] = run_alone(llm, REQUESTS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    return Model(tmp_path_factory.mktemp("a"), seed=7), Model(tmp_path_factory.mktemp("b"), seed=8)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def engine(request: pytest.FixtureRequest, models: tuple[Model, Model]) -> Iterator[LLM]:
    """Started with the first model's weights; a budget that cuts prompts into chunks."""
    options = {**OPTIONS, "max_num_batched_tokens": 64}
    with LLM(models[0].folder, tensor_parallel_size=request.param, **options) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM, models: tuple[Model, Model]) -> LLM:
    """The engine with the first model's weights, idle, whatever a test before did to it."""
    engine.load_weights(models[0].weights.items())
    while not engine.is_finished():
        engine.step()
    return engine


def expect_texts_of(model: Model, llm: LLM, requests: slice = slice(None)) -> None:
    assert_outputs(run(llm, REQUESTS[requests]), REQUESTS[requests], model.expected[requests])


def test_outputs_are_the_new_models(llm: LLM, models: tuple[Model, Model]) -> None:
    """There and back, in any order of names; and nothing that the other model computed is found in the cache."""
    first, second = models
    assert [one.token_ids for one in first.expected] != [one.token_ids for one in second.expected]
    expect_texts_of(first, llm)
    llm.load_weights(reversed(list(second.weights.items())))
    llm.engine.scheduler.check_integrity()
    (output,) = run(llm, REQUESTS[8:9])
    assert output.num_cached_tokens == 0, "the prefix cache is empty"
    expect_texts_of(second, llm)
    (output,) = run(llm, REQUESTS[8:9])
    assert output.num_cached_tokens > 0, "and fills again"
    llm.load_weights(iter(first.weights.items()))
    expect_texts_of(first, llm)


def test_weights_of_another_type_are_rounded(llm: LLM, models: tuple[Model, Model]) -> None:
    """Like a checkpoint of that type; tensors may be views and need not be contiguous."""
    second = models[1]
    strided = {name: value.double().t().contiguous().t() if value.ndim == 2 else value.double()
               for name, value in second.weights.items()}
    llm.load_weights(strided.items())
    expect_texts_of(second, llm)


def test_views_of_one_buffer_are_sent_without_it(
    llm: LLM, models: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trainers keep their parameters: each would otherwise take the whole buffer along to the workers."""
    weights = models[1].weights
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
    expect_texts_of(models[1], llm, slice(4))


def test_requests_in_flight_go_on(llm: LLM, models: tuple[Model, Model]) -> None:
    """Each keeps its tokens so far, and goes on as a prompt of them would under the new weights. None is lost."""
    second = models[1]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    ids = {llm.add_request(request.prompt, params): request for request in REQUESTS[:9]}
    gained: dict[int, list[int]] = {request_id: [] for request_id in ids}

    def step() -> None:
        for output in llm.step():
            gained[output.request_id] += output.new_token_ids

    for _ in range(8):
        step()
    before = {request_id: list(tokens) for request_id, tokens in gained.items()}
    assert any(before.values())
    llm.load_weights(second.weights.items())
    llm.engine.scheduler.check_integrity()
    while not llm.is_finished():
        step()
        llm.engine.scheduler.check_integrity()
    in_flight = 1  # one token at most was still on the device, drawn under the old weights
    for request_id, request in ids.items():
        tokens = gained[request_id]
        assert len(tokens) == params.max_tokens
        begin = len(before[request_id])
        assert tokens[:begin] == before[request_id]
        continuations = []
        for old in range(begin, begin + in_flight + 1):
            rest = SamplingParams(temperature=0, max_tokens=max(1, len(tokens) - old), ignore_eos=True)
            (output,) = run(llm, [Request(request.prompt + tokens[:old], rest)])
            continuations.append(tokens[:old] + output.token_ids)
        assert tokens in continuations, request_id


def test_a_request_that_ends_with_the_last_old_step_is_reported(llm: LLM, models: tuple[Model, Model]) -> None:
    """Also where the load fails: what it had to collect is the next step's to report."""
    first, second = models
    request_id = llm.add_request(REQUESTS[0].prompt, SamplingParams(temperature=0, max_tokens=1))
    assert llm.step() == []  # launched, not collected
    with pytest.raises(ValueError, match="missing"):
        llm.load_weights([])
    llm.load_weights(second.weights.items())
    assert not llm.is_finished()
    (output,) = llm.step()
    assert (output.request_id, output.finished) == (request_id, True)
    assert output.new_token_ids == first.expected[0].token_ids[:1]
    assert llm.is_finished()


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
    llm: LLM, models: tuple[Model, Model], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a load succeeds nothing runs; then the request that was waiting does, and the engine is as good as new."""
    second = models[1]
    monkeypatch.setattr("nanovllm.executor.local._BUCKET_BYTES", 50_000)  # so that some of it has arrived
    request_id = llm.add_request(REQUESTS[1].prompt, REQUESTS[1].params)
    name = list(second.weights)[len(second.weights) // 2]
    said = {"surplus": "model.layers.7.mlp.up_proj.weight", "interrupted": "Ctrl-C"}.get(how, name)
    with pytest.raises(KeyboardInterrupt if how == "interrupted" else ValueError, match=said):
        llm.load_weights(spoil(second.weights, how))
    with pytest.raises(RuntimeError, match="until load_weights"):
        llm.step()
    with pytest.raises(RuntimeError, match="until load_weights"):
        llm.generate([REQUESTS[0].prompt], use_tqdm=False)
    llm.load_weights(second.weights.items())
    tokens: list[int] = []
    while not llm.is_finished():
        for output in llm.step():
            assert output.request_id == request_id
            tokens += output.new_token_ids
    assert tokens == second.expected[1].token_ids
    expect_texts_of(second, llm, slice(2, 6))


@pytest.mark.parametrize("how", ["missing", "surplus", "repeated", "misshapen", "wrong type", "without data", "folder"])
def test_what_can_be_looked_at_before_is_refused_before_anything_is_written(
    llm: LLM, models: tuple[Model, Model], how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine goes on with its weights, and so does a request that has begun."""
    first, second = models
    monkeypatch.setattr("nanovllm.executor.local._BUCKET_BYTES", 50_000)  # so that some of it could have been written
    before = llm.checksum()
    request_id = llm.add_request(REQUESTS[1].prompt, REQUESTS[1].params)
    tokens = [token for _ in range(3) for output in llm.step() for token in output.new_token_ids]
    weights: Any = list(spoil(second.weights, "missing" if how == "folder" else how))
    if how == "folder":
        save_file({name: value.contiguous() for name, value in weights}, tmp_path / "model.safetensors")
        weights = tmp_path
    with pytest.raises(ValueError):
        llm.load_weights(weights)
    assert llm.checksum() == before
    while not llm.is_finished():
        for output in llm.step():
            assert output.request_id == request_id
            tokens += output.new_token_ids
    assert tokens == first.expected[1].token_ids
    expect_texts_of(first, llm, slice(2, 4))


def test_a_tied_model_may_bring_its_head(tmp_path: Path) -> None:
    model = make_model(seed=1, tie_word_embeddings=True)
    folder = str(save(model, tmp_path))
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    assert "lm_head.weight" in weights
    with LLM(folder, **OPTIONS) as llm:
        before = [output.token_ids for output in run(llm, REQUESTS[:4])]
        llm.load_weights(weights.items())
        llm.load_weights((name, value) for name, value in weights.items() if name != "lm_head.weight")
        assert [output.token_ids for output in run(llm, REQUESTS[:4])] == before
        with pytest.raises(ValueError, match="surplus weight 'more'"):
            llm.load_weights([("lm_head.weight", weights["lm_head.weight"]), ("more", torch.ones(1))])
