"""Start of the engine of an LLM over a fleet."""

import time

from nanovllm.config import EngineConfig
from nanovllm.errors import ReplicaError
from nanovllm.host import wire
from nanovllm.host.devices import devices_of_replicas
from nanovllm.host.fleet_engine import FleetEngine
from nanovllm.host.fleet_handles import FleetHandles
from nanovllm.host.handle import Lost
from nanovllm.models.registry import read_model_config, resolve_model_folder
from nanovllm.text.tokenizer import Tokenizer

_LOOK_SECONDS = 0.01


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
    handles = FleetHandles(config.model if on_ray else here.model, options)
    try:
        handles.start()
        ready = await_ready(handles)
        model_config = model_config.with_end(tokenizer.own.eos_token_id)
        engine = FleetEngine(handles, ready, config, model_config, tokenizer)
    except BaseException:
        handles.close(patience=0)
        raise
    engine.startup_seconds = time.perf_counter() - begin
    return engine


def await_ready(handles: FleetHandles) -> list[wire.Ready]:
    """Waits until all engines are ready. Raises the error of the first one that cannot start or is silent."""
    ready: list[wire.Ready] | None = None
    while ready is None:
        time.sleep(_LOOK_SECONDS)
        handles.check_silence()
        for handle in handles.all:
            for frame in handle.receive():
                found = handles.take_start(handle, frame)
                if isinstance(found, Lost):
                    raise (found.kind or ReplicaError)(found.reason)
                ready = found or ready
    return ready
