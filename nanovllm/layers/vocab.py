"""Embedding and output head, each rank holding a range of the vocabulary.

A vocabulary that the ranks do not divide is padded at its end; padded rows are zero and are never sampled.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from nanovllm.layers.context import LayerContext
from nanovllm.layers.linear import ParallelLinear
from nanovllm.layers.step import OUTSIDE
from nanovllm.layers.weights import Cut, Piece
from nanovllm.model_config import Quantization

_ALIGNMENT = 16
"""Rows of a rank: keeps the head's GEMM on the fast tile sizes. Kernels add up a row of logits in another order where
rows begin elsewhere, so where no bit may depend on the ranks, one has as many."""


class VocabParallelEmbedding(ParallelLinear):
    """Table of this rank's token ids; also the weight of a tied output head.

    embed: token ids [T] -> [T, hidden], a partial sum (zero for ids of other ranks).
    logits: hidden [B, hidden] -> [B, rows of this rank], for ids vocab_start, vocab_start + 1, ...
    """

    def __init__(
        self, context: LayerContext, vocab_size: int, hidden_size: int, precision: Quantization | None = None
    ) -> None:
        """precision: of a head's weight; None, as an embedding's is: the context's dtype."""
        group = context.group
        rows = -(-vocab_size // group.size)
        rows = -(-rows // _ALIGNMENT) * _ALIGNMENT if group.size > 1 or group.exact_bits == "tp" else rows
        start = rows * group.rank
        valid = max(0, min(rows, vocab_size - start))
        cuts = (Cut(0, 0, start, valid),) if valid else ()
        pieces = [Piece("", (vocab_size, hidden_size), cuts)]
        context = replace(context, adapters=None)  # of layers alone
        super().__init__(context, "head", rows, hidden_size, pieces=pieces, precision=precision)
        self.group_size, self.kernels = group.size, context.kernels
        self.vocab_start, self.num_valid = start, valid

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [T] -> [T, hidden], a partial sum: rows of ids that other ranks hold are zeros."""
        if self.group_size == 1:
            return F.embedding(token_ids, self.weight)
        return self.kernels.embed_shard(token_ids, self.weight, self.vocab_start, self.num_valid)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, ids of this rank]."""
        return self(hidden, OUTSIDE)
