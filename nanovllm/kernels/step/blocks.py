"""Blocks of the KV cache copied on the device, in all layers at once."""

from dataclasses import dataclass

import torch

from nanovllm.kernels.base.triton_import import tl, triton


@dataclass(frozen=True)
class BlockTensors:
    """Tensors of the KV cache's blocks on one rank."""

    tensors: list[torch.Tensor]
    """[num_blocks, ...] each; what one block has of it is contiguous, and whole int32 words."""
    table: torch.Tensor
    """int64 [tensors, 2] on the device: the address of each, and int32 words of one block of it."""

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> "BlockTensors":
        entries = [(tensor.data_ptr(), tensor.stride(0) * tensor.element_size() // 4) for tensor in tensors]
        assert all(tensor.stride(0) * tensor.element_size() % 4 == 0 for tensor in tensors)
        assert all(tensor[0].numel() == tensor.stride(0) for tensor in tensors if tensor.shape[0] > 1)
        return cls(tensors, torch.tensor(entries, dtype=torch.int64, device=tensors[0].device))


@triton.jit(do_not_specialize=["num_copies"])
def _copy_blocks_kernel(PAIRS, TABLE, num_copies, BLOCK: tl.constexpr):
    """Copies block PAIRS[i, 0] to PAIRS[i, 1], int32 [num_copies, 2], in each tensor of TABLE int64 [tensors, 2] of
    BlockTensors: the tensor `program_id(0)`; the programs along axis 1 share its words. Each word is copied by one
    thread, so that a block may be overwritten after it was read."""
    entry = TABLE + tl.program_id(0) * 2
    base = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int32)), 4)
    num_words = tl.load(entry + 1)
    for copy in range(num_copies):
        source = base + tl.load(PAIRS + copy * 2).to(tl.int64) * num_words
        destination = base + tl.load(PAIRS + copy * 2 + 1).to(tl.int64) * num_words
        first = tl.program_id(1) * BLOCK
        while first < num_words:
            word = first + tl.arange(0, BLOCK)
            tl.store(destination + word, tl.load(source + word, mask=word < num_words), mask=word < num_words)
            first += tl.num_programs(1) * BLOCK


def copy_blocks(pairs: torch.Tensor, blocks: BlockTensors) -> None:
    """pairs: int32 [2 C], (source, destination) by (source, destination); copied in this order."""
    _copy_blocks_kernel[(len(blocks.tensors), 32)](pairs, blocks.table, pairs.shape[0] // 2, BLOCK=1024, num_warps=4)


def copy_blocks_reference(pairs: torch.Tensor, blocks: BlockTensors) -> None:
    """Plain twin of `copy_blocks`."""
    for source, destination in pairs.view(-1, 2).tolist():
        for tensor in blocks.tensors:
            tensor[destination] = tensor[source].clone()
