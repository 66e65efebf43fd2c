"""Blocks of the KV cache are copied whole, in all tensors, one after another."""

import torch

from nanovllm.kernels.step.blocks import BlockTensors, copy_blocks, copy_blocks_reference


def test_copies_happen_one_after_another(device: torch.device) -> None:
    """Among tensors of any type and size; a block that was read may be overwritten, one that was written may be
    read."""
    shapes = [(6, 2, 16, 20), (6, 1, 16, 8), (6, 2, 2)]
    dtypes = (torch.bfloat16, torch.float32)
    tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes for dtype in dtypes]
    tensors.append(torch.randn(6, 16, 3, 12, device=device).transpose(1, 2))  # heads within a token
    mine, theirs = ([tensor.clone(memory_format=torch.preserve_format) for tensor in tensors] for _ in range(2))
    pairs = torch.tensor([0, 3, 3, 1, 2, 0, 5, 5], dtype=torch.int32, device=device)
    copy_blocks(pairs, BlockTensors.of(mine))
    copy_blocks_reference(pairs, BlockTensors.of(theirs))
    for tensor, copied, expected in zip(tensors, mine, theirs, strict=True):
        assert copied.equal(expected)
        assert copied.equal(tensor[[2, 0, 2, 0, 4, 5]])
