"""All replicas of a configuration, started at once: here as processes of this host."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from nanovllm.config import EngineConfig
from nanovllm.errors import ReplicaError
from nanovllm.executor.cpu_threads import usable_cores
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import read_model_config, resolve_model_folder
from nanovllm.replicas.devices import devices_of_replicas
from nanovllm.replicas.engine import ReplicatedEngine
from nanovllm.replicas.inbox import Inbox
from nanovllm.replicas.link import Lost, ProcessLink, ReplicaLink
from nanovllm.replicas.messages import Failed, Ready, Start
from nanovllm.tokenizer import Tokenizer


def start_replicas(config: EngineConfig) -> ReplicatedEngine:
    """The engine over all replicas of `config`. Raises what the first one raises that cannot start."""
    config = resolve_model_folder(config)
    model_config = read_model_config(config)
    devices = devices_of_replicas(config)
    num_threads = None
    if devices[0] is None:
        num_threads = max(1, usable_cores() // config.data_parallel_size)
    starts = [Start(of_one_replica(config), each, num_threads) for each in devices]

    def link(number: int, num_blocks: int | None, inbox: Inbox) -> ReplicaLink:
        return ProcessLink(number, starts[number].with_blocks(num_blocks), inbox)

    return start_links(config, model_config, link)


def of_one_replica(config: EngineConfig) -> EngineConfig:
    return replace(config, data_parallel_size=1, data_parallel_backend=None, ray_address=None)


def start_links(
    config: EngineConfig,
    model_config: ModelConfig,
    link: Callable[..., ReplicaLink],
) -> ReplicatedEngine:
    """The engine over config.data_parallel_size replicas. `link`: (number, num_kvcache_blocks, inbox) -> the hold on a
    replica that starts."""
    begin = time.perf_counter()
    tokenizer = Tokenizer(config)
    inbox = Inbox()
    links: list[ReplicaLink] = []
    ready: dict[int, Ready] = {}
    try:
        for number in range(config.data_parallel_size):
            links.append(link(number, None, inbox=inbox))
        while len(ready) < len(links):
            for sender, message in inbox.take(timeout=1.0):
                if isinstance(message, Failed) and message.kind is not None:
                    raise message.kind(message.text)
                if isinstance(message, Lost):
                    raise ReplicaError(f"replica {sender.number} could not start: {message}")
                if isinstance(message, Ready):
                    ready[sender.number] = message
        found = [ready[number] for number in range(len(links))]
        restart = partial(link, inbox=inbox)
        engine = ReplicatedEngine(links, restart, inbox, found, config, model_config, tokenizer)
    except BaseException:
        for each in links:
            each.close(patience=0)
        inbox.close()
        raise
    engine.startup_seconds = time.perf_counter() - begin
    return engine
