"""Sums of the counters of several engines."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from nanovllm.engine.engine_stats import EngineStats

_NOTHING = (EngineStats(), (0, 0))


class FleetStats:
    """The last counters that each engine has sent. Those of lost engines stay, so that no counter ever decreases."""

    def __init__(self, count: int) -> None:
        self._stats = [[_NOTHING] for _ in range(count)]

    def take(self, number: int, stats: EngineStats, computed: tuple[int, int]) -> None:
        """Replaces the counters of an engine."""
        self._stats[number][-1] = (stats, computed)

    def restart(self, number: int) -> None:
        """Counts from zero for the engine that takes the place of a lost one."""
        self._stats[number].append(_NOTHING)

    def total(self, numbers: Sequence[int], num_waiting: int) -> EngineStats:
        """Sums over engines; kv_cache_usage is a mean, and adapters are those of any. `numbers`: engines that are there
        now. `num_waiting`: requests that wait for an engine."""
        every = [stats for counted in self._stats for stats, _ in counted]
        there = [self._stats[number][-1][0] for number in numbers]
        if len(every) == len(there) == 1 and not num_waiting:
            return there[0]
        total: dict[str, Any] = {
            each.name: sum(getattr(one, each.name) for one in every) for each in fields(EngineStats) if each.type is int
        }
        buckets = [one.iteration_tokens for one in every if one.iteration_tokens]
        accepted = [one.spec_decode_accepted_per_pos for one in every if one.spec_decode_accepted_per_pos]
        return EngineStats(**{
            **total,
            "num_running": sum(one.num_running for one in there),
            "num_waiting": sum(one.num_waiting for one in there) + num_waiting,
            "kv_cache_usage": sum(one.kv_cache_usage for one in there) / max(1, len(there)),
            "finished": {
                reason: sum(one.finished.get(reason, 0) for one in every) for reason in ("stop", "length", "abort")
            },
            "running_adapters": tuple(sorted({name for one in there for name in one.running_adapters})),
            "waiting_adapters": tuple(sorted({name for one in there for name in one.waiting_adapters})),
            "iteration_tokens": tuple(map(sum, zip(*buckets, strict=True))),
            "spec_decode_accepted_per_pos": tuple(map(sum, zip(*accepted, strict=True))),
        })  # fmt: skip

    def computed(self) -> tuple[int, int]:
        """Prompt tokens and decoded tokens that all engines have computed since the start."""
        found = [computed for counted in self._stats for _, computed in counted]
        return sum(prompt for prompt, _ in found), sum(decode for _, decode in found)
