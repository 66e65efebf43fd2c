"""Ray cluster for replicas: connects in bounded time, checks its nodes, and reserves a bundle for each replica."""

import os
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.errors import refuse
from nanovllm.host import wire
from nanovllm.host.handle import Handle
from nanovllm.processes.child import import_path
from nanovllm.version import __version__

_ANSWER_SECONDS = 20.0  # for a cluster to answer
_PLACE_SECONDS = 60.0  # for others to free what replicas need
_KIND = "accelerator_type:"  # Ray's resource name for the kind of a node's GPUs

_lock = threading.Lock()
_num_users = 0
"""Number of engines that use the connection, if this module made it; the last one to close ends it."""


def reserve(config: EngineConfig) -> tuple[Callable[[wire.Start], Handle], Callable[[], None]]:
    """Reserves the cluster; returns a function that starts an engine in an actor, and one that releases the cluster.
    Raises ImportError without Ray; ValueError, before anything starts, if the cluster does not answer or lacks GPUs or
    the model."""
    model, tokenizer = _absolute(config.model), _absolute(config.tokenizer)
    assert model is not None
    config = replace(config, model=model, tokenizer=tokenizer)
    with ExitStack() as reserved:
        reserved.enter_context(connected(config.ray_address))
        placement = Placement(config)
        reserved.callback(placement.close)
        placement.check_nodes(config)
        from nanovllm.host.ray_actor import ActorProcess

        held = reserved.pop_all()

    def make(start: wire.Start) -> Handle:
        options = start.options if tokenizer is None else {**start.options, "tokenizer": tokenizer}
        placed = placement.options(start.number, **placement.share())
        return Handle(wire.Start(model, options, start.number), partial(ActorProcess, placed))

    return make, held.close


def _absolute(path: str | None) -> str | None:
    """Makes the path of a folder absolute, because actors have other working folders."""
    return str(Path(path).resolve()) if path is not None and Path(path).is_dir() else path


def import_ray() -> Any:
    """Imports Ray. Raises an ImportError that says what to install."""
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"data_parallel_backend='ray': needs Ray: pip install 'nanovllm[ray]' ({error})") from None
    return ray


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connection of this process to Ray: an existing one, or a new one, which ends with the context. Raises ImportError
    without Ray, ValueError if `address` (EngineConfig.ray_address) does not answer."""
    global _num_users
    ray = import_ray()
    with _lock:
        is_ours = _num_users > 0 or not ray.is_initialized()
        if not ray.is_initialized():
            _connect(ray, address)
        elif address not in (None, "auto") and _resolved(address) != ray.get_runtime_context().gcs_address:
            there = ray.get_runtime_context().gcs_address
            refuse("ray_address", address, f"that of the cluster that this program is connected to: {there}")
        _num_users += is_ours
    try:
        yield
    finally:
        with _lock:
            _num_users -= is_ours
            if is_ours and not _num_users:
                ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    wanted = address or os.environ.get("RAY_ADDRESS")
    if wanted is not None and wanted != "auto" and "://" not in wanted:
        _require_answer(wanted)
    try:
        # A Ray that starts here has no dashboard, and so no port of it.
        ray.init(address=wanted or "local", include_dashboard=None if wanted else False, logging_level="warning")
    except ConnectionError as error:
        raise ValueError(f"ray_address={wanted!r}: must be that of a Ray cluster that runs: {error}") from None


def _resolved(address: str | None) -> str:
    host, _, port = (address or "").rpartition(":")
    try:
        return f"{socket.gethostbyname(host)}:{port}"
    except OSError:
        return address or ""


def _require_answer(address: str) -> None:
    """Raises ValueError if no cluster answers at an address: ray.init would wait for ever."""
    bound = f"host:port of a Ray cluster that answers within {_ANSWER_SECONDS:.0f} s"
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        refuse("ray_address", address, "'auto' or host:port")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS / 4).close()
        command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "health-check", "--address", address]
        environment = {**os.environ, "PYTHONPATH": import_path()}
        done = subprocess.run(command, env=environment, timeout=_ANSWER_SECONDS, capture_output=True)
    except (OSError, OverflowError, subprocess.TimeoutExpired):
        refuse("ray_address", address, bound)
    if done.returncode:
        refuse("ray_address", address, bound)


class Placement:
    """Placement group with bundle i for replica i. Bundles are spread over the nodes."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError if the cluster has too little for all replicas on nodes of one kind."""
        import ray
        from ray.util.placement_group import placement_group

        size, count = config.tensor_parallel_size, config.data_parallel_size
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.uses_gpus = config.device == "cuda" or (config.device == "auto" and any("GPU" in node for node in nodes))
        self._resource = "GPU" if self.uses_gpus else "CPU"
        bundle: dict[str, float] = {self._resource: size}
        room = _room(nodes, self._resource, size)
        kind = max(room, key=lambda each: room[each], default="")
        if room.get(kind, 0) < count:
            found = ", ".join(f"{number} of {each}" for each, number in sorted(room.items()) if each) if kind else ""
            ranks = f"{count} x tensor_parallel_size={size} ranks"
            most = f"the {room.get(kind, 0)} replicas that the cluster's {self._resource}s of one kind have room for"
            raise ValueError(
                f"data_parallel_size={count}: {ranks} must be at most {most}{f' (replicas: {found})' if found else ''}"
            )
        if kind:
            bundle[_KIND + kind] = 0.001
        self.size = size
        self.group = placement_group([bundle] * count, strategy="SPREAD")
        if not self.group.wait(_PLACE_SECONDS):
            self.close()
            bound = f"what the cluster has free within {_PLACE_SECONDS:.0f} s: {ray.available_resources()}"
            raise ValueError(f"data_parallel_size={count}: {count} bundles of {bundle} must be {bound}")

    def options(self, number: int, **more: Any) -> dict[str, Any]:
        """Options that place a task or actor on the node of replica `number`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number)
        return {"num_cpus": 0, "scheduling_strategy": strategy, **more}

    def share(self) -> dict[str, float]:
        """Resources of its bundle that a replica uses."""
        return {"num_gpus" if self.uses_gpus else "num_cpus": self.size}

    def check_nodes(self, config: EngineConfig) -> None:
        """Raises ValueError if a replica's node lacks the model's folder or has another version of nanovllm."""
        import ray

        folders = [each for each in {config.model, config.tokenizer} if each is not None and Path(each).is_dir()]
        look = ray.remote(_look).options
        count = config.data_parallel_size
        found = [look(**self.options(number)).remote(folders) for number in range(count)]
        for number, (node, version, missing) in enumerate(ray.get(found, timeout=_PLACE_SECONDS)):
            if missing:
                refuse("model", missing[0], f"a folder on every node, and is none on {node} (replica {number})")
            if version != __version__:
                raise ValueError(f"nanovllm {version} on {node}: must be {__version__}, as it is here")

    def close(self) -> None:
        """Releases the bundles."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


def _room(nodes: list[dict[str, float]], resource: str, size: int) -> dict[str, int]:
    """Number of replicas of `size` GPUs or CPUs that nodes can hold, by the kind of GPU ("" if unknown)."""
    room: dict[str, int] = defaultdict(int)
    for node in nodes:
        kinds = [name.removeprefix(_KIND) for name in node if name.startswith(_KIND)] if resource == "GPU" else []
        if fits := int(node.get(resource, 0) // size):
            room[kinds[0] if kinds else ""] += fits
    return dict(room)


def _look(folders: list[str]) -> tuple[str, str, list[str]]:
    """Task for a node; returns its address, its version of this package, and the folders that are missing there."""
    import ray

    return ray.util.get_node_ip_address(), __version__, [each for each in folders if not os.path.isdir(each)]
