"""Reservation of a Ray cluster for engines, and a function that starts them."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from nanovllm.config import EngineConfig
from nanovllm.host import wire
from nanovllm.host.handle import Handle
from nanovllm.host.ray_cluster import Connection, Placement


def _absolute(path: str | None) -> str | None:
    """Makes the path of a folder absolute, because actors have other working folders."""
    return str(Path(path).resolve()) if path is not None and Path(path).is_dir() else path


def reserve(config: EngineConfig) -> tuple[Callable[[wire.Start], Handle], Callable[[], None]]:
    """Reserves the cluster; returns a function that starts an engine in an actor, and one that releases the cluster.
    Raises ImportError without Ray; ValueError, before anything starts, if the cluster does not answer or lacks GPUs or
    the model."""
    model, tokenizer = _absolute(config.model), _absolute(config.tokenizer)
    assert model is not None
    config = replace(config, model=model, tokenizer=tokenizer)
    with ExitStack() as reserved:
        connection = Connection(config.ray_address)
        reserved.callback(connection.close)
        placement = Placement(config)
        reserved.callback(placement.close)
        placement.check_nodes(config)
        from nanovllm.host.ray_handle import RayHandle

        held = reserved.pop_all()

    def make(start: wire.Start) -> Handle:
        options = start.options if tokenizer is None else {**start.options, "tokenizer": tokenizer}
        return RayHandle(wire.Start(model, options, start.number), placement)

    return make, held.close
