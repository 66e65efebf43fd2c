"""Translation of the tensors that our layers name to those of a family's checkpoint: renamed, fused, de-interleaved."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from nanovllm.layers.weights import CheckpointWeight, Shard, deinterleaved
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import names_of


def in_checkpoint(weights: Iterable[CheckpointWeight], config: ModelConfig) -> Iterator[CheckpointWeight]:
    """`weights`, named canonically, as the checkpoint of `config`'s family has them. Parts that it holds as one tensor
    become one weight."""
    names = names_of(config)
    fused: dict[str, dict[int, CheckpointWeight]] = {}
    for weight in weights:
        if config.interleaved_rope:
            weight = _deinterleaved(weight, config)
        weight = replace(weight, name=names.of(weight.name), scaled_by=tuple(map(names.of, weight.scaled_by)))
        into = names.fused_into(weight.name)
        if into is None:
            yield weight
        else:
            fused.setdefault(into[0], {})[into[1]] = weight
    for name, parts in fused.items():
        yield _stacked(name, [parts[index] for index in sorted(parts)])


def _deinterleaved(weight: CheckpointWeight, config: ModelConfig) -> CheckpointWeight:
    """Queries' and keys' rows in the order in which layers/attention.py rotates them."""
    parts = weight.name.split(".")
    if len(parts) < 3 or parts[-2] not in ("q_proj", "k_proj") or not weight.shape:  # a scale of all rows
        return weight
    spec = config.layers[int(parts[2])]
    if spec.rope is None:
        return weight
    rotary_dim = config.ropes[spec.rope].rotary_dim(spec.head_dim)
    shards = (part for shard in weight.shards for part in deinterleaved(shard, spec.head_dim, rotary_dim))
    return replace(weight, shards=tuple(shards))


def _stacked(name: str, parts: list[CheckpointWeight]) -> CheckpointWeight:
    """One tensor of which `parts` are the rows, in this order."""
    shards: list[Shard] = []
    first = parts[0]
    if not first.shape:  # the scale of the whole
        return replace(first, name=name, shards=tuple(shard for part in parts for shard in part.shards))
    rows = 0
    for part in parts:
        shards += (replace(shard, start=shard.start + rows) for shard in part.shards)
        rows += part.shape[0]
    beside = tuple(f"{name.rpartition('.')[0]}.{scale.rpartition('.')[2]}" for scale in first.scaled_by)
    return replace(first, name=name, shape=(rows, *first.shape[1:]), shards=tuple(shards), scaled_by=beside)
