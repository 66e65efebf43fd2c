"""GPUs of each replica on this host."""

import os

from nanovllm.config import EngineConfig


def devices_of_replicas(config: EngineConfig) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each replica: replica i has GPUs [i * size, (i + 1) * size). None on a CPU.

    Raises ValueError if there are too few GPUs, or if they are shared and num_kvcache_blocks is missing.
    """
    size, replicas = config.tensor_parallel_size, config.data_parallel_size
    if config.device == "cpu":
        return [None] * replicas
    import torch

    count = torch.cuda.device_count()
    if count == 0 and config.device == "auto":
        return [None] * replicas
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = names[:count] or [str(number) for number in range(count)]
    if replicas * size > count:
        needed = f"{replicas} x tensor_parallel_size={size} ranks"
        if not config.share_gpus or count == 0:
            bound = f"{needed} must be at most the {count} GPUs here (or set share_gpus)"
            raise ValueError(f"data_parallel_size={replicas}: {bound}")
        if config.num_kvcache_blocks is None:
            raise ValueError(f"num_kvcache_blocks=None: must be given where {needed} share {count} GPUs (share_gpus)")
    ranks = [names[rank % count] for rank in range(replicas * size)]
    return [",".join(dict.fromkeys(ranks[n * size : (n + 1) * size])) for n in range(replicas)]
