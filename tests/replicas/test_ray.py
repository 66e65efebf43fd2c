"""Replicas as actors of a Ray cluster of two nodes on this machine: the same tokens, whatever becomes of actors and
nodes; and what is refused before anything starts."""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from replica_workload import DEMO, OPTIONS, batch, facts
from system import wait_for
from test_replicas import killing

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.host import fleet, ray_cluster, wire

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")
ray_actor = pytest.importorskip("nanovllm.host.ray_actor")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with the driver, and a second node."""
    nodes = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=nodes)
    cluster.add_node(**nodes)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def on_ray(cluster: Any, count: int, **options: Any) -> LLM:
    backend = {"data_parallel_backend": "ray", "ray_address": cluster.address}
    return LLM(DEMO, **{**OPTIONS, "data_parallel_size": count, **backend, **options})


def test_tokens_do_not_depend_on_the_cluster(cluster: Any, expected: list[Any]) -> None:
    with on_ray(cluster, 2) as llm:
        assert facts(llm.generate(*batch(60), use_tqdm=False)) == expected
        assert llm.engine_info()["num_replicas"] == 2
        llm.load_weights(DEMO)
        llm.pause()
        llm.resume()
        assert len(llm.checksum()) > 10
    assert not ray.is_initialized()


def pids(llm: LLM) -> list[int]:
    processes = [handle.process for handle in llm.engine.engines.reader.handles.values()]  # type: ignore[attr-defined]
    actors = [process._started.result() for process in processes]
    return ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors], timeout=60)


def actors(cluster: Any) -> list[str]:
    """Processes of this cluster's replicas, by the title that Ray gives them and where their output goes."""
    logs = cluster.head_node.get_session_dir_path()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            title = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
            if "EngineActor" in title and os.readlink(entry / "fd" / "1").startswith(logs):
                found.append(title)
        except OSError:
            continue
    return found


def lose_second_node(cluster: Any) -> None:
    """kill -9 of its raylet; its actors end with it."""
    node = next(node for node in cluster.list_all_nodes() if not node.head)
    os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    node.kill_raylet(check_alive=False)


def replace_second_node(cluster: Any) -> None:
    node = next(node for node in cluster.list_all_nodes() if not node.head)
    cluster.remove_node(node, allow_graceful=False)
    for tries_left in (2, 1, 0):
        try:
            cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
            break
        except Exception:  # Ray gives a node 30 s to start, which a busy machine may not
            if not tries_left:
                raise
    cluster.wait_for_nodes()


def test_an_actor_and_then_a_node_killed_in_mid_generation(
    cluster: Any, expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The actor comes back; what was on the node comes back on the other one, where there is room."""
    moment = random.Random(3)
    with on_ray(cluster, 2, tensor_parallel_size=1) as llm:
        found = pids(llm)
        assert len(actors(cluster)) == 2
        with killing(lambda: moment.choice(found), after=moment.uniform(0.05, 0.6)):
            assert facts(llm.generate(*batch(60), use_tqdm=False)) == expected
        llm.generate(*batch(4), use_tqdm=False)  # takes the loss in, where it came last
        assert llm.engine_info()["num_restarts"] == 1
        llm.engine.book.num_requests = 0  # the same numbers, and so the same seeds
        timer = threading.Timer(moment.uniform(0.05, 0.6), lose_second_node, [cluster])
        timer.start()
        try:
            assert facts(llm.generate(*batch(60), use_tqdm=False)) == expected
        finally:
            timer.join()
            replace_second_node(cluster)
    wait_for(lambda: not actors(cluster), "end of the actors")
    assert "was lost and is being restarted: ActorDiedError" in caplog.text


def test_an_actor_that_stands_still_holds_up_nobody(
    cluster: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though more is sent to it than Ray takes."""
    monkeypatch.setattr(ray_actor, "SILENCE", 10.0)
    with on_ray(cluster, 2) as llm:
        handle = llm.engine.engines.all[0]  # type: ignore[attr-defined]
        os.kill(pids(llm)[0], signal.SIGSTOP)
        begin = time.monotonic()
        for _ in range(12):
            handle.send(wire.Bucket(99, bytes(1 << 20)))
        assert time.monotonic() - begin < 5 and handle.backlog > 1 << 20
        assert facts(llm.generate(*batch(60), use_tqdm=False)) == expected
        assert llm.engine_info()["num_restarts"] == 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_random_moments(cluster: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MOST_RESTARTS", 30)
    moment = random.Random(11)
    with on_ray(cluster, 3) as llm:
        for n in range(20):
            llm.engine.book.num_requests = 0
            if n % 10 == 6:
                timer = threading.Timer(moment.uniform(0.05, 0.8), lose_second_node, [cluster])
                timer.start()
                assert facts(llm.generate(*batch(60), use_tqdm=False)) == expected
                timer.join()
                replace_second_node(cluster)
                continue
            with killing(lambda: moment.choice(pids(llm)), after=moment.uniform(0.05, 0.8)):
                assert facts(llm.generate(*batch(60), use_tqdm=False)) == expected


@pytest.mark.slow
def test_ranks_beside_an_actor(cluster: Any, expected: list[Any]) -> None:
    with on_ray(cluster, 2, tensor_parallel_size=2) as llm:
        found = facts(llm.generate(*batch(60), use_tqdm=False))
    assert [rows[0][0] for *_, rows in found] == [rows[0][0] for *_, rows in expected]


def test_more_than_a_cluster_has_is_refused(cluster: Any) -> None:
    bound = r"data_parallel_size=5: 5 x tensor_parallel_size=1 ranks must be at most the 4 replicas"
    with pytest.raises(ValueError, match=bound):
        on_ray(cluster, 5)
    with pytest.raises(ValueError, match=r"2 x tensor_parallel_size=4 ranks must be at most the 0 replicas"):
        on_ray(cluster, 2, tensor_parallel_size=4)


def test_a_node_without_the_folder_is_named(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig("/no/such/folder", device="cpu", data_parallel_size=2, data_parallel_backend="ray")
    with ray_cluster.connected(cluster.address):
        placement = ray_cluster.Placement(config)
        monkeypatch.setattr(ray_cluster, "Path", lambda _: SimpleNamespace(is_dir=lambda: True))  # as if it were here
        bound = r"model='/no/such/folder': must be a folder on every node, .* \(replica 0\)"
        with pytest.raises(ValueError, match=bound):
            placement.check_nodes(config)
        placement.close()


def test_kinds_of_gpus_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"Alive": True, "Resources": {"GPU": 4.0, f"accelerator_type:{kind}": 1.0}} for kind in ("A", "B", "B")]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    config = EngineConfig("m", tensor_parallel_size=2, data_parallel_size=5, data_parallel_backend="ray")
    bound = r"data_parallel_size=5: .* at most the 4 replicas .* GPUs of one kind .* \(replicas: 2 of A, 4 of B\)"
    with pytest.raises(ValueError, match=bound):
        ray_cluster.Placement(config)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:1", "listening"])
def test_an_address_that_does_not_answer(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_ANSWER_SECONDS", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        if address == "listening":
            address = f"127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(ValueError, match=f"ray_address='{address}': must be "):
            LLM(DEMO, data_parallel_backend="ray", ray_address=address, **OPTIONS)
        assert time.monotonic() - begin < 20
