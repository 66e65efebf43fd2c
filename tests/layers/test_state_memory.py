"""Memory that layers of several kinds share on one rank: each has its own, and blocks are copied in all of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.kernels import select_kernels
from nanovllm.layers.memory import Pages, Slot, pages_of
from nanovllm.runner.state_layout import layout_of, one_group
from nanovllm.runner.state_memory import StateMemory
from nanovllm.wire.step import SlotConstants, SlotRecord, pack_step

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 5, 16
CONFIG = EngineConfig("model", kvcache_block_size=BLOCK_SIZE, max_num_seqs=3, max_num_batched_tokens=16)


class Mixer:
    """Keeps what it is given."""

    can_capture = True

    def __init__(self, *memory: Pages | Slot) -> None:
        self.memory = memory

    def bind(self, *memory: Any) -> None:
        self.bound = memory


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_each_tensor_is_its_own(dtype: torch.dtype, token_major: bool) -> None:
    """Keys and values of one width or of two, values that are keys, a mixer with pages of two kinds, and slots."""
    mixers = [
        Mixer(Pages(2, (8, 8))), Mixer(Pages(3, (8, 4)), Slot((3, 5))), Mixer(Pages(1, (12,))),
        Mixer(Pages(1, (12,)), Pages(1, (4,))), Mixer(Slot((2,), torch.bfloat16)),
    ]  # fmt: skip
    layout = one_group(pages_of(mixers))
    memory = StateMemory(CONFIG, mixers, layout, dtype, CPU, select_kernels(CPU), token_major)
    memory.allocate(memory.size(NUM_BLOCKS))
    caches = [one for mixer in mixers for one in mixer.bound if not isinstance(one, torch.Tensor)]
    parts = [tensor for cache in caches for tensor in cache.tensors]
    slots = [one for mixer in mixers for one in mixer.bound if isinstance(one, torch.Tensor)]
    assert sum(part.nbytes for part in parts) == NUM_BLOCKS * memory.block_bytes
    assert sum(part.nbytes for part in slots) <= memory.fixed_bytes
    for number, part in enumerate([*parts, *slots]):
        part[:] = number + 1
    for number, part in enumerate([*parts, *slots]):
        assert (part.float() == number + 1).all()
    for cache, pages in zip(caches, pages_of(mixers), strict=True):
        shape = (NUM_BLOCKS, pages.heads, BLOCK_SIZE)
        assert cache.k.shape == (*shape, pages.widths[0]) and cache.v.shape == (*shape, pages.widths[-1])
        assert (cache.v is cache.k) == (len(pages.widths) == 1)


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_tables_of_each_group_cut_a_block_in_their_own_way(dtype: torch.dtype, token_major: bool) -> None:
    """A block belongs to one table: what others' blocks hold stays as it is, and a copy takes all of a block along."""
    kinds = Pages(2, (16, 16), takes_fp8=True), Pages(3, (8, 8), 20, takes_fp8=True)
    mixers = [Mixer(kinds[number in (0, 1, 3)]) for number in range(5)]
    config = replace(CONFIG, max_model_len=4096, kv_cache_dtype="fp8" if dtype.itemsize == 1 else "auto")
    layout = layout_of(pages_of(mixers), config, dtype)
    assert layout.is_mixed and len(layout.groups) == 2
    memory = StateMemory(config, mixers, layout, dtype, CPU, select_kernels(CPU), token_major)
    memory.allocate(memory.size(2 * NUM_BLOCKS))
    caches = [mixer.bound[0] for mixer in mixers]
    for number, cache in enumerate(caches):
        for tensor in cache.tensors:
            assert tensor.shape[:3] == (2 * NUM_BLOCKS, kinds[number in (0, 1, 3)].heads, BLOCK_SIZE)
            tensor[2 * cache.table] = 1 + number
    packed = pack_step(
        3, slots=[0], starts=[0], counts=[1], num_decode_rows=0, num_sample_rows=1, num_tokens=1, block_updates=[],
        slot_records=[], token_ids=[5], block_copies=list(range(2 * layout.num_tables)),
    )  # fmt: skip
    memory.begin(torch.from_numpy(packed.copy()), packed)
    for number, cache in enumerate(caches):
        for tensor in cache.tensors:
            assert (tensor[2 * cache.table : 2 * cache.table + 2].float() == 1 + number).all()


def test_pages_that_their_mixer_cannot_keep_in_e4m3_are_refused() -> None:
    wide, both = Pages(2, (8, 8)), Pages(2, (8, 8), takes_fp8=True)
    config = EngineConfig("m", kv_cache_dtype="fp8", max_model_len=64, kvcache_block_size=16)
    assert layout_of([both, both], config, torch.float8_e4m3fn).num_tables
    with pytest.raises(ValueError, match=r"^kv_cache_dtype='fp8': must be 'auto' with a mixer whose Pages"):
        layout_of([both, wide], config, torch.float8_e4m3fn)


SPECULATIVE = replace(CONFIG, speculative_config={"method": "ngram", "num_speculative_tokens": 3})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_where_drafts_are_looked_up_each_block_has_the_ids_of_its_tokens(dtype: torch.dtype) -> None:
    """They are copied with it, and take no memory of others."""
    mixers = [Mixer(Pages(3, (8, 4)), Pages(1, (12,)))]
    memory = StateMemory(SPECULATIVE, mixers, one_group(pages_of(mixers)), dtype, CPU, select_kernels(CPU))
    memory.allocate(memory.size(NUM_BLOCKS))
    parts = [tensor for cache in mixers[0].bound for tensor in cache.tensors]
    assert memory.ids is not None and memory.ids.shape == (NUM_BLOCKS, BLOCK_SIZE)
    assert sum(part.nbytes for part in [*parts, memory.ids]) == NUM_BLOCKS * memory.block_bytes
    memory.ids[:] = torch.arange(NUM_BLOCKS * BLOCK_SIZE).view(NUM_BLOCKS, BLOCK_SIZE)
    for part in parts:
        part[:] = 1
    packed = pack_step(
        3, slots=[0], starts=[0], counts=[1], num_decode_rows=0, num_sample_rows=1, num_tokens=1, block_updates=[],
        slot_records=[], token_ids=[5], block_copies=[1, 3],
    )
    memory.begin(torch.from_numpy(packed.copy()), packed)
    first = [16 * block for block in (0, 1, 2, 1, 4)]
    assert memory.ids.tolist() == [[*range(begin, begin + BLOCK_SIZE)] for begin in first]


def test_with_drafts_there_is_room_for_the_state_after_each_place_of_a_step() -> None:
    mixers = [Mixer(Pages(2, (8, 8))), Mixer(Slot((3, 5)))]
    lines = []
    for config in (CONFIG, SPECULATIVE):
        memory = StateMemory(config, mixers, one_group(pages_of(mixers)), torch.float32, CPU, select_kernels(CPU))
        memory.allocate(memory.size(NUM_BLOCKS)._replace(num_lines=4))
        assert memory.fixed_bytes == memory.slot_bytes * mixers[1].bound[0].shape[0]
        lines.append(mixers[1].bound[0].shape[0])
    assert lines == [5, 5 + SPECULATIVE.most_places]


def test_a_step_begins_with_copied_blocks() -> None:
    """In all tensors of a block. States are left alone: rows are told to begin with zeros."""
    mixers = [Mixer(Pages(2, (8, 8))), Mixer(Pages(1, (12,)), Slot((3,)))]
    memory = StateMemory(CONFIG, mixers, one_group(pages_of(mixers)), torch.float8_e4m3fn, CPU, select_kernels(CPU))
    memory.allocate(memory.size(NUM_BLOCKS))
    parts = [tensor for mixer in mixers for tensor in mixer.bound[0].tensors]
    for part in parts:
        part[1] = 7
    [slots] = [one for one in mixers[1].bound if isinstance(one, torch.Tensor)]
    slots[:] = 5
    packed = pack_step(
        3, slots=[1], starts=[0], counts=[1], num_decode_rows=0, num_sample_rows=1, num_tokens=1, block_updates=[],
        slot_records=[SlotRecord(1, SlotConstants(0.0, 0), 9, 0)], token_ids=[9], block_copies=[1, 3, 3, 4],
    )  # fmt: skip
    memory.begin(torch.from_numpy(packed), packed)
    assert (slots == 5).all()
    for part in parts:
        assert [bool((part[block].float() == 7).all()) for block in range(NUM_BLOCKS)] == [0, 1, 0, 1, 1]
