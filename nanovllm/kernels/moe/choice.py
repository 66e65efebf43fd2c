"""How the experts' GEMMs are cut into tiles. No torch.

An expert's rows are cut into tiles of block_m, and each tile reads all weights of its expert: a tile should hold all of
an expert's rows where these are few, since then reading weights is all that costs.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupedConfig:
    """One grouped GEMM's tiles. block_n: columns of the result (where gate and up are computed together, of each)."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int = 4

    @property
    def x_left(self) -> bool:
        """Rows of x are the left operand of the product; else the weights are, of which it takes 64 rows or more."""
        return self.block_m > 32 or self.block_n < 64


@dataclass(frozen=True)
class ExpertConfigs:
    """Both grouped GEMMs of a layer; their block_m is one."""

    gate_up: GroupedConfig
    down: GroupedConfig

    @property
    def block_m(self) -> int:
        return self.gate_up.block_m


_ALONE = ExpertConfigs(GroupedConfig(16, 32, 128, 4), GroupedConfig(16, 64, 128, 4))
"""So few choices that narrow tiles are needed to occupy all processors."""
_BY_AVERAGE = (
    (6.0, ExpertConfigs(GroupedConfig(16, 64, 128, 3), GroupedConfig(16, 64, 128, 3))),
    (24.0, ExpertConfigs(GroupedConfig(32, 128, 128, 3), GroupedConfig(32, 64, 128, 3))),
    (64.0, ExpertConfigs(GroupedConfig(64, 64, 64, 4), GroupedConfig(64, 128, 64, 4))),
)
_CROWDED = ExpertConfigs(GroupedConfig(128, 128, 64, 3, 8), GroupedConfig(128, 256, 64, 4, 8))


_FP8_BY_AVERAGE = (
    (6.0, ExpertConfigs(GroupedConfig(16, 64, 128, 4), GroupedConfig(16, 64, 128, 5))),
    (24.0, ExpertConfigs(GroupedConfig(32, 64, 128, 4), GroupedConfig(32, 64, 128, 5))),
    (64.0, ExpertConfigs(GroupedConfig(64, 64, 128, 4), GroupedConfig(64, 128, 128, 4))),
)
_FP8_CROWDED = ExpertConfigs(GroupedConfig(128, 128, 128, 3, 8), GroupedConfig(128, 128, 128, 3, 8))


def expert_configs(num_choices: int, num_experts: int, item_size: int = 2) -> ExpertConfigs:
    """For `num_choices` (tokens x experts of each) over so many experts. item_size: bytes of a weight."""
    average = num_choices / num_experts
    if item_size == 1:
        return next((configs for most, configs in _FP8_BY_AVERAGE if average <= most), _FP8_CROWDED)
    if num_choices <= 16:
        found = _ALONE
    else:
        found = next((configs for most, configs in _BY_AVERAGE if average <= most), _CROWDED)
    if item_size > 2:  # tiles of these bytes would not fit in shared memory
        found = ExpertConfigs(_narrower(found.gate_up), _narrower(found.down))
    return found


def _narrower(config: GroupedConfig) -> GroupedConfig:
    return GroupedConfig(config.block_m, min(config.block_n, 64), 32, 3, config.num_warps)


def max_tiles(num_choices: int, num_experts: int, block_m: int) -> int:
    """Most tiles of rows that any distribution over the experts makes."""
    return min(num_choices, num_choices // block_m + num_experts)
