"""Layout of the layers' keys and values: which layers share a block table, and what a block is made of. Plain
arithmetic.

Layers with the same window need the same tokens of a row, and are a group. A group's layers are dealt out to tables of
equal numbers of layers, all groups alike, so that a block serves any table: lane k of a block belongs to the k-th layer
of whichever table has the block. Few layers a table fit every ratio of windows to others; many layers a table are few
tables. With one group there is one table, and a lane for each layer.
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


class Place(NamedTuple):
    """Table and lane of a layer's keys and values."""

    table: int
    lane: int


@dataclass(frozen=True)
class StateLayout:
    """The groups of a rank's layers."""

    groups: tuple[PageGroup, ...]
    group_layers: tuple[int, ...]
    """Layers of each group."""
    places: tuple[Place, ...]
    """Places by layer."""
    lanes: tuple[Pages, ...]
    """Pages of a block for a layer of each table."""

    @property
    def num_tables(self) -> int:
        return sum(group.num_tables for group in self.groups)

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that a token takes in a block."""
        return sum(lane.token_bytes(dtype) for lane in self.lanes)

    def row_bytes(self, num_tokens: int, block_size: int, dtype: torch.dtype) -> int:
        """Maximum bytes that a row of up to `num_tokens` holds while it decodes."""
        return row_blocks(self.groups, num_tokens, block_size) * block_size * self.token_bytes(dtype)


def one_group(layers: Sequence[Pages]) -> StateLayout:
    """All layers in one table, which keeps everything."""
    places = tuple(Place(0, number) for number in range(len(layers)))
    return StateLayout((PageGroup(),), (len(layers),), places, tuple(layers))


def layout_of(layers: Sequence[Pages], config: EngineConfig, dtype: torch.dtype) -> StateLayout:
    """Groups by window where these save memory of a row of the longest context, and all layers take as much; else one
    group. config: no "auto" is left. dtype: of the cache. Raises ValueError where a mixer cannot keep it."""
    if config.kv_cache_dtype == "fp8" and not all(pages.takes_fp8 for pages in layers):
        refuse("kv_cache_dtype", "fp8", "'auto' with a mixer whose Pages do not say takes_fp8")
    assert config.max_model_len and config.kvcache_block_size
    whole = one_group(layers)
    if not config.uses("window_groups") or len({(pages.heads, pages.widths) for pages in layers}) != 1:
        return whole
    grouped = _by_window(layers)
    longest = (config.max_model_len, config.kvcache_block_size, dtype)
    return grouped if grouped.row_bytes(*longest) <= (1 - _LEAST_SAVED) * whole.row_bytes(*longest) else whole


def _by_window(layers: Sequence[Pages]) -> StateLayout:
    """Groups by window, those that keep everything first."""
    windows = sorted({pages.window for pages in layers}, key=lambda window: (window is not None, window))
    members = [[number for number, pages in enumerate(layers) if pages.window == window] for window in windows]
    counts = tuple(map(len, members))
    depth = _layers_of_a_table(counts)
    groups, places = [], [Place(0, 0)] * len(layers)
    first_table = 0
    for window, numbers in zip(windows, members, strict=True):
        for at, number in enumerate(numbers):
            places[number] = Place(first_table + at // depth, at % depth)
        groups.append(PageGroup(window, -(-len(numbers) // depth)))
        first_table += groups[-1].num_tables
    return StateLayout(tuple(groups), counts, tuple(places), tuple(layers[:depth]))


def _layers_of_a_table(counts: Sequence[int]) -> int:
    """The most layers of a table with which few lanes have no layer. counts: layers of each group."""

    def padding(depth: int) -> float:
        """Share of padding, the larger of two cases: in long rows the first group has most of the memory, in short ones
        each has its share."""
        lanes = [depth * -(-count // depth) for count in counts]
        return max(lanes[0] / counts[0], sum(lanes) / sum(counts)) - 1

    return next(depth for depth in range(max(counts), 0, -1) if padding(depth) <= _MOST_PADDING)
