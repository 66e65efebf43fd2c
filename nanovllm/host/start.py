"""Start of a fleet of engines from its options."""

import time
from collections.abc import Callable

from nanovllm.config import EngineConfig
from nanovllm.errors import ReplicaError
from nanovllm.host import wire
from nanovllm.host.devices import devices_of_replicas
from nanovllm.host.fleet_engine import FleetEngine
from nanovllm.host.handle import MODULE, ChildHandle, Handle, Lost
from nanovllm.models.registry import read_model_config, resolve_model_folder
from nanovllm.text.tokenizer import Tokenizer

_LOOK_SECONDS = 0.01


def start_fleet(config: EngineConfig, module: str = MODULE) -> FleetEngine:
    """The engine over all replicas of `config`. Raises what the first one raises that cannot start; ImportError without
    the Ray that is asked for; ValueError, before any replica starts, where there are too few devices. `module`: what
    children run."""
    options = wire.config_fields(config)
    here = resolve_model_folder(config)  # a hub id is fetched by every node of a cluster
    model_config = read_model_config(here)
    close: Callable[[], None] = lambda: None  # noqa: E731
    if config.data_parallel_backend == "ray":
        from nanovllm.host.ray_start import reserve

        model = config.model
        start, close = reserve(config)
    else:
        devices_of_replicas(here)
        model = here.model

        def start(first: wire.Start) -> Handle:
            return ChildHandle(first, module)

    def make(number: int, num_blocks: int | None = None) -> Handle:
        own = options if num_blocks is None else {**options, "num_kvcache_blocks": num_blocks}
        return start(wire.Start(model, own, number))

    begin = time.perf_counter()
    tokenizer = Tokenizer(here)
    handles: list[Handle] = []
    try:
        for number in range(config.data_parallel_size):
            handles.append(make(number))
        ready = await_ready(handles)
        engine = FleetEngine(handles, ready, make, config, model_config, tokenizer)
    except BaseException:
        for handle in handles:
            handle.close(patience=0)
        close()
        raise
    engine.at_close = close
    engine.startup_seconds = time.perf_counter() - begin
    return engine


def await_ready(handles: list[Handle]) -> list[wire.Ready]:
    """Waits for the first word of each engine. Raises the first error of an engine that cannot start."""
    ready: dict[int, wire.Ready] = {}
    while len(ready) < len(handles):
        time.sleep(_LOOK_SECONDS)
        for handle in handles:
            for frame in handle.receive():
                if isinstance(frame, wire.Ready):
                    ready[handle.number] = frame
                elif isinstance(frame, Lost):
                    if frame.kind is not None:
                        raise frame.kind(frame.reason)
                    raise ReplicaError(f"replica {handle.number} could not start: {frame.reason}")
    return [ready[number] for number in range(len(handles))]
