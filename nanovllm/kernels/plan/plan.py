"""Kernel plan: which kernel runs for every operation of a layer, with which numbers, what is fused into it, and why not
otherwise.

`plan` is pure: the operations of a layer, a number of rows, and Rules (the device, the ranks, what was measured). All
ranks must hold the same Rules: ranks that multiplied differently would round differently.

Fusion is local. A kernel for few rows may compute the norm before its product, the activation after it and the
addition to the residual stream, and what is between two products is not looked into. Where some product of a layer does
so, the layer hands on a complete residual stream; else it hands on what is to be added, and the norm that follows adds.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm.kernels.plan.config import (
    ANY_ROWS,
    FP8,
    INT4_ROWS,
    ITEM_SIZES,
    LIBRARY,
    PACKED,
    STREAM_ROWS,
    TILE_ROWS,
    Choices,
    Gemm,
    GemmConfig,
    Kernel,
    Ranges,
)
from nanovllm.kernels.plan.device import CPU, Device
from nanovllm.kernels.plan.fits import norms_inside, refusal, rounds_inside, why_not
from nanovllm.kernels.plan.order import fixed_ranges, leaves_of, without_library
from nanovllm.kernels.plan.product import Choice, Product
from nanovllm.kernels.plan.rules import (
    FEW_EXPERTS,
    FEW_ROUTER,
    FEW_TOKENS,
    FEW_TOKENS_OF,
    FP8_FEW_EXPERTS,
    FP8_MANY_ROWS,
    PACKED_FEW_EXPERTS,
    RULES_END_AT,
    choice_ends,
    expert_tiles,
    fp8_row_config,
    int4_config,
    merges_before,
    packed_row_config,
    router_config,
    sharing,
)
from nanovllm.kernels.plan.table import EMPTY, GemmTable, at


@dataclass(frozen=True)
class Launch:
    """Kernel that runs for a Product, and all that it computes besides."""

    config: GemmConfig
    norm: bool = False
    """The RMSNorm before it."""
    gate: bool = False
    """silu(gate) * up, or the activation of experts."""
    residual: bool = False
    """The addition to the residual stream."""
    rounded: bool = False
    """Rows come in e4m3 from the kernel that makes them: a norm's, or, in steps of decodes alone, attention's."""
    rounds: bool = False
    """The result, or that of the activation behind it, is rounded to e4m3."""
    is_early: bool = False
    """Whether it lets the next kernel start before it ends (PDL), and that gains time."""
    merge_first: bool = False
    """Attention's chunks are merged before this begins to fetch its weight."""
    bias: bool = False
    """The addition of its bias."""
    with_experts: bool = False
    """The kernels of the experts beside it compute this, and what follows, too: none runs for it."""
    why: str = ""
    """Source of the choice, and what kept another kernel away."""


NO_LAUNCH = Launch(LIBRARY)
"""Stands where no product is planned."""


@dataclass(frozen=True)
class LayerPlan:
    """Kernels of one layer."""

    launches: tuple[Launch, ...] = ()
    """Launches of its operations, in their order."""
    is_complete: bool = False
    """The layer takes and hands on a complete residual stream; else what is to be added goes to the next norm."""
    is_chain: bool = False
    """Kernels for one row, none of which waits for all of the one before it: all should divide memory alike."""
    fills_registers: bool = False
    """Weights in FP8 pass through L1 into registers, to which attention should leave it."""
    why: str = ""
    """Reason why norms and additions are separate kernels."""


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


def plan(operations: Sequence[Product], rows: int, rules: Rules) -> LayerPlan:
    """Plans a layer of these operations for so many rows."""
    found = [(one, launch(one, rows, rules)) for one in operations]
    chained = (each for one, each in found if one.choice is None and one.around.is_chained)
    complete = any(each.norm or each.residual for each in chained)
    complete &= all(each.norm or each.residual for one, each in found if one.choice is not None)
    if not complete and any(one.around.is_chained for one in operations):
        found = [(one, launch(one.apart, rows, rules)) for one in operations]
    launches, why = tuple(each for _, each in found), "" if complete else _why_apart(operations, rules)
    behind = [(one.dtype, each) for one, each in found if one.around.is_behind_attention]
    is_chain = complete and rows == 1 and bool(behind)
    is_chain &= not any(each.merge_first or dtype == FP8 for dtype, each in behind)
    fills_registers = any(each.config.is_skinny and dtype == FP8 for dtype, each in behind)
    return LayerPlan(launches, complete, is_chain, fills_registers, why)


def launch(product: Product, rows: int, rules: Rules) -> Launch:
    """Chooses what runs for a product of so many rows; where it is chained, in a layer whose stream is complete."""
    if product.choice is not None:
        return _launch_of_choice(product, rows, rules)
    around, device = product.around, rules.device
    if around.beside is not None and _is_few(around.beside, product, rows, rules):
        return Launch(LIBRARY, with_experts=True)
    config, why = choose(product, rows, rules)
    if product.is_adapted:
        config = sharing(config, product.gemm(rules.world), device.processors)
    gate = around.after == "gate" and config.is_our_kernel and not product.has_bias
    gate &= around.rounds or config.kernel != "roles"  # which rounds
    gate &= not product.is_adapted or config.block_m * config.block_n <= 8192  # registers hold what adapters add
    norm = config.is_skinny and norms_inside(product, rules.world)
    residual = config.is_skinny and rules.world == 1 and around.after == "residual"
    if product.dtype == FP8:
        norm &= not residual and rounds_inside(rows, product.k, product.has_static_inputs)
    takes_e4m3 = device.has_tma or not device.is_cuda
    rounded = product.dtype == FP8 and not product.has_static_inputs and takes_e4m3 and not product.is_adapted
    if around.before in ("rms", "norm"):
        # One row's product over several ranks rounds it in less time than the kernel of the sum.
        rounded &= not norm and (rows > 1 or rules.world == 1)
    else:
        rounded &= around.before == "attention"
    rounds = around.rounds and takes_e4m3 and (not gate or config.kernel == "roles") and not product.is_adapted
    is_early = config.is_our_kernel and rules.exact_bits is None
    merge_first = around.is_behind_attention and config.is_skinny and merges_before(rows, product.num_bytes)
    if config == LIBRARY:
        config = _by_library(product, rows, device)
    # With exact_bits other rows go to kernels that round before a bias is added.
    bias = product.has_bias and not gate and config.kernel in ("fma", "tile") and rules.exact_bits is None
    bias &= around.after != "gate" and product.dtype in ITEM_SIZES
    return Launch(config, norm, gate, residual, rounded, rounds, is_early, merge_first, bias, why=why)


def choose(product: Product, rows: int, rules: Rules) -> tuple[GemmConfig, str]:
    """Chooses a kernel, and says why: the one on trial, else the measured one, else a rule's or that of the nearest
    shape; the library if there is none."""
    gemm = product.gemm(rules.world)
    if rules.exact_bits is not None:
        config = next(config for most, config in fixed_order(product, rules) if rows <= most)
        return config, f"exact_bits={rules.exact_bits!r}"
    ranges: Ranges = ()
    if (tried := rules.tried.get(gemm, {}).get(rows)) is not None:
        config, why = tried, "tried"
    elif not rules.own_kernels:
        config, why = LIBRARY, "our kernels are off" if rules.device.is_cuda else "a CPU"
    else:
        ranges, why = rules.table.serving(gemm)
        config = at(ranges, rows)
        if why == "nearest" and (ruled := _by_rule(gemm, rows, rules.device)) is not None:
            config, why = ruled, "rule"
    reason = refusal(product, rows, config, rules.device, rules.world)
    if reason and rows > 1 and config.kernel == "stream" and why == "nearest":
        config = at(ranges, STREAM_ROWS + 1)  # tiles take any scales
        reason = refusal(product, rows, config, rules.device, rules.world)
    return (LIBRARY, f"{why}: {reason}") if reason else (config, why)


def _by_rule(gemm: Gemm, rows: int, device: Device) -> GemmConfig | None:
    """Kernel of a rule that goes before the nearest shape, if there is one."""
    if gemm.dtype in PACKED:
        if rows > 1:
            return int4_config(gemm, rows, device.processors, device.shared_bytes)
        config = packed_row_config(gemm)
        while config.stages > 1 and why_not(gemm, config, most_shared=device.shared_bytes):
            config = replace(config, stages=config.stages - 1)
        return config
    return fp8_row_config(gemm, device.processors) if gemm.dtype == FP8 and rows == 1 else None


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
        fits &= not product.is_adapted
        return GemmConfig("scaled") if fits and device.scaled_library else FP8_MANY_ROWS
    if product.dtype in PACKED:
        if device.is_cuda and rows <= INT4_ROWS:
            return int4_config(product.gemm(1)._replace(kind=""), rows, device.processors, device.shared_bytes)
        return GemmConfig("widened")
    return LIBRARY


def fixed_order(product: Product, rules: Rules) -> Ranges:
    """Kernels for all numbers of rows with exact_bits."""
    gemm = product.gemm(rules.world)
    leaves = leaves_of(gemm.k * rules.world) // rules.world if rules.exact_bits == "tp" else 0
    ranges = fixed_ranges(gemm, rules.table, product.around.adds_parts, leaves, not rules.device.is_cuda)
    return without_library(ranges, gemm.k) if gemm in rules.unordered else ranges


def _launch_of_choice(product: Product, rows: int, rules: Rules) -> Launch:
    """Chooses what runs for a router, or for experts' gate and up or down: all three by the same facts."""
    assert product.choice is not None
    (count, top_k, dtype, _), around = product.choice, product.around
    is_gated, one_order, item_size = around.after == "gate", rules.exact_bits is not None, ITEM_SIZES[product.x_dtype]
    few_experts = FP8_FEW_EXPERTS if dtype == FP8 else PACKED_FEW_EXPERTS if dtype in PACKED else FEW_EXPERTS
    most_few = FEW_TOKENS_OF.get(dtype, FEW_TOKENS)
    chained = around.is_chained and rows <= (FEW_TOKENS if dtype in ITEM_SIZES else 1) and not product.is_adapted
    chained &= item_size == 2 or dtype not in PACKED
    if chained or _is_few(product.choice, product, rows, rules):
        config = few_experts[0 if is_gated else 1] if product.is_of_experts else FEW_ROUTER
        return Launch(config, around.before in ("rms", "own rms"), is_gated, around.after == "residual", why="rule")
    if not product.is_of_experts:
        return Launch(router_config(rows, product.k, item_size, rules.device, one_order), why="rule")
    config = expert_tiles(rows * top_k, count, dtype, rules.device.shared_bytes)[0 if is_gated else 1]
    kernel: Kernel = "tile" if rules.is_fused and rules.device.is_cuda else "twin"
    config = replace(config, kernel=kernel, round_sums=not is_gated and (rows > TILE_ROWS or one_order))
    why = "rule" if rows > most_few else "no kernel for few tokens"
    rounds = is_gated and dtype == FP8 and kernel == "tile" and config.block_n == 128  # columns that share a scale
    rounds &= not one_order and not product.is_adapted
    return Launch(config, gate=is_gated, rounds=rounds, why=why)


def _is_few(choice: Choice, product: Product, rows: int, rules: Rules) -> bool:
    """Whether kernels for a few tokens choose and compute, whatever is chained."""
    takes = choice.for_few and rows <= FEW_TOKENS_OF.get(choice.dtype, FEW_TOKENS) and not product.is_adapted
    return takes and rules.is_fused and rules.exact_bits is None and ITEM_SIZES[product.x_dtype] == 2


def _why_apart(operations: Sequence[Product], rules: Rules) -> str:
    if rules.world > 1:
        return "several ranks: a sum over them comes first"
    if rules.exact_bits is not None:
        return "exact_bits: one order of sums for all rows"
    if not any(one.around.after == "residual" for one in operations):
        return "what is between its products is more than an RMSNorm, SiLU(gate) * up and an addition"
    if any(one.choice is not None and not one.around.is_chained for one in operations):
        return "the experts take rows that are normed, and their sum is added behind them"
    return "no kernel for few rows multiplies"


LAST_KEPT = 4
"""Larger numbers of rows that ByRows has as keys: a step has one, or those of its halves."""


class ByRows(dict[int, Any]):
    """Results of a function of the number of rows, each computed once for a range of rows that have the same one. Keys
    are ends of such ranges, any few rows, and the larger numbers of rows that were asked for last: the layers of a step
    ask for the same ones."""

    def __init__(self, make: Callable[[int], Any], ends: Callable[[], Sequence[int]]) -> None:
        super().__init__()
        self.make, self.ends = make, ends
        self._found: Sequence[int] = ()
        self._last: deque[int] = deque()

    def __missing__(self, rows: int) -> Any:
        if not self:
            self._found = self.ends()
            self._last.clear()
        end = self._found[bisect_left(self._found, rows)]
        if end not in self.keys():
            self[end] = self.make(end)
        if rows > TILE_ROWS and rows != end:
            if len(self._last) == LAST_KEPT:
                del self[self._last.popleft()]
            self._last.append(rows)
        self[rows] = self[end]
        return self[end]


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

    def layer(self, operations: tuple[Product, ...]) -> ByRows:
        """LayerPlan by rows."""
        return self._by_rows(operations, operations, lambda rows: plan(operations, rows, self.rules))

    def launches(self, product: Product) -> ByRows:
        """Launch by rows."""
        return self._by_rows(product, (product,), lambda rows: launch(product, rows, self.rules))

    def _by_rows(self, key: Any, operations: tuple[Product, ...], make: Callable[[int], Any]) -> ByRows:
        return self._made.setdefault(key, ByRows(make, lambda: row_ends(operations, self.rules)))


def row_ends(operations: Sequence[Product], rules: Rules) -> list[int]:
    """Ends of ranges of rows within which a plan of these operations is the same; some may be further divided than
    that. The last is ANY_ROWS."""
    ends = {ANY_ROWS, *RULES_END_AT}
    for one in operations:
        gemm = one.gemm(rules.world)
        ends |= {end for rows in rules.tried.get(gemm, ()) for end in (rows - 1, rows)}
        if one.choice is not None:
            ends |= {choices // one.choice.top_k for choices in choice_ends(one.choice.num_experts)}
        else:
            ends |= {most for most, _ in rules.table.serving(gemm)[0]}
    return sorted(ends - {0})
