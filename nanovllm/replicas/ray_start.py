"""Replicas as actors of a Ray cluster, behind the front that processes of one host have too."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from nanovllm.config import EngineConfig
from nanovllm.models.registry import read_model_config, resolve_model_folder
from nanovllm.replicas.engine import ReplicatedEngine
from nanovllm.replicas.inbox import Inbox
from nanovllm.replicas.link import ReplicaLink
from nanovllm.replicas.messages import Start
from nanovllm.replicas.ray_cluster import Connection, Placement
from nanovllm.replicas.start import of_one_replica, start_links


def _absolute(config: EngineConfig) -> EngineConfig:
    """Actors have working folders of their own."""
    tokenizer = config.tokenizer
    if tokenizer is not None and Path(tokenizer).is_dir():
        tokenizer = str(Path(tokenizer).resolve())
    return replace(config, model=str(Path(config.model).resolve()), tokenizer=tokenizer)


def start_ray_replicas(config: EngineConfig) -> ReplicatedEngine:
    """The engine over all replicas of `config`. Raises ImportError without Ray; ValueError, before any replica starts,
    where the cluster does not answer or lacks GPUs or the model; else as start_replicas."""
    here = resolve_model_folder(config)  # a hub id is fetched by every node
    model_config = read_model_config(here)
    with ExitStack() as reserved:
        connection = Connection(config.ray_address)
        reserved.callback(connection.close)
        if Path(config.model).is_dir():
            config = here = _absolute(config)
        placement = Placement(config)
        reserved.callback(placement.close)
        placement.check_nodes(config)
        start = Start(of_one_replica(config), None, None)

        def link(number: int, num_blocks: int | None, inbox: Inbox) -> ReplicaLink:
            from nanovllm.replicas.ray_link import RayLink

            return RayLink(number, start.with_blocks(num_blocks), inbox, placement)

        engine = start_links(here, model_config, link)
        engine.at_close = reserved.pop_all()
    return engine
