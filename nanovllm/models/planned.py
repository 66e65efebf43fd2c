"""A model's layers without memory behind them, for any device and without one, and which kernels they would run."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from nanovllm.kernels import select_kernels
from nanovllm.kernels.plan.order import LEAF_MULTIPLE, LEAVES
from nanovllm.kernels.plan.plan import Launch, Planner, Rules
from nanovllm.kernels.plan.product import Product
from nanovllm.layers.adapted import AdapterRoom
from nanovllm.layers.context import ModelContext
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM

INSIDE = ("rounded", "norm", "gate", "bias", "residual")


def rank_model(
    config: ModelConfig, rules: Rules, dtype: str, adapters: AdapterRoom | None = None
) -> DecoderForCausalLM:
    """Model of rank 0 of rules.world, without memory behind it. dtype: of activations, by torch's name. Raises
    ValueError as building an engine's model does."""
    if config.implementation != "native":
        raise ValueError(f"{config.architecture}: transformers computes it, so there is no kernel plan")
    multiple = LEAVES * LEAF_MULTIPLE // rules.world if rules.exact_bits == "tp" else 1
    group: Any = SimpleNamespace(rank=0, size=rules.world, exact_bits=rules.exact_bits, width_multiple=multiple)
    kernels, meta, planner = select_kernels("cpu"), torch.device("meta"), Planner(rules)
    return DecoderForCausalLM(ModelContext(
        group, kernels, getattr(torch, dtype), meta, config, 1, planner=planner, adapters=adapters
    ))


def one_of_each(
    config: ModelConfig, rules: Rules, dtype: str, adapters: AdapterRoom | None = None
) -> tuple[DecoderForCausalLM, list[int]]:
    """rank_model with one layer of each signature, and how many layers each stands for."""
    counts = Counter(spec.signature for spec in config.layers)
    alike = {spec.signature: spec for spec in config.layers}
    model = rank_model(replace(config, layers=tuple(alike.values())), rules, dtype, adapters)
    return model, [counts[signature] for signature in alike]


@dataclass(frozen=True)
class LayerKind:
    """Layers that run the same operations."""

    count: int
    operations: tuple[Product, ...]


def layer_kinds(config: ModelConfig, rules: Rules, dtype: str) -> tuple[list[LayerKind], Product]:
    """The kinds of layers on rank 0 of rules.world, and the head. dtype: of activations, by torch's name."""
    model, counts = one_of_each(config, rules, dtype)
    found: Counter[tuple[Product, ...]] = Counter()
    for layer, count in zip(model.layers, counts, strict=True):
        found[layer.operations] += count
    return [LayerKind(count, operations) for operations, count in found.items()], model.lm_head.product


def lines(config: ModelConfig, rules: Rules, dtype: str, all_rows: list[int]) -> Iterator[str]:
    """Markdown: a table for each kind of layer, of what runs for each number of rows, and what kept other kernels
    away."""
    planner = Planner(rules)
    kinds, head = layer_kinds(config, rules, dtype)
    linears = [one for kind in kinds for one in kind.operations if one.choice is None] + [head]
    gemms = {one.gemm(rules.world) for one in linears}
    device, ranks = rules.device.name, f"{rules.world} rank" + "s" * (rules.world > 1)
    yield f"{config.architecture}, {dtype}, {ranks} of {device}: {len(config.layers)} layers; " + (
        f"products: {rules.table.describe(gemms)}, the nearest serve the others"
    )
    for kind in kinds:
        plans = {rows: planner.layer(kind.operations)[rows] for rows in all_rows}
        yield from ("", f"{kind.count} layers:", "")
        yield from _heading("operation", all_rows)
        for number, one in enumerate(kind.operations):
            yield f"| {_name(one)} | " + " | ".join(_cell(plan.launches[number]) for plan in plans.values()) + " |"
        between = ["complete stream" if plan.is_complete else "add + norm" for plan in plans.values()]
        yield "| between them | " + " | ".join(between) + " |"
        names = [one.name for one in kind.operations]
        whys = {rows: [each.why for each in (*plan.launches, plan)] for rows, plan in plans.items()}
        yield from _reasons([*names, "norms"], whys)
    launches = {rows: planner.launches(head)[rows] for rows in all_rows}
    yield from ("", *_heading("output head", all_rows))
    yield f"| {_name(head)} | " + " | ".join(map(_cell, launches.values())) + " |"


def _heading(first: str, all_rows: list[int]) -> tuple[str, str]:
    cells = [first, *(f"{rows:,} rows" if rows > 1 else "1 row" for rows in all_rows)]
    return f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"


def _name(one: Product) -> str:
    chosen = "" if one.choice is None else f", {one.choice.top_k} of {one.choice.num_experts} a token"
    return f"{one.name} {one.n:,} x {one.k:,} {one.dtype}" + chosen * one.is_of_experts


def _cell(launch: Launch) -> str:
    """Kernel and numbers, and what it computes besides."""
    if launch.with_experts:
        return "with experts"
    return f"{launch.config}" + "".join(f" + {name}" for name in INSIDE if getattr(launch, name))


def _reasons(names: list[str], whys: dict[int, list[str]]) -> Iterator[str]:
    """Each reason with the operations and rows that it holds for. whys: by rows, in the order of the names."""
    found: dict[tuple[str, str], list[int]] = {}
    for rows, all_whys in whys.items():
        for name, why in zip(names, all_whys, strict=True):
            if why not in ("", "measured", "nearest", "rule"):
                found.setdefault((name, why), []).append(rows)
    if found:
        yield ""
    for (name, why), alike in found.items():
        yield f"- {name}, {', '.join(f'{rows:,}' for rows in alike)} rows: {why}"
