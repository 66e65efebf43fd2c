"""A token's experts as kernels for a handful of tokens find them: every program anew from the logits, which takes less
time than a kernel whose result all would wait for."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.float_order import from_ordered
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.moe.routing import LOWEST, TAKEN, TopK, keys_of, softmax, take_best

_LOWEST: tl.constexpr = tl.constexpr(LOWEST)


class Choosing(NamedTuple):
    """Way in which a kernel chooses. All are constants: what they decide is compiled away."""

    width: Any
    """Columns of the logits."""
    experts: Any
    block: Any
    """A power of two of them."""
    top_k: Any
    warps: Any
    sigmoid: Any
    logits_scale: Any


@triton.jit
def load_scores(LOGITS, BIAS, CORRECTION, row, how):
    """A token's scores, a copy for each warp, float32 [warps, block], and what the choice is by, as integers of that
    order, int32. LOGITS float32 [T, width]; BIAS [experts] on them, CORRECTION float32 [experts] on the choice, or
    None: see routing.route. Without sigmoid and CORRECTION the scores are the logits."""
    expert = tl.arange(0, how.block)[None, :] + tl.zeros([how.warps, 1], tl.int32)
    inside = expert < how.experts
    score = tl.load(LOGITS + row * how.width + expert, mask=inside, other=0.0, cache_modifier=".cg")
    if how.logits_scale != 1.0:
        score *= how.logits_scale
    if BIAS is not None:
        score += tl.load(BIAS + expert, mask=inside, other=0.0).to(tl.float32)
    if how.sigmoid:
        score = 1.0 / (1.0 + tl.exp(-score))
    elif CORRECTION is not None:
        score = softmax(score, inside)
    choice = score
    if CORRECTION is not None:
        choice += tl.load(CORRECTION + expert, mask=inside, other=0.0)
    choice = tl.where(choice == choice, tl.maximum(choice, _LOWEST), _LOWEST)
    return score, tl.where(inside, keys_of(choice), TAKEN)


@triton.jit
def best_of(keys, slot):
    """The expert [warps, 1] of a slot; slot 0 has the best."""
    expert, _, keys = take_best(keys)
    for _ in range(slot):
        expert, _, keys = take_best(keys)
    return expert


@triton.jit
def choose(scores, keys, CORRECTION, FACTORS, RENORMALISE: tl.constexpr, SCALE: tl.constexpr, how):
    """The best experts, best first, and their weights: tuples of [warps, 1]. scores, keys, CORRECTION: see load_scores;
    FACTORS float32 [experts], or None, on the weights."""
    FROM_SCORES: tl.constexpr = how.sigmoid or CORRECTION is not None
    all_keys, number = keys, tl.arange(0, how.block)[None, :]
    experts, values = (), ()
    for _ in tl.static_range(how.top_k):
        expert, key, keys = take_best(keys)
        experts = experts + (expert,)
        if FROM_SCORES:
            values = values + (tl.sum(tl.where(number == expert, scores, 0.0), axis=1)[:, None],)
        else:
            values = values + (from_ordered(key),)
    total = tl.zeros(values[0].shape, tl.float32)
    if FROM_SCORES:
        for slot in tl.static_range(how.top_k):
            total += values[slot]
        total += 1e-20
    elif RENORMALISE:
        for slot in tl.static_range(how.top_k):
            total += tl.exp(values[slot] - values[0])
    else:
        every = tl.exp(from_ordered(all_keys) - values[0])
        total += tl.sum(tl.where(all_keys == TAKEN, 0.0, every), axis=1)[:, None]
    weights = ()
    for slot in tl.static_range(how.top_k):
        weight = values[slot] if FROM_SCORES else tl.exp(values[slot] - values[0])
        if RENORMALISE or not FROM_SCORES:
            weight = weight / total
        weight *= SCALE
        if FACTORS is not None:
            weight *= tl.load(FACTORS + experts[slot])
        weights = weights + (weight,)
    return experts, weights


@triton.jit
def _gated(x, LOGITS, row, GATED: tl.constexpr, how):
    """x of a shared expert, with GATED times the sigmoid of the logit behind the experts'."""
    if GATED:
        gate = tl.load(LOGITS + row * how.width + how.experts, cache_modifier=".cg")
        x = x / (1.0 + tl.exp(-gate))
    return x


@triton.jit
def shared_weight(LOGITS, row, GATED: tl.constexpr, how):
    """Weight of a shared expert beside others, [warps, 1]; see load_shared."""
    return _gated(tl.full([how.warps, 1], 1.0, tl.float32), LOGITS, row, GATED, how)


@triton.jit
def load_shared(SHARED, col, live, LOGITS, row, n_out, GATED: tl.constexpr, how):
    """Columns of what a shared expert computed, SHARED [T, n_out], in float32, with GATED times the sigmoid of the
    logit behind the experts'."""
    shared = tl.load(SHARED + row * n_out + col, mask=live, other=0.0).to(tl.float32)
    return _gated(shared, LOGITS, row, GATED, how)


@dataclass(frozen=True)
class Chosen:
    """Logits by which tokens choose experts, float32 [1, T, experts or more]; a bias [experts] on them, a correction
    and factors, float32 [experts]: see routing.route. `options` have no groups."""

    logits: torch.Tensor
    options: TopK
    bias: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    factors: torch.Tensor | None = None


def choice_constants(chosen: Chosen, experts: int, device: torch.device) -> dict[str, int | float | bool]:
    """Constants of kernels that choose among so many experts."""
    options, block = chosen.options, max(32, triton.next_power_of_2(experts))
    assert options.num_groups == 1, options
    assert len(chosen.logits) == 1 and chosen.logits.is_contiguous(), chosen.logits.shape
    return {
        "WIDTH": chosen.logits.shape[-1], "EXPERTS": experts, "BLOCK": block, "TOP_K": options.top_k,
        "SIGMOID": options.sigmoid, "LOGITS_SCALE": options.logits_scale, **pdl_options(device),
    }  # fmt: skip
