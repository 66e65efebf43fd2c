"""What a rank is built from, in a form that travels between processes."""

from dataclasses import dataclass

from nanovllm.config import EngineConfig
from nanovllm.model_config import ModelConfig


@dataclass(frozen=True)
class RunnerInit:
    """What a rank builds its runner from; `config` has no "auto" and no open choice left."""

    config: EngineConfig
    model_config: ModelConfig
    spin_seconds: float
    """How long an idle worker spins for the next command before it sleeps."""
    num_threads: int
    """Threads of each rank on a CPU, whose cores the ranks share."""
