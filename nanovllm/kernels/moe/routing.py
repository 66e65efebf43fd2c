"""Routing: the experts of each token, and the tokens of each expert side by side, all on the device and of fixed
shapes.

A block of rows picks its experts in one program. A step that fits in one program is sorted there too; with more rows a
second kernel does it, in which every program adds up the blocks' counts before its own. Positions follow from counts in
the order of tokens: nothing depends on which program comes first.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanovllm.kernels.base.device import pdl_options, start_early
from nanovllm.kernels.base.float_order import from_ordered, to_ordered
from nanovllm.kernels.base.triton_import import tl, triton

_TILE_ELEMENTS = 8192
"""Maximum elements of the matrix tokens x experts that one program holds."""
_FEW_ROWS, _PROGRAMS = 4, 128
"""Tokens of a program, as long as no more than so many programs are needed: a token's experts are found one after the
other, which many programs do side by side."""
_COUNTED_BLOCKS = 32
"""Blocks whose counts _sort_kernel reads at once."""
LOWEST = -3e38
"""Number below all logits; a logit that is not a number counts as this, so that every token has k different experts."""
TAKEN: tl.constexpr = tl.constexpr(-(1 << 31))
"""Key of a taken expert, below that of any score."""


@dataclass(frozen=True)
class TopK:
    """Choice of a token's experts, and their weights, from its logits."""

    num_experts: int
    top_k: int
    sigmoid: bool = False
    """Scores are sigmoid(logits); else softmax(logits). A correction makes the choice one by score + correction
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    renormalise: bool = True
    """The chosen scores are divided by their sum."""
    num_groups: int = 1
    top_groups: int = 1
    """Only experts of the best groups are chosen: by the sum of each group's two best scores for sigmoid, by the best
    one for softmax."""
    scale: float = 1.0
    """Factor on the weights."""
    logits_scale: float = 1.0
    """Factor on the logits."""

    @property
    def group_size(self) -> int:
        return self.num_experts // self.num_groups


class Routing(NamedTuple):
    """T tokens that chose k experts each. A choice is token * k + slot, slots ordered by score."""

    weights: torch.Tensor
    """float32 [T, k]"""
    order: torch.Tensor
    """int32 [T * k]: the choices by expert, and for each expert by token."""
    tiles: torch.Tensor
    """int32 [max_tiles, 3]: of each tile of block_m rows its expert, its first position in `order` and the end of that
    expert's positions; -1 past the last tile."""
    top_k: int

    @property
    def num_tokens(self) -> int:
        return self.weights.shape[0]


def max_tiles(num_choices: int, num_experts: int, block_m: int) -> int:
    """Maximum tiles of rows that any distribution over the experts makes."""
    return min(num_choices, num_choices // block_m + num_experts)


@triton.jit
def _best_groups(
    choice, group, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BY_TWO: tl.constexpr, LOWEST: tl.constexpr
):
    """bool of choice's shape [ROWS, EXPERTS]: the expert is in one of the best groups."""
    expert = tl.arange(0, choice.shape[1])[None, :]
    lane = tl.arange(0, triton.next_power_of_2(GROUPS))[None, :]
    sums = tl.full([choice.shape[0], triton.next_power_of_2(GROUPS)], float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        inside = tl.where(group == g, choice, float("-inf"))
        if BY_TWO:
            first = tl.argmax(inside, axis=1)[:, None]
            second = tl.max(tl.where(expert == first, float("-inf"), inside), axis=1)
            sums = tl.where(lane == g, (tl.max(inside, axis=1) + tl.maximum(second, LOWEST / 4))[:, None], sums)
        else:
            sums = tl.where(lane == g, tl.max(inside, axis=1)[:, None], sums)
    allowed = choice != choice
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(sums, axis=1)[:, None]
        allowed = allowed | (group == best)
        sums = tl.where(lane == best, float("-inf"), sums)
    return allowed


@triton.jit
def _place(ORDER, slot_of, starts, row, TOP_K: tl.constexpr):
    """Writes the choices of some rows from `starts` [EXPERTS] on. slot_of [ROWS, EXPERTS]: -1 where not chosen."""
    chosen = (slot_of >= 0).to(tl.int32)
    before = tl.cumsum(chosen, axis=0) - chosen
    tl.store(ORDER + starts[None, :] + before, row[:, None] * TOP_K + slot_of, mask=slot_of >= 0)


@triton.jit
def _write_tiles(TILES, totals, starts, max_tiles, BLOCK_M: tl.constexpr):
    """Writes the tiles of each expert's totals [EXPERTS] rows, which begin at starts [EXPERTS]; see Routing.tiles."""
    expert = tl.arange(0, totals.shape[0])
    tiles = (totals + BLOCK_M - 1) // BLOCK_M
    first = tl.cumsum(tiles, axis=0) - tiles
    for j in range(0, tl.max(tiles, axis=0)):
        at = TILES + 3 * (first + j)
        tl.store(at, expert, mask=j < tiles)
        tl.store(at + 1, starts + j * BLOCK_M, mask=j < tiles)
        tl.store(at + 2, starts + totals, mask=j < tiles)
    for begin in range(3 * tl.sum(tiles, axis=0), 3 * max_tiles, 256):
        at = begin + tl.arange(0, 256)
        tl.store(TILES + at, tl.full([256], -1, tl.int32), mask=at < 3 * max_tiles)


@triton.jit
def softmax(score, inside):
    """Softmax of score [ROWS, BLOCK], where it is `inside`. Its sum is one of integers, so its bits do not depend on
    ROWS."""
    shares = tl.where(inside, tl.exp(score - tl.max(tl.where(inside, score, float("-inf")), axis=1)[:, None]), 0.0)
    total = tl.sum((shares * (1 << 40)).to(tl.int64), axis=1).to(tl.float32) / (1 << 40)
    return shares / total[:, None]


@triton.jit
def _weights(values, score, lane, expert, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, IS_SCORE: tl.constexpr,
             RENORMALISE: tl.constexpr):  # fmt: skip
    """Weights of the chosen experts, float32 [ROWS, BLOCK_K], of their scores `values` and of the scores of all.
    IS_SCORE: the values are no logits. Neither sum's bits depend on ROWS: one goes slot by slot, the other is one of
    integers."""
    if IS_SCORE:
        weights = tl.where(lane < TOP_K, values, 0.0)
    else:
        top = tl.max(values, axis=1)[:, None]
        weights = tl.exp(values - top)
        if not RENORMALISE:
            shares = tl.where(expert < EXPERTS, tl.exp(score - top), 0.0) * (1 << 40)
            weights = weights / (tl.sum(shares.to(tl.int64), axis=1).to(tl.float32) / (1 << 40))[:, None]
    if RENORMALISE:
        total = tl.zeros([values.shape[0]], tl.float32)
        for slot in tl.static_range(TOP_K):
            total += tl.sum(tl.where(lane == slot, weights, 0.0), axis=1)
        weights = weights / (total[:, None] + (1e-20 if IS_SCORE else 0.0))
    return weights


@triton.jit
def keys_of(choice):
    """Scores as integers of their order, int32, of which a warp finds the greatest of 32 in one instruction."""
    return to_ordered(tl.where(choice == 0.0, 0.0, choice))  # -0.0 is no less


@triton.jit
def take_best(keys):
    """(expert [ROWS, 1], its key [ROWS, 1], `keys` [ROWS, EXPERTS] without it), the lower number where two are equal.
    """
    expert = tl.arange(0, keys.shape[1])[None, :]
    key = tl.max(keys, axis=1)[:, None]
    best = tl.min(tl.where(keys == key, expert, keys.shape[1]), axis=1)[:, None]
    return best, key, tl.where(expert == best, TAKEN, keys)


@triton.jit
def _best_experts(choice, score, inside, expert, lane, TOP_K: tl.constexpr, IS_SCORE: tl.constexpr):
    """Finds the TOP_K best of choice [ROWS, EXPERTS], best first: their values, which are of `score` where IS_SCORE,
    and numbers, both [ROWS, lanes], and each expert's slot [ROWS, EXPERTS], -1 where it is not chosen."""
    values = tl.full([choice.shape[0], lane.shape[1]], float("-inf"), tl.float32)
    ids = tl.zeros([choice.shape[0], lane.shape[1]], dtype=tl.int32)
    slot_of = tl.full(choice.shape, -1, tl.int32)
    keys = keys_of(choice)
    for slot in tl.static_range(TOP_K):
        best, key, keys = take_best(keys)
        value = from_ordered(key)
        if IS_SCORE:
            value = tl.sum(tl.where(expert == best, score, 0.0), axis=1)[:, None]
        values = tl.where(lane == slot, value, values)
        ids = tl.where(lane == slot, best, ids)
        slot_of = tl.where((expert == best) & inside, slot, slot_of)
    return values, ids, slot_of


@triton.jit(do_not_specialize=["rows", "max_tiles"])
def _route_kernel(
    LOGITS, BIAS, CORRECTION, FACTORS, WEIGHTS, IDS, COUNTS, ORDER, TILES, rows, max_tiles,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, SCALE: tl.constexpr, LOGITS_SCALE: tl.constexpr, LOWEST: tl.constexpr,
    SINGLE: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS tokens from `program_id` * ROWS on. SINGLE: they are all, and the sort is done here; else IDS [rows, TOP_K]
    and COUNTS [programs, BLOCK] are for _sort_kernel."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (expert < EXPERTS)
    bias = 0.0
    correction = 0.0
    if BIAS is not None:
        bias = tl.load(BIAS + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    if CORRECTION is not None:
        correction = tl.load(CORRECTION + expert, mask=expert < EXPERTS, other=0.0)
    start_early(PDL)
    logits = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        at = (part * rows + row).to(tl.int64)[:, None] * WIDTH + expert
        logits += tl.load(LOGITS + at, mask=inside, other=0.0)
    if LOGITS_SCALE != 1.0:
        logits *= LOGITS_SCALE
    score = logits + bias
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
    elif CORRECTION is not None:
        score = softmax(score, expert < EXPERTS)
    choice = score + correction
    choice = tl.where(choice == choice, tl.maximum(choice, LOWEST), LOWEST)
    choice = tl.where(expert < EXPERTS, choice, float("-inf"))
    if GROUPS > 1:
        allowed = _best_groups(choice, expert // (EXPERTS // GROUPS), GROUPS, TOP_GROUPS, SIGMOID, LOWEST)
        choice = tl.where(allowed, choice, float("-inf"))

    lane = tl.arange(0, BLOCK_K)[None, :]
    is_score: tl.constexpr = SIGMOID or CORRECTION is not None
    values, ids, slot_of = _best_experts(choice, score, inside, expert, lane, TOP_K, is_score)
    weights = _weights(values, score, lane, expert, TOP_K, EXPERTS, is_score, RENORMALISE)
    out = row[:, None] * TOP_K + lane
    live = (row < rows)[:, None] & (lane < TOP_K)
    places = WEIGHTS + out
    weights *= SCALE
    if FACTORS is not None:
        weights *= tl.load(FACTORS + ids, mask=live, other=0.0)
    tl.store(places, weights, mask=live)
    totals = tl.sum((slot_of >= 0).to(tl.int32), axis=0)
    if SINGLE:
        starts = tl.cumsum(totals, axis=0) - totals
        _place(ORDER, slot_of, starts, row, TOP_K)
        _write_tiles(TILES, totals, starts, max_tiles, BLOCK_M)
    else:
        tl.store(IDS + out, ids, mask=live)
        tl.store(COUNTS + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), totals)


@triton.jit(do_not_specialize=["rows", "max_tiles"])
def _sort_kernel(
    IDS, COUNTS, ORDER, TILES, rows, max_tiles,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ORDER int32 [rows * TOP_K] and TILES int32 [max_tiles, 3] of Routing, from the IDS int32 [rows, TOP_K] and COUNTS
    int32 [programs, BLOCK] of _route_kernel. A program places the choices of ROWS tokens from `program_id` * ROWS
    on."""
    start_early(PDL)
    pid, blocks = tl.program_id(0), tl.num_programs(0)
    expert = tl.arange(0, BLOCK)
    totals = tl.zeros([BLOCK], dtype=tl.int32)
    before = tl.zeros([BLOCK], dtype=tl.int32)
    for begin in range(0, blocks, COUNTED):
        block = begin + tl.arange(0, COUNTED)[:, None]
        counts = tl.load(COUNTS + block * BLOCK + expert[None, :], mask=block < blocks, other=0)
        totals += tl.sum(counts, axis=0)
        before += tl.sum(tl.where(block < pid, counts, 0), axis=0)
    starts = tl.cumsum(totals, axis=0) - totals
    row = pid * ROWS + tl.arange(0, ROWS)
    slot_of = tl.full([ROWS, BLOCK], -1, tl.int32)
    for slot in tl.static_range(TOP_K):
        ids = tl.load(IDS + row * TOP_K + slot, mask=row < rows, other=-1)
        slot_of = tl.where(ids[:, None] == expert[None, :], slot, slot_of)
    _place(ORDER, slot_of, starts + before, row, TOP_K)
    if pid == 0:
        _write_tiles(TILES, totals, starts, max_tiles, BLOCK_M)


def route(
    logits: torch.Tensor, options: TopK, block_m: int, bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None, factors: torch.Tensor | None = None,
) -> Routing:  # fmt: skip
    """logits float32 [parts, T, width], sums over parts of K, of which the first num_experts columns count -> Routing.
    bias [num_experts] is added to them; correction float32 [num_experts]: see TopK.sigmoid; factors float32
    [num_experts]: on the weights, at last. Equal scores: the expert with the lower number first. Logits are
    contiguous."""
    parts, rows, width = logits.shape
    top_k, experts, device = options.top_k, options.num_experts, logits.device
    block = triton.next_power_of_2(experts)
    most = max(1, _TILE_ELEMENTS // block)
    block_rows = 1 if rows == 1 else min(most, max(_FEW_ROWS, triton.next_power_of_2(triton.cdiv(rows, _PROGRAMS))))
    blocks = triton.cdiv(rows, block_rows)
    num_tiles = max_tiles(rows * top_k, experts, block_m)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=device)
    order = torch.empty(rows * top_k, dtype=torch.int32, device=device)
    tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=device)
    ids, counts = order, tiles
    if blocks > 1:
        ids, counts = torch.empty_like(order), torch.empty(blocks, block, dtype=torch.int32, device=device)
    shared = {"BLOCK": block, "ROWS": block_rows, "TOP_K": top_k, "BLOCK_M": block_m}
    elements = block_rows * block
    launch = {"num_warps": 1 if elements <= 512 else 4 if elements <= 2048 else 8, **pdl_options(device)}
    _route_kernel[(blocks,)](
        logits, bias, correction, factors, weights, ids, counts, order, tiles, rows, num_tiles,
        WIDTH=width, PARTS=parts, EXPERTS=experts, BLOCK_K=triton.next_power_of_2(top_k), SIGMOID=options.sigmoid,
        RENORMALISE=options.renormalise, GROUPS=options.num_groups, TOP_GROUPS=options.top_groups, SCALE=options.scale,
        LOGITS_SCALE=options.logits_scale, LOWEST=LOWEST, SINGLE=blocks == 1, **shared, **launch,
    )  # fmt: skip
    if blocks > 1:
        launch["num_warps"] = 8 if elements > 4096 else 4
        _sort_kernel[(blocks,)](
            ids, counts, order, tiles, rows, num_tiles, COUNTED=_COUNTED_BLOCKS, **shared, **launch
        )  # fmt: skip
    return Routing(weights, order, tiles, top_k)


def route_reference(
    logits: torch.Tensor, options: TopK, block_m: int, bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None, factors: torch.Tensor | None = None,
) -> Routing:  # fmt: skip
    """Plain twin of `route`."""
    experts, top_k = options.num_experts, options.top_k
    score = logits.sum(0)[:, :experts] * options.logits_scale
    if bias is not None:
        score = score + bias.float()
    is_score = options.sigmoid or correction is not None
    if is_score:
        score = score.sigmoid() if options.sigmoid else score.softmax(-1)
    choice = score if correction is None else score + correction
    choice = choice.nan_to_num(LOWEST, posinf=float("inf"), neginf=LOWEST)
    if options.num_groups > 1:
        by_group = choice.unflatten(1, (options.num_groups, options.group_size))
        best = by_group.topk(min(1 + options.sigmoid, options.group_size), dim=-1).values.sum(-1)
        groups = best.sort(dim=-1, descending=True, stable=True).indices[:, : options.top_groups]
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)
        choice = by_group.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = score.gather(1, chosen) if is_score else score.softmax(-1).gather(1, chosen)
    if options.renormalise and is_score:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    elif options.renormalise:
        weights = score.gather(1, chosen).softmax(-1)
    order = chosen.flatten().sort(stable=True).indices.to(torch.int32)
    tiles, start = [], 0
    for expert, total in enumerate(torch.bincount(chosen.flatten(), minlength=experts).tolist()):
        tiles += [(expert, first, start + total) for first in range(start, start + total, block_m)]
        start += total
    tiles += [(-1, -1, -1)] * (max_tiles(chosen.numel(), experts, block_m) - len(tiles))
    in_rows = torch.tensor(tiles, dtype=torch.int32, device=chosen.device).view(-1, 3)
    weights = weights * options.scale
    return Routing(weights if factors is None else weights * factors[chosen], order, in_rows, top_k)


@triton.jit
def _choices_kernel(TILES, ORDER, SLOTS, TOKEN, SLOT, num_tiles, top_k, experts, BLOCK: tl.constexpr):
    """Grid (tiles): TILES [num_tiles, 3], ORDER and TOKEN and SLOT [T * k], SLOTS [T]; see choices."""
    tile, ptr = tl.program_id(0), TILES + tl.program_id(0) * 3
    expert, first, end = tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2)
    if tile + 1 < num_tiles and tl.load(ptr + 3, mask=tile + 1 < num_tiles, other=-1) == expert:
        end = tl.load(ptr + 4, mask=tile + 1 < num_tiles, other=0)
    for begin in range(first, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        token = tl.load(ORDER + at, mask=at < end, other=0) // top_k
        slot = tl.load(SLOTS + token, mask=at < end, other=-1)
        tl.store(TOKEN + at, token, mask=at < end)
        tl.store(SLOT + at, tl.where(slot >= 0, slot * experts + expert, -1), mask=at < end)


def choices(routing: Routing, slots: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of a routing, of tokens whose adapters are in `slots` (int32 [T], -1: none) -> int32 [T * k] each: the
    token of a position, and slot * experts + expert, -1 where it has no adapter. `routing`: for the twin also a list of
    those of each token."""
    token, slot = torch.empty_like(routing.order), torch.empty_like(routing.order)
    num_tiles = len(routing.tiles)
    _choices_kernel[(num_tiles,)](
        routing.tiles, routing.order, slots, token, slot, num_tiles, routing.top_k, experts, BLOCK=128
    )
    return token, slot


def choices_reference(
    routing: Routing | list[Routing], slots: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain twin of `choices`."""
    if isinstance(routing, list):
        found = [choices_reference(one, slots[number, None], experts) for number, one in enumerate(routing)]
        tokens = [token + number for number, (token, _) in enumerate(found)]
        return torch.cat(tokens), torch.cat([slot for _, slot in found])
    token, expert = routing.order // routing.top_k, torch.empty_like(routing.order)
    for number, first, end in filter(lambda tile: tile[0] >= 0, routing.tiles.tolist()):
        expert[first:end] = number
    of_token = slots[token]
    return token, torch.where(of_token < 0, -1, of_token * experts + expert)
