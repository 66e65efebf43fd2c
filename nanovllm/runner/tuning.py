"""What multiplies by which weight, by the number of rows: decided on rank 0 for all ranks.

Ranks must take the same kernels, or their sums would differ in rounding, and repeated runs are bit-equal only with the
same choices. By default a rule taken from measurements decides, which costs no start-up time and is always the same;
EngineConfig.kernel_choices has the contenders timed on this device instead, and keeps the decisions in a file.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from nanovllm.kernels import Kernels
from nanovllm.kernels.base.device_features import supports_tma
from nanovllm.kernels.gemm import cublas_lt_rule, few_rows_rule
from nanovllm.kernels.gemm import decode_rule as mid_gemm_rule
from nanovllm.kernels.gemm import skinny_rule as small_gemm_rule
from nanovllm.kernels.gemm.cublas_lt import Problem, supports
from nanovllm.kernels.gemm.cublas_lt_rule import MANY_ROWS
from nanovllm.kernels.gemm.decode import MidConfig, SplitConfig
from nanovllm.kernels.gemm.lt_config import LtConfig
from nanovllm.kernels.gemm.skinny import GemmConfig, candidate_configs
from nanovllm.kernels.gemm.skinny_tune import autotune_small_gemm
from nanovllm.layers.linear import ParallelLinear, RowParallelLinear
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.parallel.group import TensorParallelGroup
from nanovllm.parallel.two_batch import Overlap
from nanovllm.runner.algorithm_search import PROMPT_ROWS, search
from nanovllm.wire.shapes import decode_buckets

if TYPE_CHECKING:
    from nanovllm.parallel.peer.all_reduce import PeerAllReduce

logger = logging.getLogger(__name__)

FEW_ROWS = (1, 2, 4, 8, 12, 16)
"""Numbers of rows for which the kernels that fuse norm and residual are tried."""
_CANDIDATES = 2  # of our kernels to compile and time for a weight and a number of rows
_SEARCH_SECONDS = 10.0  # for the library's algorithms, where a file is to be written

Config = GemmConfig | MidConfig | SplitConfig | LtConfig
Choices = dict[str, dict[int, Config]]
"""Projection -> rows -> configuration; MANY_ROWS stands for so many and more. What is not there goes to the library."""


def projections(model: DecoderForCausalLM) -> dict[str, list[ParallelLinear]]:
    """The layers' projections by kind; those of a kind have one shape and one choice."""
    layers = [(layer.self_attn, layer.mlp) for layer in model.layers]
    return {
        "qkv": [attention.qkv_proj for attention, _ in layers],
        "o": [attention.o_proj for attention, _ in layers],
        "gate_up": [mlp.gate_up_proj for _, mlp in layers],
        "down": [mlp.down_proj for _, mlp in layers],
        "head": [model.lm_head],
    }


def operations(fused: bool) -> dict[str, str]:
    """What is fused with each projection. With several ranks the sum over them stands between a projection and what
    surrounds it, so there is nothing to fuse."""
    if not fused:
        return dict.fromkeys(("qkv", "o", "gate_up", "down", "head"), "linear")
    return {
        "head": "linear",
        "qkv": "norm_linear",
        "o": "linear_residual",
        "gate_up": "norm_linear_silu_mul",
        "down": "linear_residual",
    }


def chosen(model: DecoderForCausalLM, kernels: Kernels, path: str | None, fused: bool, max_rows: int) -> Choices:
    """By the rule; or with a `path` what that file says, for which everything is timed where there is none."""
    if path is None:
        return measured(model, fused, max_rows)
    choices = load(Path(path))
    if choices is None:
        choices = timed(model, kernels, fused, max_rows)
        save(Path(path), choices)
    return runnable(choices, model)


def measured(model: DecoderForCausalLM, fused: bool, max_rows: int) -> Choices:
    """The rule that the timings on an H200 come to (docs/performance.md)."""
    choices = _more_rows(model, max_rows)
    for name, layers in projections(model).items():
        choices[name] = _few_rows(name, layers[0].weight, fused, max_rows) | choices[name]
    return _with_algorithms(choices, model)


def _few_rows(name: str, weight: torch.Tensor, fused: bool, max_rows: int) -> dict[int, Config]:
    """The rule for the FEW_ROWS up to `max_rows` (kernels/gemm/few_rows_rule.py)."""
    n, k = weight.shape
    item_size, tma = weight.element_size(), supports_tma(weight.device)
    steps = [rows for rows in FEW_ROWS if rows <= max_rows]
    ruled = {rows: few_rows_rule.choice(name, rows, n, k, item_size, tma, fused) for rows in steps}
    return {rows: config for rows, config in ruled.items() if config is not None}


def _more_rows(model: DecoderForCausalLM, max_rows: int) -> Choices:
    """The rule for the decode steps of more rows than FEW_ROWS (decode_rule.py), which is not timed anew: by
    the shapes of this rank's weights. Parts of a sum over K are added up by who takes o's and down's result, add +
    RMSNorm of one rank or the sum over several."""
    choices: Choices = {}
    for name, layers in projections(model).items():
        choices[name] = {}
        weight = layers[0].weight
        if name == "head" or weight.element_size() != 2:
            continue
        own = supports_tma(weight.device)
        n, k = weight.shape
        for rows in decode_buckets(max_rows):
            config: Config | None
            if name == "gate_up":
                config = mid_gemm_rule.gated_product(rows, n, k, own)
            else:
                config = mid_gemm_rule.product(rows, n, k, name in ("o", "down"), own)
            if config is not None:
                choices[name][rows] = config
    return choices


def _with_algorithms(choices: Choices, model: DecoderForCausalLM) -> Choices:
    """`choices`, with algorithms of the library by kernels/gemm/cublas_lt_rule.py, which beat what is there without."""
    named: Choices = {}
    for name, layers in projections(model).items():
        weight = layers[0].weight
        if weight.element_size() != 2:
            continue
        n, k = weight.shape
        named[name] = {**cublas_lt_rule.algorithms(name, n, k)}
        many = cublas_lt_rule.many_rows_algorithm(n, k) if name != "head" else None
        if many is not None:
            named[name][MANY_ROWS] = many
    known = runnable(named, model)
    return {name: by_rows | known.get(name, {}) for name, by_rows in choices.items()}


def runnable(choices: Choices, model: DecoderForCausalLM) -> Choices:
    """`choices` without the algorithms that this device's library does not know; they may be from another version."""
    refused, kept = [], Choices()
    for name, layers in projections(model).items():
        n, k = layers[0].weight.shape
        kept[name] = {}
        for rows, config in choices.get(name, {}).items():
            if isinstance(config, LtConfig):
                tried = PROMPT_ROWS if rows == MANY_ROWS else rows
                weight = layers[0].weight
                if not supports(Problem(tried, n, k, weight.dtype, weight.device, config.parts), config):
                    refused.append(f"{rows} rows of {name} by {config}")
                    continue
            kept[name][rows] = config
    if refused:
        _warn(f"{len(refused)} products stay with what cuBLAS takes, which does not know {refused[0]}")
    return kept


@cache
def _warn(message: str) -> None:
    """Once: the choice is made for the compiler first and again for the engine."""
    logger.warning("%s", message)


def _searched(choices: Choices, model: DecoderForCausalLM, kernels: Kernels, fused: bool, max_rows: int) -> Choices:
    """`choices`, with algorithms of the library where they are faster on this device (runner/algorithm_search.py)."""
    weights = {name: [layer.weight for layer in layers] for name, layers in projections(model).items()}
    weights = {name: layers for name, layers in weights.items() if layers[0].element_size() == 2}
    buckets = decode_buckets(max_rows)
    found = search(weights, lambda name, rows: choices[name].get(rows), kernels, fused, buckets, _SEARCH_SECONDS)
    return {name: by_rows | found.get(name, {}) for name, by_rows in choices.items()}


def timed(model: DecoderForCausalLM, kernels: Kernels, fused: bool, max_rows: int) -> Choices:
    """Times the library against our kernels, over all layers' weights, for the FEW_ROWS up to `max_rows`, and then the
    library's algorithms for more rows against what the rules say."""
    choices = _more_rows(model, max_rows)
    for name, layers in projections(model).items():
        operation = operations(fused)[name]
        weights = [layer.weight for layer in layers]
        n, k = weights[0].shape
        ruled = _few_rows(name, weights[0], fused, max_rows)
        for rows in (rows for rows in FEW_ROWS if rows <= max_rows):
            candidates = candidate_configs(rows, n, k)[:_CANDIDATES]
            if isinstance(by_rule := ruled.get(rows), GemmConfig):
                candidates = list(dict.fromkeys([*candidates, by_rule]))
            library = _library(operation, kernels, weights[0], rows)
            best = autotune_small_gemm(operation, weights, rows, library=library, candidates=candidates)
            if best.config is not None:
                choices[name][rows] = best.config
    return _searched(_with_algorithms(choices, model), model, kernels, fused, max_rows)


def _library(
    operation: str, kernels: Kernels, weight: torch.Tensor, rows: int
) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """The contender: the library's product with our separate kernels around it."""
    norm_weight = torch.ones_like(weight[0])
    residual = weight.new_zeros(rows, weight.shape[0])
    if operation == "norm_linear":
        return lambda x, w: F.linear(kernels.rms_norm(x, norm_weight, 1e-6), w)
    if operation == "norm_linear_silu_mul":
        return lambda x, w: kernels.silu_mul(F.linear(kernels.rms_norm(x, norm_weight, 1e-6), w))
    if operation == "linear_residual":
        return lambda x, w: residual.addmm_(x, w.t())
    return F.linear


def apply(model: DecoderForCausalLM, choices: Choices, fused: bool, push: bool = False) -> None:
    """Gives every projection its choices. `fused`: steps of these numbers of rows take forward_few_rows. `push`:
    products store into the places of the sums behind them where they can."""
    for name, layers in projections(model).items():
        few_rows = dict(choices.get(name, {}))
        many = few_rows.pop(MANY_ROWS, None)
        pushes = _pushes(few_rows, model.group) if push else {}
        for layer in layers:
            layer.few_rows, layer.many_rows = few_rows, many if isinstance(many, LtConfig) else None
            if isinstance(layer, RowParallelLinear):
                layer.pushes = pushes
    attention = model.layers[0].self_attn
    attention.backend.merged_first = _merged_first(attention.o_proj)
    behind_o, behind_down = (_own_rows(choices.get(name, {})) for name in ("o", "down"))
    for decoder_layer in model.layers:
        decoder_layer.input_layernorm.dependent_rows = behind_down
        decoder_layer.post_attention_layernorm.dependent_rows = behind_o
    model.norm.dependent_rows = behind_down
    inside_layers = [by_rows for name, by_rows in choices.items() if name != "head"]
    small = {rows for by_rows in inside_layers for rows, config in by_rows.items() if isinstance(config, GemmConfig)}
    model.fused_rows = small if fused else set()


def _merged_first(o_proj: ParallelLinear) -> frozenset[int]:
    """What AttentionBackend.merged_first is: where a kernel of our own multiplies next and fetches its weight early."""
    num_bytes = o_proj.weight.numel() * o_proj.weight.element_size()
    own = (rows for rows, config in o_proj.few_rows.items() if isinstance(config, GemmConfig))
    return frozenset(rows for rows in own if small_gemm_rule.merges_before(rows, num_bytes))


def _pushes(
    by_rows: dict[int, Config], group: TensorParallelGroup
) -> dict[int, tuple[GemmConfig | MidConfig, "PeerAllReduce"]]:
    """What RowParallelLinear.pushes is: where a kernel of our own makes the whole product and its sum is one-shot. Not
    for numbers of rows that half a step may have, whose sums are others."""
    found: dict[int, tuple[GemmConfig | MidConfig, PeerAllReduce]] = {}
    for rows, config in by_rows.items():
        if not isinstance(config, GemmConfig | MidConfig) or (isinstance(config, MidConfig) and config.splits > 1):
            continue
        sums = group.fused_all_reduce(rows)
        if sums is not None and sums.path(rows) == "one_shot" and rows <= Overlap.min_rows // 2 - Overlap.cut_multiple:
            found[rows] = config, sums
    return found


def _own_rows(by_rows: dict[int, Config]) -> frozenset[int]:
    """The numbers of rows that a kernel of our own multiplies."""
    return frozenset(rows for rows, config in by_rows.items() if isinstance(config, GemmConfig | MidConfig))


def load(path: Path) -> Choices | None:
    """Choices written by `save`; None where there is no such file."""
    if not path.is_file():
        return None
    raw = json.loads(path.read_text(encoding="utf-8"))
    return {name: {int(rows): _config(fields) for rows, fields in kept.items()} for name, kept in raw.items()}


def _config(fields: dict[str, Any]) -> Config:
    """The configuration that has these fields: each kind has one of its own."""
    if "algorithm" in fields:
        return LtConfig(**fields)
    kind = GemmConfig if "kernel" in fields else MidConfig if "block_m" in fields else SplitConfig
    return kind(**fields)


def save(path: Path, choices: Choices) -> None:
    raw = {name: {rows: asdict(config) for rows, config in by_rows.items()} for name, by_rows in choices.items()}
    path.write_text(json.dumps(raw, indent=1), encoding="utf-8")
