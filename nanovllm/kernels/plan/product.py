"""A matrix product of a layer: what it multiplies by, and what stands around it. Plain data, no torch."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from nanovllm.kernels.plan.config import FP8, INT4, INT8, ITEM_SIZES, KINDS, MXFP4, NVFP4, Gemm


class Choice(NamedTuple):
    """The experts of which a token chooses some."""

    num_experts: int
    top_k: int
    dtype: str
    """Dtype of their weights."""
    for_few: bool = True
    """Whether kernels for a few tokens choose so, and compute what these experts do."""


class Around(NamedTuple):
    """Surroundings of a product, or of a block of a layer."""

    before: str = ""
    """Maker of its rows. "rms": an RMSNorm of the residual stream, which a kernel for few rows may compute itself, or
    which may round them to e4m3; "own rms": one that its block has for it, which such a kernel may compute; "norm": any
    norm, which may round them; "attention", which may round them; "wide attention", which does not; "": anything
    else."""
    after: str = ""
    """Consumer of its result. "gate": silu(gate) * up; "residual": an addition to the residual stream, which kernels
    for few rows may compute themselves; "routing": a choice of experts, by logits in float32; "": anything else."""
    adds_parts: bool = False
    """Whether its consumer adds up sums over parts of K, or the results of a token's experts."""
    rounds: bool = False
    """Whether its result, or that of the activation behind it, may be rounded to e4m3, as the next product takes it."""
    beside: Choice | None = None
    """Experts that take the same rows, and whose kernels for a few tokens compute this shared one too."""

    def first(self, after: str = "", rounds: bool = False) -> "Around":
        """Surroundings of a block's first product, where these are the block's."""
        return self._replace(after=after, adds_parts=False, rounds=rounds)

    def last(self, before: str = "") -> "Around":
        """Surroundings of a block's last product, where these are the block's."""
        return self._replace(before=before)

    @property
    def is_behind_attention(self) -> bool:
        return self.before in ("attention", "wide attention")

    @property
    def is_chained(self) -> bool:
        """Whether kernels for few rows may compute the norm before it, or the addition after it."""
        return self.before == "rms" or self.after == "residual"

    @property
    def apart(self) -> "Around":
        """Surroundings where kernels of their own do so."""
        before, after = "norm" if self.before == "rms" else self.before, "" if self.after == "residual" else self.after
        return self._replace(before=before, after=after)


ANYTHING = Around()
"""Surroundings of a product that leaves nothing to its neighbours."""
SUMMED_AFTER = Around(adds_parts=True)
"""Surroundings of a product whose consumer is a ReduceAddNorm."""


@dataclass(frozen=True)
class Product:
    """x [rows, k] @ weight [n, k]^T on one rank, or the products of a router and its experts."""

    name: str
    """Name within its layer. The part behind the last dot says as which kind it was measured, where it is one of
    config.KINDS."""
    n: int
    """Weight rows, of gate and up both."""
    k: int
    dtype: str
    """Dtype of the weight, by torch's name or one of PACKED."""
    x_dtype: str = "bfloat16"
    around: Around = ANYTHING
    has_bias: bool = False
    """A bias is added right behind it."""
    scale_rows: int | None = None
    """Neighbouring weight rows that share scales, for e4m3 in blocks; None: each row has one."""
    has_static_inputs: bool = False
    """The checkpoint has a scale for all rows of x, which a kernel before does not know."""
    choice: Choice | None = None
    """Experts, of which each has a weight [n, k]; of their router too."""
    is_adapted: bool = False
    """Adapters of rows add to it, so that rows come unrounded."""

    @property
    def kind(self) -> str:
        """Kind of the measurements that serve it, one of config.KINDS."""
        last = self.name.rpartition(".")[2]
        gate, summed = self.around.after == "gate", self.around.adds_parts
        return last if last in KINDS else "gate_up" if gate else "down" if summed else "qkv"

    def gemm(self, world: int) -> Gemm:
        """Key of this product in tables."""
        return Gemm(self.kind, self.n, self.k, self.dtype, world == 1)

    @property
    def is_of_experts(self) -> bool:
        return self.choice is not None and self.around.after != "routing"

    @property
    def apart(self) -> "Product":
        """Product like this one where norms and additions are kernels of their own."""
        return replace(self, around=self.around.apart)

    @property
    def adapted(self) -> "Product":
        """Product like this one in steps where rows have adapters."""
        return replace(self, is_adapted=True)

    @property
    def num_weights(self) -> int:
        """Weights that a token is multiplied by: of experts, those that it chose."""
        return self.n * self.k * (self.choice.top_k if self.choice is not None and self.is_of_experts else 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of one weight [n, k]."""
        halves = {FP8: 2, INT8: 2, INT4: 1, MXFP4: 1, NVFP4: 1}.get(self.dtype, 2 * ITEM_SIZES.get(self.dtype, 8))
        return self.n * self.k * halves // 2
