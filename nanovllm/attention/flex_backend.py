"""Attention by PyTorch's FlexAttention (Dong et al., arXiv 2412.05496), with functions of the user's on scores and
masks.

For experiments: it is several times slower than the other backends and never chosen by itself. Queries are cut into
tiles of one row each. A tile's BlockMask is its line of the block table, so the kernel walks the row's pages where they
are. What it calls a key's index is a place in the cache; `_Tiles.logical` turns it into a position, on the device, and
finds out whether the place is the row's.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nanovllm.attention.base import AttentionBackend, AttentionMetadata, AttentionSetup, AttentionSpec, KVCache
from nanovllm.errors import refuse
from nanovllm.kernels.plan.plan import NO_LAUNCH, Launch

_QUERY_BLOCK = 128  # of a BlockMask; a tile is one
_CPU_TILE = 32
_COMPILING = {"recompile_limit": 256, "specialize_float": True}
"""Options of torch.compile. There is a variant for one tile and several, one query and more, each kind of layers and
each user's function; PyTorch would stop at 8 and compute uncompiled. Floats in functions are constants: as inputs,
which `dynamic` would make of them, they do not compile for a GPU."""

Mod = Callable[..., torch.Tensor]


@cache
def _compiled() -> Any:
    """Made when it is first used: torch.compile imports its compiler, which takes more than a second."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


class _Tiles(NamedTuple):
    """Tiles of at most `size` queries; B of them."""

    size: int
    tokens: torch.Tensor
    """int64 [B, size]: of the step; padding repeats the tile's first."""
    is_real: torch.Tensor
    """bool [B, size]"""
    slots: torch.Tensor
    """int64 [B]"""
    first: torch.Tensor
    """int64 [B]: position of the first query."""
    ends: torch.Tensor
    """int64 [B]: one past the position of the last query."""
    table: torch.Tensor
    """int32 [B, pages]: the rows' pages."""
    page_number: torch.Tensor
    """int32 [pages of the cache + 1]: which page of its row each one is; the same in all rows that share it."""

    def logical(self, b: torch.Tensor, place: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A place in the cache as (position, whether it is the row's)."""
        page = place // block_size
        number = self.page_number[page]
        return number * block_size + place % block_size, self.table[b, number] == page


class _Work(NamedTuple):
    """Work shared by the layers of one block table and window: tiles, those of decode rows apart, each with its mask,
    and the pages that a CPU gathers for them first."""

    tiles: list[tuple[_Tiles, BlockMask]]
    pages: torch.Tensor | None


class _Step(NamedTuple):
    """A step's lengths on the host, and what was made of them."""

    starts: np.ndarray
    lens: np.ndarray
    cuts: dict[int, list[tuple[int, int]]]
    """Tiles by number of queries: (row, number of its first token within the row's) of each."""
    works: dict[tuple[int, int | None], _Work]
    """Work by table and window."""


class FlexBackend(AttentionBackend):
    """Attention backend of PyTorch's flex_attention, uncompiled on a CPU. Reads lengths on the host, so it cannot be
    captured in a CUDA graph."""

    name = "flex"
    can_capture = False
    takes_functions = token_major_cache = True

    def __init__(self, setup: AttentionSetup, score_mod: Mod | None = None, mask_mod: Mod | None = None) -> None:
        """score_mod(score, slot, head, query position, key position) -> score, after the model's own soft-cap;
        mask_mod(slot, head, query position, key position) -> bool, together with what the model itself can see. Both
        are of tensors without dimensions, as flex_attention has them."""
        super().__init__(setup)
        self._score_mod, self._mask_mod = score_mod, mask_mod
        self._on_cpu = self.device.type == "cpu"

    @classmethod
    def check(cls, setup: AttentionSetup) -> None:
        where = "attention_backend='flex'"
        if setup.kv_dtype not in (None, setup.dtype):
            refuse("kv_cache_dtype", "fp8", f"'auto' with {where}")
        if setup.device.type == "cuda" and setup.block_size % 128:
            raise ValueError(f"kvcache_block_size={setup.block_size}: {where} takes multiples of 128 on a GPU")
        for spec in setup.specs:
            if spec.has_sinks:
                raise ValueError(f"{where}: must go with a model without attention sinks")
            if spec.head_dim < 16:
                raise ValueError(f"head_dim={spec.head_dim}: {where} takes at least 16")

    def prepare(self, metadata: AttentionMetadata) -> None:
        starts, lens = metadata.cu_seqlens_q.cpu().numpy(), metadata.context_lens.cpu().numpy()
        counts, n = np.diff(starts), metadata.num_decode_rows
        real = (metadata.row_slot.cpu().numpy() >= 0) & (lens > 0) & (counts > 0)
        cuts = {}
        for size, rows in ((1, np.arange(n)), (_CPU_TILE if self._on_cpu else _QUERY_BLOCK, np.arange(n, len(lens)))):
            rows = rows[real[rows]]
            if len(rows):
                cuts[size] = [(row, cut) for row in rows for cut in range(0, counts[row], size)]
        metadata.workspace = _Step(starts, lens, cuts, {})

    def _work(self, metadata: AttentionMetadata, table: int, window: int | None, num_places: int) -> _Work:
        step: _Step = metadata.workspace
        pages = int(-(-step.lens.max(initial=1) // self.block_size))
        block_table, gathered = metadata.block_tables[table][:, :pages], None
        num_pages = num_places // self.block_size
        if self._on_cpu:  # uncompiled, it computes with every page that it is given
            rows = torch.tensor(sorted({row for cuts in step.cuts.values() for row, _ in cuts}), dtype=torch.long)
            slots, lens = metadata.row_slot[rows].long(), metadata.context_lens[rows]
            held = self._held(pages, lens - metadata.cu_seqlens_q.diff()[rows], lens, window)
            gathered = block_table[slots][held].unique()
            within = torch.searchsorted(gathered, block_table[slots]).int()
            block_table = torch.zeros_like(block_table).index_copy(0, slots, within.where(held, 0))
            num_pages = len(gathered)
        tiles = [self._tiles(size, step, metadata.row_slot, block_table, window, num_pages) for size in step.cuts]
        return _Work([(each, self._block_mask(each, window, num_pages * self.block_size)) for each in tiles], gathered)

    def _held(self, pages: int, first: torch.Tensor, ends: torch.Tensor, window: int | None) -> torch.Tensor:
        """Mask bool [B, pages] of the pages that queries at `first` .. `ends` - 1 reach. A row's table names others'
        pages, too, where its window has passed."""
        begins = torch.arange(pages, device=self.device) * self.block_size
        held = begins < ends[:, None]
        return held if window is None else held & (begins + self.block_size > first[:, None] - window + 1)

    def _tiles(self, size: int, step: _Step, row_slot: torch.Tensor, block_table: torch.Tensor, window: int | None,
               num_pages: int) -> _Tiles:
        row, cut = (torch.tensor(part, device=self.device) for part in zip(*step.cuts[size], strict=True))
        begin, end, context = (torch.from_numpy(x.astype(np.int64)).to(self.device)[row]
                               for x in (step.starts[:-1], step.starts[1:], step.lens))
        steps = torch.arange(size, device=self.device)
        tokens = (begin + cut)[:, None] + steps
        is_real = tokens < end[:, None]
        first = context - (end - begin) + cut
        ends = first + is_real.sum(1)
        slots = row_slot[row].long()
        table = block_table[slots]
        held = self._held(table.shape[1], first, ends, window)
        numbers = torch.zeros(num_pages + 1, dtype=torch.int32, device=self.device)  # the last: of what is not held
        pages = torch.where(held, table, num_pages).long()
        numbers[pages] = torch.arange(table.shape[1], dtype=torch.int32, device=self.device).expand_as(table)
        tokens = torch.where(is_real, tokens, tokens[:, :1])
        return _Tiles(size, tokens, is_real, slots, first, ends, table, numbers)

    def forward(self, q: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, out: torch.Tensor,
                spec: AttentionSpec, sinks: torch.Tensor | None = None, behind: Launch = NO_LAUNCH) -> torch.Tensor:
        works, key = metadata.workspace.works, (cache.table, spec.window)
        if key not in works:
            works[key] = self._work(metadata, *key, num_places=cache.k.shape[0] * self.block_size)
        work: _Work = works[key]
        pages = slice(None) if work.pages is None else work.pages.long()
        # [pages, heads, tokens, D] as [1, heads, pages x tokens, D]: a view of a cache that has the tokens first
        k, v = (part[pages].transpose(0, 1).flatten(1, 2)[None] for part in (cache.k, cache.v))
        attend: Any = flex_attention if self._on_cpu else _compiled()
        for tiles, mask in work.tiles:
            with torch._dynamo.config.patch(_COMPILING):
                found = attend(q[tiles.tokens].transpose(1, 2), k, v, score_mod=self._scores(tiles, spec.softcap),
                               block_mask=mask, scale=spec.scale, enable_gqa=spec.group_size > 1)
            out[tiles.tokens[tiles.is_real]] = found.transpose(1, 2)[tiles.is_real]
        return out

    def _block_mask(self, tiles: _Tiles, window: int | None, num_places: int) -> BlockMask:
        size, user = self.block_size, self._mask_mod
        first = torch.zeros_like(tiles.first) if window is None else (tiles.first - window + 1).clamp(min=0) // size
        columns = first[:, None] + torch.arange(tiles.table.shape[1], device=self.device)
        pages = tiles.table.gather(1, columns.clamp(max=tiles.table.shape[1] - 1))
        num_pages = (-(-tiles.ends // size) - first).int()

        def visible(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
            key, in_row = tiles.logical(b, place, size)
            position = tiles.first[b] + query
            seen = in_row & (key <= position)
            if window is not None:
                seen = seen & (position - key < window)
            return seen if user is None else seen & user(tiles.slots[b], h, position, key)

        return BlockMask.from_kv_blocks(
            num_pages[:, None, None], pages[:, None, None].contiguous(), BLOCK_SIZE=(_QUERY_BLOCK, size),
            mask_mod=visible, seq_lengths=(tiles.size, num_places), compute_q_blocks=False)

    def _scores(self, tiles: _Tiles, softcap: float | None) -> Mod | None:
        size, user = self.block_size, self._score_mod
        if softcap is None and user is None:
            return None

        def changed(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, place: torch.Tensor
                    ) -> torch.Tensor:
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            if user is not None:
                key, _ = tiles.logical(b, place, size)
                score = user(score, tiles.slots[b], h, tiles.first[b] + query, key)
            return score

        return changed
