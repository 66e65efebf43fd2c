"""Embedding and output head, each rank holding a range of the vocabulary.

A vocabulary that the ranks do not divide is padded at its end; padded rows are zero and are never sampled.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from nanovllm.kernels import Kernels
from nanovllm.layers.linear import ParallelLinear
from nanovllm.layers.weights import CheckpointWeight, Shard
from nanovllm.parallel.group import TensorParallelGroup

_ALIGNMENT = 16  # rows of a rank; keeps the head's GEMM on the fast tile sizes


class VocabParallelEmbedding(ParallelLinear):
    """Table of this rank's token ids; also the weight of a tied output head.

    embed: token ids [T] -> [T, hidden], a partial sum (zero for ids of other ranks).
    logits: hidden [B, hidden] -> [B, rows of this rank], for ids vocab_start, vocab_start + 1, ...
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, group: TensorParallelGroup, kernels: Kernels, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        rows = -(-vocab_size // group.size)
        rows = -(-rows // _ALIGNMENT) * _ALIGNMENT if group.size > 1 else rows
        super().__init__("head", rows, hidden_size, dtype, device)
        self.vocab_size = vocab_size
        self.group_size = group.size
        self.kernels = kernels
        self.vocab_start = rows * group.rank
        self.num_valid = max(0, min(rows, vocab_size - self.vocab_start))
        self.weight[self.num_valid :].zero_()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.group_size == 1:
            return F.embedding(token_ids, self.weight)
        return self.kernels.embed_shard(token_ids, self.weight, self.vocab_start, self.num_valid)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self(hidden)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        shape = (self.vocab_size, self.weight.shape[1])
        shards = (Shard(self.weight[: self.num_valid], 0, self.vocab_start),) if self.num_valid else ()
        yield CheckpointWeight(f"{prefix}.weight", shape, shards)
