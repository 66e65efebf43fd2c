"""All replicas of a configuration, started at once."""

import os
import queue
import time
from dataclasses import replace
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.errors import ReplicaError
from nanovllm.models.registry import read_model_config, resolve_model_folder
from nanovllm.replicas.devices import devices_of_replicas
from nanovllm.replicas.engine import ReplicatedEngine
from nanovllm.replicas.link import Lost, ReplicaLink
from nanovllm.replicas.messages import Failed, Ready, Start
from nanovllm.tokenizer import Tokenizer


def start_replicas(config: EngineConfig) -> ReplicatedEngine:
    """The engine over all replicas of `config`. Raises what the first one raises that cannot start."""
    begin = time.perf_counter()
    config = resolve_model_folder(config)
    model_config = read_model_config(config)
    model_config.check_tensor_parallel(config.tensor_parallel_size)
    devices = devices_of_replicas(config)
    tokenizer = Tokenizer(config)
    num_threads = None
    if devices[0] is None:
        num_threads = max(1, len(os.sched_getaffinity(0)) // config.data_parallel_size)
    one = replace(config, data_parallel_size=1, data_parallel_backend=None)
    starts = [Start(one, each, num_threads) for each in devices]
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    links: list[ReplicaLink] = []
    ready: dict[int, Ready] = {}
    try:
        for number, start in enumerate(starts):
            links.append(ReplicaLink(number, start, inbox))
        while len(ready) < len(links):
            link, message = inbox.get()
            if isinstance(message, Failed) and message.kind is not None:
                raise message.kind(message.text)
            if isinstance(message, Lost):
                raise ReplicaError(f"replica {link.number} could not start: {message}")
            if isinstance(message, Ready):
                ready[link.number] = message
        found = [ready[number] for number in range(len(links))]
        engine = ReplicatedEngine(links, starts, inbox, found, model_config, tokenizer)
    except BaseException:
        for link in links:
            link.close(patience=0)
        raise
    engine.startup_seconds = time.perf_counter() - begin
    return engine
