"""Start of the engine of an LLM over a fleet."""

import time

from nanovllm.config import EngineConfig
from nanovllm.errors import ReplicaError
from nanovllm.host import wire
from nanovllm.host.devices import devices_of_replicas
from nanovllm.host.engines import Engines
from nanovllm.host.fleet_engine import FleetEngine
from nanovllm.host.handle import Lost
from nanovllm.models.registry import read_model_config, resolve_model_folder
from nanovllm.text.tokenizer import Tokenizer

_LOOK_SECONDS = 0.1


def start_fleet(config: EngineConfig) -> FleetEngine:
    """Starts all replicas of `config`. Raises the error of the first one that cannot start; ImportError if Ray is asked
    for and missing; ValueError, before any replica starts, if there are too few devices."""
    options = wire.config_fields(config)
    here = resolve_model_folder(config)  # on a cluster, every node fetches a hub id for itself
    model_config = read_model_config(here)
    on_ray = config.data_parallel_backend == "ray"
    if not on_ray:
        devices_of_replicas(here)
    begin = time.perf_counter()
    tokenizer = Tokenizer(here)
    engines = Engines(config.model if on_ray else here.model, options)
    try:
        engines.start()
        await_ready(engines)
        model_config = model_config.with_end(tokenizer.own.eos_token_id)
        engine = FleetEngine(engines, config, model_config, tokenizer)
    except BaseException:
        engines.close(patience=0)
        raise
    engine.startup_seconds = time.perf_counter() - begin
    return engine


def await_ready(engines: Engines) -> None:
    """Waits until all engines are ready. Raises the error of the first one that cannot start or is silent."""
    while engines.fleet is None:
        engines.read(_LOOK_SECONDS)
        for frame in engines.take():
            if isinstance(frame, Lost):
                raise (frame.kind or ReplicaError)(frame.reason)
