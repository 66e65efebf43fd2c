"""Kernel plan: which kernel runs for every operation of a layer, with which numbers, what is fused into it, and why not
otherwise.

`plan` is pure: the operations of a layer, a number of rows, and Rules (the device, the ranks, what was measured). All
ranks must hold the same Rules: ranks that multiplied differently would round differently.

Fusion is local. A kernel for few rows may compute the norm before its product, the activation after it and the
addition to the residual stream, and what is between two products is not looked into. Where some product of a layer does
so, the layer hands on a complete residual stream; else it hands on what is to be added, and the norm that follows adds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.kernels.plan.config import (
    FP8,
    INT4,
    INT4_ROWS,
    ITEM_SIZES,
    LIBRARY,
    STREAM_ROWS,
    TILE_ROWS,
    Choices,
    ExpertConfigs,
    Gemm,
    GemmConfig,
    Ranges,
)
from nanovllm.kernels.plan.device import CPU, Device
from nanovllm.kernels.plan.fits import why_not
from nanovllm.kernels.plan.order import fixed_ranges, leaves_of, without_library
from nanovllm.kernels.plan.rules import (
    FEW_ROUTER,
    FEW_TOKENS,
    FP8_MANY_ROWS,
    expert_configs,
    fallback,
    int4_config,
    merges_before,
    router_config,
)
from nanovllm.kernels.plan.table import EMPTY, GemmTable


@dataclass(frozen=True)
class Product:
    """x [rows, k] @ weight [n, k]^T on one rank, and what may stand around it."""

    kind: str
    """Kind of the product, of config.KINDS; n of gate_up counts both."""
    n: int
    k: int
    dtype: str
    """Dtype of the weight, by torch's name or INT4."""
    x_dtype: str = "bfloat16"
    before: str = ""
    """"norm": an RMSNorm of a row of the residual stream, and nothing else; "attention": attention, which may round its
    result to e4m3; "": anything, by kernels of its own."""
    after: str = ""
    """"gate": silu(gate) * up; "residual": an addition to the residual stream; "": anything."""
    adds_parts: bool = False
    """Whether its consumer adds up sums over parts of K."""
    has_bias: bool = False
    """A bias is added right behind it."""
    rounds: bool = False
    """Whether its result may be rounded to e4m3, since the next product takes it so."""
    scale_rows: int | None = None
    """Neighbouring weight rows that share scales, for e4m3 in blocks; None: each row has one."""

    def gemm(self, world: int) -> Gemm:
        """Key of this product in tables."""
        return Gemm(self.kind, self.n, self.k, self.dtype, world == 1)

    @property
    def num_weights(self) -> int:
        """Weights that a token is multiplied by."""
        return self.n * self.k

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight."""
        return self.n * self.k * {FP8: 2, INT4: 1}.get(self.dtype, 2 * ITEM_SIZES.get(self.dtype, 8)) // 2


@dataclass(frozen=True)
class Experts:
    """A mixture of experts on one rank: router, gate and up, down."""

    num_experts: int
    top_k: int
    hidden: int
    width: int
    """Width of this rank's part of an expert."""
    dtype: str
    x_dtype: str = "bfloat16"
    is_plain_mixture: bool = True
    """A softmax over all experts without biases, and the sum of the chosen ones."""
    after: str = ""
    """"residual": kernels for a few tokens may compute the norm before and the addition after."""
    is_summed_later: bool = False
    """The consumer can add up the experts of a token."""

    kind = "experts"

    @property
    def num_weights(self) -> int:
        """Weights that a token is multiplied by: those of its experts."""
        return 3 * self.top_k * self.width * self.hidden


Operation = Product | Experts
"""Operation that a plan has an entry for."""


@dataclass(frozen=True)
class Launch:
    """Kernel for a Product. norm, gate, residual: whether it computes these too."""

    config: GemmConfig
    norm: bool = False
    gate: bool = False
    residual: bool = False
    rounded: bool = False
    """Attention rounds the rows to e4m3 where it merges their chunks."""
    is_early: bool = False
    """Whether it lets the next kernel start before it ends (PDL), and that gains time."""
    why: str = ""
    """Source of the choice, and what kept another kernel away."""


@dataclass(frozen=True)
class ExpertsLaunch:
    """Kernels for Experts."""

    router: GemmConfig
    tiles: ExpertConfigs | None
    """Tiles of both grouped GEMMs; None: two kernels read each token's experts (moe/few_rows.py,
    fp8/few_experts.py)."""
    norm: bool = False
    residual: bool = False
    is_early = False
    rounds_parts: bool = False
    """A token's results are rounded before they are added up."""
    why: str = ""


@dataclass(frozen=True)
class LayerPlan:
    """Kernels of one layer."""

    launches: dict[str, Launch | ExpertsLaunch]
    """Launches by the operation's kind."""
    is_complete: bool = False
    """The layer takes and hands on a complete residual stream; else what is to be added goes to the next norm."""
    merge_first: bool = False
    """Attention's chunks are merged before the output projection begins to fetch its weight."""
    is_chain: bool = False
    """Kernels for one row, none of which waits for all of the one before it: all should divide memory alike."""
    fills_registers: bool = False
    """Weights in FP8 pass through L1 into registers, to which attention should leave it."""
    why: str = ""
    """Reason why norms and additions are separate kernels."""

    def takes_norm(self, operations: Sequence["Operation"]) -> bool:
        """The first of these operations of the layer computes the norm before it."""
        return bool(operations) and self.launches[operations[0].kind].norm

    def is_early(self, operations: Sequence["Operation"]) -> bool:
        """See Launch; of the operation that yields the result of these."""
        if not operations or isinstance(operations[0], Experts):
            return False
        return self.launches[operations[-1].kind].is_early


@dataclass(frozen=True)
class Rules:
    """Inputs of a plan beside an operation and its rows. Plain data, which rank 0 sends to the others."""

    device: Device = CPU
    world: int = 1
    """Number of ranks."""
    exact_bits: str | None = None
    """See EngineConfig."""
    own_kernels: bool = False
    """Kernels of our own may multiply; else the library."""
    is_fused: bool = True
    """Triton's kernels run, not their twins."""
    table: GemmTable = EMPTY
    tried: Choices = field(default_factory=dict)
    """Choices that overrule the table, for trials (scripts/tune_steps.py)."""
    unordered: frozenset[Gemm] = frozenset()
    """GEMMs for which the library's order of sums was found to vary; with exact_bits."""


def plan(operations: Sequence[Operation], rows: int, rules: Rules) -> LayerPlan:
    """Plans a layer of these operations for so many rows."""
    launches: dict[str, Launch | ExpertsLaunch] = {
        one.kind: launch(one, rows, rules) for one in operations if isinstance(one, Product)
    }
    experts = [one for one in operations if isinstance(one, Experts)]
    complete = any(each.norm or each.residual for each in launches.values())
    complete &= all(one.after == "residual" and rows <= (1 if one.dtype == FP8 else FEW_TOKENS) for one in experts)
    launches |= {one.kind: experts_launch(one, rows, rules, complete) for one in experts}
    why = "" if complete else _why_apart(operations, rules)
    o = next((one for one in operations if one.kind == "o"), None)
    if not isinstance(o, Product):
        return LayerPlan(launches, complete, why=why)
    skinny = launches["o"].config.is_skinny  # type: ignore[union-attr]
    merge_first, is_fp8 = skinny and merges_before(rows, o.num_bytes), o.dtype == FP8
    chain = complete and rows == 1 and not merge_first and not is_fp8
    return LayerPlan(launches, complete, merge_first, chain, skinny and is_fp8, why)


def launch(product: Product, rows: int, rules: Rules) -> Launch:
    """Chooses the kernel of a product for so many rows."""
    config, why = choose(product, rows, rules)
    inside = config.is_skinny and rules.world == 1
    gate = product.after == "gate" and config.is_our_kernel and not product.has_bias
    gate &= product.rounds or config.kernel != "roles"  # which rounds
    norm = config.is_skinny and _norm_inside(product, rules)
    norm &= product.dtype != FP8 or rows == 1  # more rows are rounded by the norm's own kernel
    residual, is_early = inside and product.after == "residual", config.is_our_kernel and rules.exact_bits is None
    rounded = product.before == "attention" and config.kernel == "stream"
    if config == LIBRARY:
        config = _by_library(product, rows, rules.device)
    return Launch(config, norm, gate, residual, rounded, is_early, why)


def choose(product: Product, rows: int, rules: Rules) -> tuple[GemmConfig, str]:
    """Chooses a kernel, and says why: the one on trial, else the measured one, else a rule's; the library if there is
    none."""
    gemm = product.gemm(rules.world)
    if rules.exact_bits is not None:
        config = next(config for most, config in fixed_order(product, rules) if rows <= most)
        return config, f"exact_bits={rules.exact_bits!r}"
    if (tried := rules.tried.get(gemm, {}).get(rows)) is not None:
        config, why = tried, "tried"
    elif not rules.own_kernels:
        config, why = LIBRARY, "our kernels are off" if rules.device.is_cuda else "a CPU"
    elif (measured := rules.table.at(gemm, rows)) is not None:
        config, why = measured, "measured"
    else:
        config, why = fallback(gemm, rows, rules.device.processors), "rule"
        if rows > 1 and config.kernel == "stream" and _refusal(product, rows, config, rules):
            config = fallback(gemm, STREAM_ROWS + 1, rules.device.processors)  # tiles take any scales
    if reason := _refusal(product, rows, config, rules):
        config, why = LIBRARY, f"{why}: {reason}"
    return config, why


def _refusal(product: Product, rows: int, config: GemmConfig, rules: Rules) -> str:
    """Reason why so many rows cannot be multiplied so; "" where they can."""
    device = rules.device
    if config.parts > 1 and not product.adds_parts:
        return f"its consumer adds up no parts of a sum, {config.kernel!r} makes {config.parts}"
    if product.dtype == FP8 and device.is_cuda and not device.has_tma and config != LIBRARY:
        return f"e4m3 is multiplied on compute capability 9.x and 10.x alone, not {device.capability}"
    if config.kernel == "stream":
        if product.dtype == INT4 and product.x_dtype == "float32":
            return "4-bit weights of one row take 16-bit numbers, not float32"
        if product.scale_rows is not None and product.scale_rows % 16:
            return f"{product.scale_rows} weight rows share scales, not 16"
        if product.scale_rows is not None and product.n % (32 if product.after == "gate" else 16):
            return f"{product.n} weight rows are no whole 16s that share scales"
    if config.kernel == "roles":
        if not device.has_roles:
            return f"kernels with roles run on compute capability 9.0, not {device.capability}"
        if product.scale_rows is not None and product.scale_rows % config.block_n:
            return f"{product.scale_rows} weight rows share scales, a tile has {config.block_n}"
    return why_not(product.gemm(rules.world), config, device.has_tma, rows if _norm_inside(product, rules) else 0)


def _norm_inside(product: Product, rules: Rules) -> bool:
    """Whether a skinny kernel would compute the norm before this product."""
    return rules.world == 1 and product.before == "norm" and not product.has_bias


def _by_library(product: Product, rows: int, device: Device) -> GemmConfig:
    """Library call for the type of the weight, or what replaces it where the library cannot."""
    if product.dtype == FP8:
        if not device.is_cuda:
            return GemmConfig("twin")
        if not device.has_tma:
            return GemmConfig("widened")
        # cuBLAS asks for sizes of whole 16 bytes, and for such lines of blocks' scales
        fits = product.n % 16 == 0 and product.k % 16 == 0
        fits &= product.scale_rows != 128 or -(-product.k // 128) % 4 == 0
        return GemmConfig("scaled") if fits and device.scaled_library else FP8_MANY_ROWS
    if product.dtype == INT4:
        if device.is_cuda and rows <= INT4_ROWS:
            return int4_config(product.gemm(1)._replace(kind=""), rows, device.processors)
        return GemmConfig("widened")
    return LIBRARY


def fixed_order(product: Product, rules: Rules) -> Ranges:
    """Kernels for all numbers of rows with exact_bits."""
    gemm = product.gemm(rules.world)
    leaves = leaves_of(gemm.k * rules.world) // rules.world if rules.exact_bits == "tp" else 0
    ranges = fixed_ranges(gemm, rules.table, product.adds_parts, leaves, not rules.device.is_cuda)
    return without_library(ranges, gemm.k) if gemm in rules.unordered else ranges


def experts_launch(experts: Experts, rows: int, rules: Rules, is_complete: bool = False) -> ExpertsLaunch:
    """Chooses the kernels of a mixture of experts for so many tokens. is_complete: see LayerPlan."""
    if is_complete and experts.after == "residual":
        return ExpertsLaunch(FEW_ROUTER, None, norm=True, residual=True)
    wide = experts.dtype != FP8
    one_order = rules.exact_bits is not None
    is_few = rules.is_fused and rows <= FEW_TOKENS and wide and ITEM_SIZES[experts.x_dtype] == 2
    if is_few and experts.is_plain_mixture and not one_order:
        return ExpertsLaunch(FEW_ROUTER, None)
    item_size = ITEM_SIZES[experts.x_dtype] if wide else 1
    tiles = expert_configs(rows * experts.top_k, experts.num_experts, item_size, rules.device.shared_bytes)
    router = router_config(rows, experts.hidden, ITEM_SIZES[experts.x_dtype], rules.device, one_order)
    why = "no kernel for few tokens" if experts.is_plain_mixture else "more than a softmax"
    why = "" if rows > FEW_TOKENS else why
    return ExpertsLaunch(router, tiles, rounds_parts=rows > TILE_ROWS or one_order, why=why)


def _why_apart(operations: Sequence[Operation], rules: Rules) -> str:
    if rules.world > 1:
        return "several ranks: a sum over them comes first"
    if rules.exact_bits is not None:
        return "exact_bits: one order of sums for all rows"
    if not any(one.after == "residual" for one in operations):
        return "what is between its products is more than an RMSNorm, SiLU(gate) * up and an addition"
    if any(one.after != "residual" for one in operations if isinstance(one, Experts)):
        return "the experts take rows that are normed, and their sum is added behind them"
    return "no kernel for few rows multiplies"


class ByRows(dict[int, Any]):
    """Results of a function of the number of rows, each computed once."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, rows: int) -> Any:
        self[rows] = found = self.make(rows)
        return found


class Planner:
    """One rank's Rules, and what `plan` made of them so far. Layers hold what `layer` and `launches` return."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self._made: dict[Any, ByRows] = {}

    def adopt(self, rules: Rules) -> None:
        """Takes other rules, from the next step on."""
        self.rules = rules
        for made in self._made.values():
            made.clear()

    def layer(self, operations: tuple[Operation, ...]) -> "ByRows":
        """LayerPlan by rows."""
        return self._by_rows(operations, lambda rows: plan(operations, rows, self.rules))

    def launches(self, operation: Operation) -> "ByRows":
        """Launch or ExpertsLaunch by rows."""
        return self._by_rows(operation, lambda rows: plan((operation,), rows, self.rules).launches[operation.kind])

    def _by_rows(self, key: Any, make: Any) -> ByRows:
        return self._made.setdefault(key, ByRows(make))
