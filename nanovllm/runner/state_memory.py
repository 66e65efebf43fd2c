"""Memory that the layers of one rank need for rows: its size, and its life from the first step to the last."""

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from nanovllm.attention.base import KVCache
from nanovllm.config import EngineConfig
from nanovllm.errors import refuse
from nanovllm.kernels import Kernels
from nanovllm.kernels.step.blocks import BlockTensors
from nanovllm.layers.memory import Mixer, Pages, Slot, slots_of
from nanovllm.runner.memory_probe import GIB, MIB
from nanovllm.runner.sleep import SleepableMemory
from nanovllm.runner.state_layout import StateLayout
from nanovllm.wire.state import StateSize
from nanovllm.wire.step import block_copies

_SCALE = torch.bfloat16
_KV_CACHE = "kv_cache"
_ALIGNMENT = 256


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", MIB)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.3f} {unit}"
    return f"{num_bytes} bytes"


def num_blocks(
    budget_bytes: int, bytes_per_block: int, least: int, asked: int | None, option: str, because: str = "",
    slots: int = 0,
) -> int:  # fmt: skip
    """Blocks that a rank allocates of a budget, found or predicted: the `asked` ones (num_kvcache_blocks), or without
    it all that fit beside `slots`, the bytes of memory of fixed size of all rows. Raises ValueError where there is no
    room for the `least`, with one for each table of a row, naming `option` (written out with its value) and `because`
    of what the budget is so small; and where so many as are asked for are too few, or do not fit."""
    fits = (budget_bytes - slots) // max(1, bytes_per_block)  # no bytes: nothing is kept by token
    if fits < least:
        parts = "one block" if least == 1 else f"{least} blocks"
        if slots:
            parts = f"{_size(slots)} in states of fixed size" + (f", {parts}" if bytes_per_block else "")
        needed = f"{_size(slots + least * bytes_per_block)} ({parts})"
        raise ValueError(
            f"{option}: leaves {_size(budget_bytes)} for the KV cache, must leave at least {needed}"
            f"{because and f': {because}'}"
        )
    if asked is None:
        return int(fits)
    if asked > fits:
        refuse("num_kvcache_blocks", asked, f"at most the {fits} that fit")
    if asked < least:
        refuse("num_kvcache_blocks", asked, f"at least {least}, one for each table of a row")
    return asked


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def slot_bytes(mixers: Iterable[Mixer]) -> int:
    """Bytes of one slot of these, in which each tensor begins as torch aligns what it allocates."""
    return sum(_aligned(one.nbytes) for one in slots_of(mixers))


def spare_lines(config: EngineConfig) -> int:
    """Number of lines beside those of rows, in which decodes leave the state after each of several places."""
    return config.most_places if config.tokens_per_step > 1 else 0


def lines_for(config: EngineConfig, room: int, line_bytes: int, has_pages: bool) -> int:
    """Lines of memory of fixed size, without the one for rows of padding: those that were asked for, or for all rows
    and half as many kept states, as far as they leave 60 % of `room` bytes to blocks (has_pages: if there are any)."""
    if config.num_state_lines is not None or not line_bytes:
        return config.num_state_lines or 0
    wanted = config.max_num_seqs * 3 // 2 if config.enable_prefix_caching else config.max_num_seqs
    return max(1, min(wanted, room * (2 if has_pages else 5) // 5 // line_bytes - 1))


class StateMemory:
    """Owner of the layers' memory on one rank."""

    def __init__(
        self, config: EngineConfig, mixers: Sequence[Mixer], layout: StateLayout, dtype: torch.dtype,
        device: torch.device, kernels: Kernels, token_major: bool = False, sleepable: SleepableMemory | None = None,
    ) -> None:  # fmt: skip
        """layout: of all Pages that the mixers declare, in order. dtype: of keys and values. token_major: see
        AttentionBackend. sleepable: where memory is to come from that can sleep."""
        assert config.kvcache_block_size
        self._mixers, self.layout, self._block_size, self._dtype = mixers, layout, config.kvcache_block_size, dtype
        self._device, self._kernels, self._token_major, self._sleepable = device, kernels, token_major, sleepable
        self._blocks: BlockTensors | None = None
        self.slot_bytes = slot_bytes(mixers)
        """Bytes of one slot."""
        self._num_spare = spare_lines(config) if self.slot_bytes else 0
        self._config, self.num_lines = config, 1 if self.slot_bytes else 0
        """Number of lines; one more is for rows of padding, and behind it are the spare ones."""
        self._lines = torch.empty(0, self.slot_bytes, dtype=torch.uint8, device=device)
        self._id_bytes = torch.int32.itemsize if config.looks_up else 0
        self.ids: torch.Tensor | None = None
        """int32 [blocks, block size], where drafts are looked up: ids of the tokens in each block."""

    @property
    def fixed_bytes(self) -> int:
        """Bytes beside the blocks."""
        return (self.num_lines + 1 + self._num_spare) * self.slot_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, of whatever table."""
        return self._block_size * (self.layout.token_bytes(self._dtype) + self._id_bytes)

    def describe(self) -> list[dict[str, int | None]]:
        """Entries of engine_info, one for each group."""
        layout = self.layout
        return [
            {
                "window": group.window, "layers": layers, "tables": group.num_tables,
                "token_bytes": group.num_tables * layout.token_bytes(self._dtype), "block_bytes": self.block_bytes,
            }
            for group, layers in zip(layout.groups, layout.group_layers, strict=True)
        ]  # fmt: skip

    def choose_lines(self, room: int) -> None:
        """Sets the number of lines for `room` bytes of blocks and lines."""
        room -= self._num_spare * self.slot_bytes
        self.num_lines = lines_for(self._config, room, self.slot_bytes, bool(self.block_bytes))

    def size(self, num_blocks: int) -> StateSize:
        """Size of this memory with so many blocks."""
        return StateSize(num_blocks, self._block_size, self.layout.groups, self.slot_bytes, self.num_lines)

    def allocate(self, size: StateSize) -> None:
        """Allocates blocks and slots, and gives each layer its part of them.

        Zeros, because attention kernels load a row's whole last block and mask afterwards: what was never written must
        be finite.
        """
        self.num_lines = size.num_lines
        nbytes = self.fixed_bytes + size.num_blocks * self.block_bytes
        if self._sleepable is not None:
            memory = self._sleepable.take(_KV_CACHE, nbytes)
        elif self._device.type == "cpu":  # private pages are zero, and there once they are written
            memory = torch.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE), dtype=torch.uint8)
        else:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        self._bind(memory, size.num_blocks, size.num_lines + 1 + self._num_spare)

    def release(self) -> None:
        """Lets go of all memory; memory that can sleep goes when it is taken anew, or with `free`."""
        self._bind(torch.empty(0, dtype=torch.uint8, device=self._device), 0, 0)

    def free(self) -> None:
        """Frees all memory, for good."""
        self.release()
        if self._sleepable is not None:
            self._sleepable.free(_KV_CACHE)

    def begin(self, step: torch.Tensor, packed: np.ndarray) -> None:
        """Copies the blocks of a step, int32 words as `step` on the device and as `packed` on the host: before all
        else, and outside of graphs, as most steps copy none."""
        if self._blocks is not None and (where := block_copies(packed)) is not None:
            self._kernels.copy_blocks(step[where], self._blocks)

    def _bind(self, memory: torch.Tensor, num_blocks: int, num_lines: int) -> None:
        ids_begin = memory.shape[0] - num_blocks * self._block_size * self._id_bytes
        slots, blocks, ids = memory.tensor_split((num_lines * self.slot_bytes, ids_begin))
        self._lines, end = slots.view(num_lines, self.slot_bytes), 0
        layout, by_layer = self.layout, iter(self.layout.by_layer)
        # block by block where tables of several groups cut one otherwise; else tensor by tensor, as kernels like it
        cut = blocks.view(num_blocks, -1) if layout.is_mixed and num_blocks else blocks[None]
        lanes = [self._lanes(cut, pages, num_blocks) for pages in layout.lanes]
        of_tables = [lanes[group] for group in layout.table_groups]
        for mixer in self._mixers:
            bound: list[KVCache | torch.Tensor] = []
            for one in mixer.memory:
                if isinstance(one, Slot):
                    begin, end = end, end + _aligned(one.nbytes)
                    line = self._lines[:, begin : begin + one.nbytes]
                    bound.append(line.view(one.dtype).view(num_lines, *one.shape))
                else:
                    table, lane = next(by_layer)
                    bound.append(replace(of_tables[table][lane], table=table, mixed=layout.is_mixed))
            mixer.bind(*bound)
        parts = [cut] if layout.is_mixed else [part for lane in lanes[0] for part in lane.tensors]
        if self._id_bytes:
            self.ids = ids.view(torch.int32).view(num_blocks, self._block_size)
            parts.append(self.ids)
        self._blocks = BlockTensors.of(parts) if num_blocks and parts else None

    def _lanes(self, memory: torch.Tensor, lanes: Sequence[Pages], num_blocks: int) -> list[KVCache]:
        """`memory`, uint8 [pieces, bytes] whose pieces hold as many blocks each, cut into lanes: in a piece all keys
        and values come first, then all scales."""
        size, dtype, each = self._block_size, self._dtype, num_blocks // len(memory)
        elements = sum(each * size * pages.heads * sum(pages.widths) for pages in lanes)
        values, scales = memory.tensor_split((elements * dtype.itemsize,), 1)
        found = []
        for pages in lanes:
            tensors, count = [], each * size * pages.heads
            for width in pages.widths:
                part, values = values.tensor_split((count * width * dtype.itemsize,), 1)
                shape = (size, pages.heads) if self._token_major else (pages.heads, size)
                tensor = part.view(dtype).unflatten(1, (each, *shape, width)).flatten(0, 1)
                tensors.append(tensor.transpose(1, 2) if self._token_major else tensor)
            lane = KVCache(tensors[0], tensors[-1])
            if dtype == torch.float8_e4m3fn:
                part, scales = scales.tensor_split((2 * count * _SCALE.itemsize,), 1)
                lane = replace(lane, scales=part.view(_SCALE).unflatten(1, (each, pages.heads, size, 2)).flatten(0, 1))
            found.append(lane)
        return found
