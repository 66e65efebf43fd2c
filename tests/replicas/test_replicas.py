"""The same tokens on any number of replicas, whatever becomes of these."""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from processes.process_checks import marked_processes
from replica_workload import DEMO, OPTIONS, batch, facts
from stepping import drain, ends_of

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.errors import ReplicaError
from nanovllm.host import engines, fleet
from nanovllm.host.devices import devices_of_replicas


def replicated(count: int, **options: Any) -> LLM:
    return LLM(DEMO, **{**OPTIONS, "data_parallel_size": count, **options})


def pids(llm: LLM) -> list[int]:
    return [handle.process.pid for handle in llm.engine.engines.reader.handles.values()]  # type: ignore[attr-defined]


@contextmanager
def killing(find: Any, after: float) -> Iterator[None]:
    """kill -9 of the process that `find` returns, `after` seconds into the `with`."""

    def kill() -> None:
        time.sleep(after)
        os.kill(find(), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 3))])
def test_tokens_do_not_depend_on_the_number_of_replicas(count: int, expected: list[Any], mark: str) -> None:
    with replicated(count, data_parallel_backend="local") as llm:
        assert facts(llm.generate(*batch(60), use_tqdm=False)) == expected
        info = llm.engine_info()
        assert info["num_replicas"] == len(info["replicas"]) == count
        assert info["num_kvcache_blocks"] == count * OPTIONS["num_kvcache_blocks"]
        stats = llm.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert sum(stats.finished.values()) == sum(len(rows) for *_, rows in expected)
        own_loop_and_abort(llm)


def own_loop_and_abort(llm: LLM) -> None:
    """Each completion ends once, of an aborted request as such."""
    prompts, params = batch(20)
    ids = [llm.add_request(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
    llm.abort(ids[4])
    outputs = drain(llm)
    ended = [(output.request_id, output.index) for output in outputs if output.finished]
    assert len(ended) == len(set(ended)) == sum(param.n for param in params)
    assert ends_of(outputs).keys() == {*ids} and ends_of(outputs)[ids[4]] == "abort"
    assert not llm.engine.fleet.requests.num_live  # type: ignore[attr-defined]


LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    ("seed", "drafts"), [(0, None), (2, LOOKUP), pytest.param(1, None, marks=pytest.mark.slow)],
    ids=["plain", "with drafts", "plain, another moment"],
)
def test_a_replica_killed_in_mid_generation(
    seed: int, drafts: dict[str, Any] | None, expected: list[Any], mark: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its requests go on elsewhere, with drafts of their own."""
    moment = random.Random(seed)
    with replicated(2, speculative_config=drafts) as llm:
        victim = moment.choice(pids(llm))
        with killing(lambda: victim, after=moment.uniform(0.05, 0.8)):
            assert facts(llm.generate(*batch(60), use_tqdm=False)) == expected
        llm.generate(*batch(8), use_tqdm=False)
        assert llm.engine_info()["num_restarts"] == 1
        assert (llm.stats().spec_decode_num_draft_tokens > 0) == bool(drafts)
    assert "was lost and is being restarted: died by signal 9" in caplog.text


def test_a_rank_killed_in_mid_generation(expected: list[Any], mark: str, caplog: pytest.LogCaptureFixture) -> None:
    with replicated(1, data_parallel_backend="local", tensor_parallel_size=2) as llm:
        [rank] = [pid for pid in marked_processes(mark) if pid not in pids(llm)]
        with killing(lambda: rank, after=0.4):
            assert [rows[0][0] for *_, rows in facts(llm.generate(*batch(60), use_tqdm=False))] == [
                rows[0][0] for *_, rows in expected
            ]
    assert "rank 1 died by signal 9" in caplog.text


@pytest.mark.parametrize(("full", "num_blocks", "longest"), [(3, 12, 46), (0, 5, 200)], ids=["some", "all"])
def test_a_replica_of_layers_with_windows_is_as_large_when_it_returns(
    full: int, num_blocks: int, longest: int, mark: str
) -> None:
    """It takes texts that fit because windows bound what layers keep, and has all its blocks again."""
    kinds = ["full_attention"] * full + ["sliding_attention"] * (4 - full)
    windows = {"use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}
    params = SamplingParams(temperature=0, max_tokens=longest // 2, ignore_eos=True)
    options = {"data_parallel_backend": "local", "num_kvcache_blocks": num_blocks, "kvcache_block_size": 16}
    prompt = [7] * (longest - longest // 2)
    with replicated(1, **options, hf_overrides=windows) as llm:
        tables = [(one["window"], one["tables"]) for one in llm.engine_info()["kv_cache_groups"]]
        assert tables == [*([(None, full)] if full else []), (8, 1)]
        expected = llm.generate([prompt], params, use_tqdm=False)[0].token_ids
        assert len(expected) == params.max_tokens
        os.kill(pids(llm)[0], signal.SIGKILL)
        assert llm.generate([prompt], params, use_tqdm=False)[0].token_ids == expected
        info = llm.engine_info()
        assert (info["num_restarts"], info["num_kvcache_blocks"]) == (1, num_blocks)


def test_fewer_replicas_and_then_none(
    expected: list[Any], mark: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "MOST_RESTARTS", 0)
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with replicated(2) as llm:
        os.kill(pids(llm)[0], signal.SIGKILL)
        assert facts(llm.generate(*batch(60), use_tqdm=False)) == expected
        assert "the others continue without it" in caplog.text
        assert llm.engine_info()["num_replicas"] == 1
        with killing(lambda: pids(llm)[0], after=0.2), pytest.raises(ReplicaError, match="died by signal 9"):
            llm.generate([[5] * 9] * 64, long, use_tqdm=False)


def test_bad_options_are_refused_before_anything_starts(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="data_parallel_size=0: must be an integer in 1"):
        replicated(0)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"data_parallel_backend='ray': needs Ray: pip install 'nanovllm\[ray\]'"):
        replicated(2, data_parallel_backend="ray")
    with pytest.raises(ValueError, match="ray_address='auto': must be None, or go with data_parallel_backend='ray'"):
        replicated(2, ray_address="auto")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    bound = "data_parallel_size=2: 2 x tensor_parallel_size=2 ranks must be at most the 2 GPUs"
    with pytest.raises(ValueError, match=bound):
        replicated(2, device="auto", tensor_parallel_size=2)
    assert not marked_processes(mark)
    config = EngineConfig("model", data_parallel_size=2)
    assert devices_of_replicas(config) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert devices_of_replicas(config) == ["5", "7"]
    shared = EngineConfig("model", data_parallel_size=3, share_gpus=True, num_kvcache_blocks=8)
    assert devices_of_replicas(shared) == ["5", "7", "5"]


@pytest.mark.slow
def test_a_replica_that_stops_is_noticed(
    mark: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the front waits for it to read: what is sent here is more than a socket takes."""
    longer = {"max_model_len": 4100, "hf_overrides": {"max_position_embeddings": 4100}, "num_kvcache_blocks": 8192}
    with replicated(2, **longer) as llm:
        monkeypatch.setattr(engines, "SILENCE", 8.0)
        os.kill(pids(llm)[0], signal.SIGSTOP)
        outputs = llm.generate([[5] * 4000] * 40, SamplingParams(max_tokens=1), use_tqdm=False)
        assert [len(output.token_ids) for output in outputs] == [1] * 40
    assert "gave no sign of life for 8 s" in caplog.text


def test_a_replica_that_cannot_start_says_why(mark: str) -> None:
    with pytest.raises(ValueError, match="max_model_len=999999: must be at most"):
        replicated(1, data_parallel_backend="local", max_model_len=999999)


@pytest.mark.slow
def test_twenty_random_kills(expected: list[Any], mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MOST_RESTARTS", 20)
    moment = random.Random(7)
    with replicated(3) as llm:
        for _ in range(20):
            llm.engine.book.num_requests = 0  # the same numbers, and so the same seeds
            with killing(lambda: moment.choice(pids(llm)), after=moment.uniform(0.05, 0.8)):
                assert facts(llm.generate(*batch(60), use_tqdm=False)) == expected
        assert llm.engine_info()["num_replicas"] == 3
