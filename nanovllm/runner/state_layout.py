"""Layout of the layers' keys and values: which layers share a block table, and what a block is made of. Plain
arithmetic.

Layers with the same window need the same tokens of a row, and are a group. A group's layers are dealt out to tables of
equal numbers of layers, and the tables of all groups take about as many bytes, so that a block serves any table: lane k
of a block belongs to the k-th layer of whichever table has the block, and is as large as that table's layers need. Few
layers a table fit every ratio of windows to others; many layers a table are few tables. With one group there is one
table, and a lane for each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanovllm.config import EngineConfig
from nanovllm.errors import refuse
from nanovllm.layers.memory import Pages
from nanovllm.wire.state import PageGroup, row_blocks

_MOST_PADDING = 0.1
"""Maximum padding, lanes without a layer, as a share of the bytes of all layers and of those that keep everything."""
_LEAST_SAVED = 0.1
"""Least share of the longest row's bytes that groups must save to be made."""


class TableLane(NamedTuple):
    """Table and lane of a layer's keys and values."""

    table: int
    lane: int


@dataclass(frozen=True)
class StateLayout:
    """The groups of a rank's layers."""

    groups: tuple[PageGroup, ...]
    group_layers: tuple[int, ...]
    """Layers of each group."""
    by_layer: tuple[TableLane, ...]
    """Table and lane of each layer."""
    lanes: tuple[tuple[Pages, ...], ...]
    """Pages of a block, lane by lane, in the tables of each group."""

    @property
    def num_tables(self) -> int:
        return sum(group.num_tables for group in self.groups)

    @property
    def is_mixed(self) -> bool:
        """Whether a block is cut into other lanes in the tables of another group."""
        return len(set(self.lanes)) > 1

    @property
    def table_groups(self) -> list[int]:
        """Group of each table."""
        return [number for number, group in enumerate(self.groups) for _ in range(group.num_tables)]

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that a token takes in a block, whichever table has it."""
        return max(sum(lane.token_bytes(dtype) for lane in lanes) for lanes in self.lanes)

    def row_bytes(self, num_tokens: int, block_size: int, dtype: torch.dtype) -> int:
        """Maximum bytes that a row of up to `num_tokens` holds while it decodes."""
        return row_blocks(self.groups, num_tokens, block_size) * block_size * self.token_bytes(dtype)


def one_group(layers: Sequence[Pages]) -> StateLayout:
    """All layers in one table, which keeps everything."""
    by_layer = tuple(TableLane(0, number) for number in range(len(layers)))
    return StateLayout((PageGroup(),), (len(layers),), by_layer, (tuple(layers),))


def layout_of(layers: Sequence[Pages], config: EngineConfig, dtype: torch.dtype) -> StateLayout:
    """Groups by window where these save memory of a row of the longest context, and all layers of a window take as
    much; else one group. config: no "auto" is left. dtype: of the cache. Raises ValueError where a mixer cannot keep
    it."""
    if config.kv_cache_dtype == "fp8" and not all(pages.takes_fp8 for pages in layers):
        refuse("kv_cache_dtype", "fp8", "'auto' with a mixer whose Pages do not say takes_fp8")
    assert config.max_model_len and config.kvcache_block_size
    whole = one_group(layers)
    if not config.uses("window_groups") or len(set(layers)) != len({pages.window for pages in layers}) or not layers:
        return whole
    grouped = _by_window(layers, dtype)
    longest = (config.max_model_len, config.kvcache_block_size, dtype)
    return grouped if grouped.row_bytes(*longest) <= (1 - _LEAST_SAVED) * whole.row_bytes(*longest) else whole


def _by_window(layers: Sequence[Pages], dtype: torch.dtype) -> StateLayout:
    """Groups by window, those that keep everything first."""
    kinds = sorted(set(layers), key=lambda pages: (pages.window is not None, pages.window))
    members = [[number for number, pages in enumerate(layers) if pages == kind] for kind in kinds]
    counts = tuple(map(len, members))
    depths = _layers_of_a_table(counts, [kind.token_bytes(dtype) for kind in kinds])
    groups, by_layer = [], [TableLane(0, 0)] * len(layers)
    first_table = 0
    for kind, numbers, depth in zip(kinds, members, depths, strict=True):
        for at, number in enumerate(numbers):
            by_layer[number] = TableLane(first_table + at // depth, at % depth)
        groups.append(PageGroup(kind.window, -(-len(numbers) // depth)))
        first_table += groups[-1].num_tables
    lanes = tuple((kind,) * depth for kind, depth in zip(kinds, depths, strict=True))
    return StateLayout(tuple(groups), counts, tuple(by_layer), lanes)


def _layers_of_a_table(counts: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Numbers of layers of a table of each group: the most with which few bytes of blocks have no layer, or those with
    which fewest have none. counts, sizes: of each group its layers, and the bytes of a token in one of them."""

    def padding(size: int) -> float:
        """Share of padding of tables that take `size` bytes a token, the larger of two cases: in long rows the first
        group has most of the memory, in short ones each has its share."""
        taken = [size * -(-count // (size // each)) for count, each in zip(counts, sizes, strict=True)]
        needed = [count * each for count, each in zip(counts, sizes, strict=True)]
        return max(taken[0] / needed[0], sum(taken) / sum(needed)) - 1

    possible = {layers * each for count, each in zip(counts, sizes, strict=True) for layers in range(1, count + 1)}
    large_first = sorted((size for size in possible if size >= max(sizes)), reverse=True)
    few = (size for size in large_first if padding(size) <= _MOST_PADDING)
    chosen = next(few, None) or min(large_first, key=padding)
    return [chosen // each for each in sizes]
