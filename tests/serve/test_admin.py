"""The admin endpoints, over requests in flight: pauses, aborts, sleep, new weights, and who may call them."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from serving import ANSWER, ASK, CHAT, COMPLETIONS, DEMO, GENERATE, LONG, Server, Stream, ready_server
from system import free_port, wait_for

from nanovllm.transfer.buckets import Entry, described
from nanovllm.transfer.receiver import WeightSender
from nanovllm.transfer.shared import SharedBucket

KEY, USER_KEY = "the admin's", "a user's"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = ("--admin-api-key", KEY, "--api-key", USER_KEY)
    with ready_server(tmp_path_factory.mktemp("admin"), *keys, "--enable-sleep") as started:
        yield started


@pytest.fixture
def admin(server: Server) -> Iterator[httpx.Client]:
    with server.client(KEY) as client:
        yield client


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as opened:
        yield opened


def still_waits(answer: Future[Any]) -> bool:
    """Whether it does not come soon."""
    return not wait([answer], 0.3).done


def ask(admin: httpx.Client) -> str:
    """An answer, which other weights may never end."""
    return str(call(admin, CHAT, **ASK, max_tokens=30)["choices"][0]["message"]["content"])


def call(admin: httpx.Client, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = admin.post(path, json=body) if body else admin.post(path)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


@pytest.fixture(scope="module")
def whole(server: Server) -> tuple[str, str]:
    """A stream's text and end, when nothing interferes."""
    with httpx.Client(base_url=server.url, timeout=60, headers={"x-api-key": KEY}) as client:
        return Stream(client, max_tokens=120).text_and_end()


def test_the_admins_key_and_no_other(server: Server, admin: httpx.Client) -> None:
    for headers in ({}, {"authorization": f"Bearer {USER_KEY}"}, {"x-api-key": KEY + "x"}):
        for path in ("/pause", "/sleep", "/update_weights", "/abort_requests"):
            assert httpx.post(server.url + path, headers=headers).status_code == 401
        assert httpx.get(server.url + "/server_info", headers=headers).status_code == 401
    refused = httpx.get(server.url + "/v1/models")
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert admin.get("/v1/models").status_code == 200
    in_url = server.url.replace("://", "://any:the%20admin's@")
    assert httpx.get(in_url + "/is_paused").json() == {"is_paused": False}
    assert httpx.get(server.url + "/is_paused", headers={"authorization": "Basic !"}).status_code == 401


def test_pause_that_keeps(admin: httpx.Client, pool: ThreadPoolExecutor, whole: tuple[str, str]) -> None:
    stream = Stream(admin, max_tokens=120)
    assert call(admin, "/pause?mode=keep") == {"status": "paused"}
    assert admin.get("/is_paused").json() == {"is_paused": True}
    later = pool.submit(ask, admin)
    count = -1
    while count != (count := len(stream.events)):
        time.sleep(0.2)  # what was on its way comes
    assert still_waits(later)
    assert not stream.is_over and len(stream.events) == count
    assert admin.get("/health").status_code == 200
    call(admin, "/resume")
    assert stream.text_and_end() == whole
    assert later.result(30) == ANSWER
    assert admin.get("/is_paused").json() == {"is_paused": False}


def test_pause_that_aborts(admin: httpx.Client, pool: ThreadPoolExecutor, whole: tuple[str, str]) -> None:
    """Streams and answers end with what they have."""
    stream = Stream(admin)
    running, queued = (pool.submit(call, admin, CHAT, **LONG | {"n": n, "max_tokens": 1900}) for n in (2, 32))
    wait_for(lambda: admin.get("/load").json()["server_load"] == 35, "requests")
    call(admin, "/pause")
    text, end = stream.text_and_end()
    assert text[: len(whole[0])] == whole[0][: len(text)] and end == "abort"
    for answer, count in ((running, 2), (queued, 32)):
        assert [choice["finish_reason"] for choice in answer.result(10)["choices"]] == ["abort"] * count
    call(admin, "/resume")
    assert ask(admin) == ANSWER


def test_pause_that_waits_and_is_resumed(admin: httpx.Client, pool: ThreadPoolExecutor, whole: tuple[str, str]) -> None:
    stream = Stream(admin, max_tokens=120)
    call(admin, "/pause?mode=wait")
    assert stream.text_and_end() == whole
    call(admin, "/resume")
    long = Stream(admin)
    pause = pool.submit(call, admin, "/pause?mode=wait", 409)
    assert still_waits(pause)
    later = pool.submit(ask, admin)
    call(admin, "/resume")
    assert pause.result(10)["error"]["code"] == "wrong_state"
    assert later.result(10)
    assert call(admin, "/abort_requests", request_ids=[long.events[0]["id"]])["aborted"] == 1
    assert long.text_and_end()[1] == "abort"


def test_aborts_by_id_and_of_all(admin: httpx.Client, whole: tuple[str, str]) -> None:
    first, second = Stream(admin, max_tokens=120), Stream(admin)
    assert call(admin, "/abort_requests", request_ids=[second.events[0]["id"], "no-such"])["aborted"] == 1
    assert second.text_and_end()[1] == "abort"
    assert first.text_and_end() == whole
    third = Stream(admin)
    assert call(admin, "/abort_requests", request_ids=[])["aborted"] == 0
    assert call(admin, "/abort_requests")["aborted"] == 1
    assert third.text_and_end()[1] == "abort"


def test_sleep_in_the_middle_of_a_stream(
    server: Server, admin: httpx.Client, pool: ThreadPoolExecutor, whole: tuple[str, str]
) -> None:
    stream = Stream(admin, max_tokens=120)
    assert "level" in call(admin, "/sleep?level=3", 400)["error"]["message"]
    assert "tags" in call(admin, "/sleep?tags=nothing", 400)["error"]["message"]
    assert not stream.is_over, "a call that is refused changes nothing"
    assert "freed_bytes" in call(admin, "/sleep?level=1&mode=keep")
    assert admin.get("/is_sleeping").json() == {"is_sleeping": True}
    state = "vllm:engine_sleep_state"
    assert server.metric(state, sleep_state="weights_offloaded") == server.metric(state) == 1
    call(admin, "/sleep", 409)
    later = pool.submit(ask, admin)
    call(admin, "/resume")  # asleep all the same
    assert still_waits(later)
    call(admin, "/wake_up?tags=weights")
    assert admin.get("/is_sleeping").json() == {"is_sleeping": True}
    call(admin, "/wake_up")
    call(admin, "/wake_up", 409)
    assert server.metric(state, sleep_state="awake") == server.metric(state) == 1
    assert stream.text_and_end() == whole
    assert later.result(30)


def test_weights_that_were_dropped_come_back_from_a_folder(admin: httpx.Client, pool: ThreadPoolExecutor) -> None:
    call(admin, "/sleep?level=2")
    call(admin, "/wake_up")
    waits = pool.submit(ask, admin)
    assert still_waits(waits)
    call(admin, "/update_weights", weight_dir=str(DEMO))
    assert waits.result(30) == ANSWER


@pytest.mark.parametrize(
    ("path", "empties"), [("/pause", True), ("/pause?clear_cache=false", False), ("/reset_prefix_cache", True)]
)
def test_what_empties_the_prefix_cache(admin: httpx.Client, path: str, empties: bool) -> None:
    body = {"prompt": [5, 6, 7] * 40, "max_tokens": 1}

    def cached() -> int:
        usage = admin.post(COMPLETIONS, json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    before = cached()
    assert before > 0
    call(admin, path)
    call(admin, "/resume")
    assert cached() == (0 if empties else before)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint with other values."""
    folder = tmp_path_factory.mktemp("other") / "checkpoint"
    shutil.copytree(DEMO, folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] = -weights["model.norm.weight"]
    save_file(weights, path)
    return folder


def num_drawn(admin: httpx.Client) -> float:
    """Number of tokens that were drawn since the server's start."""
    return float(re.findall(r"vllm:generation_tokens_total{.*} (.+)", admin.get("/metrics").text)[0])


def test_new_weights_from_a_folder(admin: httpx.Client, pool: ThreadPoolExecutor, other: Path, tmp_path: Path) -> None:
    """Over a stream, in one call and in three; what is refused changes nothing."""
    before = call(admin, "/weight_checker", action="checksum")["checksums"]
    version = admin.get("/weight_info").json()["weight_version"]
    for wrong in (str(tmp_path), "/no/such", 3):
        assert call(admin, "/update_weights", 400, weight_dir=wrong)["error"]["param"] == "weight_dir"
    assert ask(admin) == ANSWER
    stream = Stream(admin, max_tokens=120)
    call(admin, "/update_weights", weight_dir=str(other), in_flight="keep")
    compared = call(admin, "/weight_checker", action="compare", baseline=before)
    assert compared == {"match": False, "mismatches": ["model.norm.weight"]}
    assert ask(admin) != ANSWER
    assert stream.text_and_end()[1] == "length"

    call(admin, "/update_weights", 409, update_info={"weight_dir": str(DEMO)})  # none was started
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 400, "ignore_eos": True}}
    drawn = num_drawn(admin)
    spanning = pool.submit(call, admin, GENERATE, **body)
    wait_for(lambda: num_drawn(admin) > drawn, "tokens")
    call(admin, "/pause?mode=keep")
    call(admin, "/start_weight_update")
    call(admin, "/resume")
    waits = pool.submit(ask, admin)
    assert still_waits(waits)
    call(admin, "/finish_weight_update", 400)  # nothing has come
    call(admin, "/update_weights", update_info={"weight_dir": str(DEMO)})
    call(admin, "/finish_weight_update", 400, weight_version=0)
    call(admin, "/finish_weight_update", weight_version=version + 7)
    assert waits.result(30) == ANSWER
    assert admin.get("/weight_info").json() == {"weight_version": version + 7}
    spans = spanning.result(30)["choices"][0]["weight_versions"]
    assert [span["version"] for span in spans] == [str(version + 1), str(version + 7)]
    assert [spans[0]["start"], spans[0]["end"], spans[1]["end"]] == [0, spans[1]["start"], 400]
    assert call(admin, "/weight_checker", action="compare", baseline=before)["match"]


def test_a_trainer_broadcasts_and_shares_memory(admin: httpx.Client, pool: ThreadPoolExecutor, other: Path) -> None:
    """The calls of vLLM's weight transfer, with its fields: over a group, then in a bucket, under a stream."""
    before = call(admin, "/weight_checker", action="checksum")["checksums"]
    assert admin.get("/get_world_size?include_dp=false").json() == {"world_size": 1}
    address = {"master_address": "127.0.0.1", "master_port": free_port()}
    info = {**address, "rank_offset": 1, "world_size": 2, "packed": True}
    weights = load_file(other / "model.safetensors")
    joined = pool.submit(call, admin, "/init_weight_transfer_engine", init_info=info)
    sender = WeightSender(info, "cpu", timeout=60)
    joined.result(30)
    stream = Stream(admin, max_tokens=60)
    call(admin, "/pause?mode=keep")
    call(admin, "/start_weight_update")
    named = described([Entry.of(*pair) for pair in weights.items()])
    sent = pool.submit(sender.send, weights.items())
    call(admin, "/update_weights", update_info=named)
    sent.result(30)
    call(admin, "/finish_weight_update")
    call(admin, "/resume")
    stream.last()
    sender.close()
    compared = call(admin, "/weight_checker", action="compare", baseline=before)
    assert compared == {"match": False, "mismatches": ["model.norm.weight"]}

    bucket = SharedBucket(1 << 21, "cpu")
    call(admin, "/init_weight_transfer_engine", init_info={})
    call(admin, "/start_weight_update")
    for message in bucket.messages(load_file(DEMO / "model.safetensors").items()):
        call(admin, "/update_weights", update_info=message)
    call(admin, "/update_weights", 400, update_info={**named, "shared_memory": "/etc/passwd", "nbytes": 1 << 30})
    call(admin, "/finish_weight_update")
    bucket.close()
    assert call(admin, "/weight_checker", action="compare", baseline=before)["match"]
    assert ask(admin) == ANSWER


def test_what_the_server_says_of_itself(admin: httpx.Client) -> None:
    text = admin.get("/server_info?config_format=json").text
    info = json.loads(text)
    assert info["vllm_config"]["model_config"]["max_model_len"] == 2048
    assert info["vllm_config"]["weight_transfer_config"] is not None
    assert KEY not in text and USER_KEY not in text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause?mode=gently", {}, "mode"), ("/pause", {"mode": 3}, "mode"), ("/sleep?level=x", {}, "level"),
        ("/start_weight_update", {"in_flight": "maybe"}, "in_flight"), ("/update_weights", {}, "update_info"),
        ("/update_weights", {"update_info": {}, "in_flight": "keep"}, "in_flight"),
        ("/update_weights", {"update_info": {}, "weight_version": 2}, "weight_version"),
        ("/update_weights", {"update_info": {}, "weight_dir": "x"}, "update_info"),
        ("/update_weights", {"weight_dir": str(DEMO), "weight_version": 0}, "weight_version"),
        ("/init_weight_transfer_engine", {"init_info": []}, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": {"pigeon": 1}}, "world_size"),
        ("/init_weight_transfer_engine", {}, "init_info"), ("/weight_checker", {"action": "compare"}, "baseline"),
        ("/abort_requests", {"request_ids": "all"}, "request_ids"),
    ],
)  # fmt: skip
def test_mistakes_are_named(admin: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    assert call(admin, path, 400, **body)["error"]["param"] == param
    assert admin.get("/is_paused").json() == {"is_paused": False}


def test_a_call_ends_with_the_engine(server: Server, admin: httpx.Client, pool: ThreadPoolExecutor) -> None:
    """The last one here: it ends the server."""
    Stream(admin, n=8)
    pause = pool.submit(admin.post, "/pause?mode=wait")
    assert still_waits(pause)
    os.kill(server.engines[0], signal.SIGKILL)
    assert pause.result(10).json()["error"]["code"] == "engine_dead"
    assert server.process.wait(20) == 1


@pytest.mark.slow
def test_a_call_is_refused_when_the_server_ends(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    options = ("--admin-api-key", KEY, "--shutdown-timeout", "1")
    with ready_server(tmp_path, *options) as server, server.client(KEY) as admin:
        stream = Stream(admin)
        pause = pool.submit(admin.post, "/pause?mode=wait")
        assert still_waits(pause)
        assert server.stop() == 0
        assert pause.result(10).json()["error"]["code"] == "shutting_down"
        assert stream.last()["error"]["code"] == "shutting_down"


def test_a_trainer_that_leaves_in_an_update(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """Requests wait for it, as /health says, but not without end; the next update serves again."""
    options = ("--admin-api-key", KEY, "--weight-update-timeout", "2")
    with ready_server(tmp_path, *options) as server, server.client(KEY) as admin:
        assert admin.get("/health").json() == {"status": "ok"}
        long = pool.submit(call, admin, CHAT, 503, **LONG | {"max_tokens": 2000})
        wait_for(lambda: admin.get("/load").json()["running"], "request")
        call(admin, "/start_weight_update")
        health = admin.get("/health")
        assert health.status_code == 200 and "waiting for new weights since" in health.json()["stage"]
        assert long.result(30)["error"]["code"] == "weights_incomplete"
        health = admin.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "incomplete"
        assert "waiting for new weights since" in call(admin, CHAT, 503, **ASK)["error"]["message"]
        call(admin, "/weight_checker", 409, action="checksum")
        call(admin, "/update_weights", update_info={"weight_dir": str(DEMO)})
        call(admin, "/finish_weight_update")
        assert ask(admin) == ANSWER
        assert admin.get("/health").json() == {"status": "ok"}
