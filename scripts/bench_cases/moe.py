"""A mixture of experts by rows: routing, and each of its two grouped GEMMs in the tiles of the engine and in others.

Choices are uniform, so that the least time is that of reading every expert that somebody chose.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from bench_cases.harness import Line, Point, Setup, compare
from nanovllm.kernels import select_kernels
from nanovllm.kernels.moe.experts import ExpertActivation
from nanovllm.kernels.moe.routing import Routing, TopK, route_reference
from nanovllm.kernels.plan.config import TILE_ROWS, GemmConfig
from nanovllm.kernels.plan.rules import expert_tiles
from nanovllm.model_config import MoEConfig

ROWS = (1, 4, 16, 64, 256, 1024, 4096)
SHARED_BYTES = 220 << 10


class Experts:
    """The weights of several layers, one rank's, and some rows that chose among them."""

    def __init__(self, setup: Setup, moe: MoEConfig, hidden: int, rows: int) -> None:
        width = moe.intermediate_size // setup.options.ranks
        self.kernels, self.rows, self.top_k = select_kernels(setup.device, interpret=setup.dry), rows, moe.top_k
        self.num_experts = moe.num_experts
        self.nbytes = {"gate_up": 2 * width * hidden, "down": hidden * width}
        self.num_sets = setup.sets(self.num_experts * width * hidden * setup.dtype.itemsize, most=4)
        sizes = {"gate_up": (2 * width, hidden), "down": (hidden, width)}
        self.weights = {
            name: [setup.randn(moe.num_experts, n, k, scale=k**-0.5, seed=seed) for seed in range(self.num_sets)]
            for name, (n, k) in sizes.items()
        }
        self.x, self.h = setup.randn(rows, hidden, seed=1000), setup.randn(rows * moe.top_k, width, seed=1001)
        self.logits = setup.randn(1, rows, moe.num_experts, seed=1002).float()
        self.options = TopK(moe.num_experts, moe.top_k, renormalise=moe.renormalise)
        self.part_dtype = torch.float32 if rows <= TILE_ROWS else setup.dtype

    def routing(self, block_m: int) -> Routing:
        return route_reference(self.logits, self.options, block_m)

    def run(self, name: str, config: GemmConfig, routing: Routing, index: int) -> torch.Tensor:
        weight = self.weights[name][index]
        if name == "gate_up":
            return self.kernels.expert_gate_up(self.x, weight, routing, config, ExpertActivation())
        return self.kernels.expert_down(self.h, weight, routing, config, self.part_dtype)

    def route(self, block_m: int, index: int) -> torch.Tensor:
        return self.kernels.route(self.logits, self.options, block_m).weights


def moe(setup: Setup) -> Iterator[Line]:
    model = setup.model
    hidden, experts = model.hidden_size, model.moe
    if setup.dry:
        hidden, experts = 64, MoEConfig(6, 2, 32)
    elif experts is None:
        raise ValueError(f"--model {setup.options.model}: must have experts, as Qwen3-30B-A3B has")
    for rows in setup.rows(ROWS, (1, 3)):
        case = Experts(setup, experts, hidden, rows)
        gate_up, down = expert_tiles(rows * experts.top_k, experts.num_experts, str(setup.dtype).removeprefix("torch."))
        labels = {"rows": rows, "experts_read": int((case.routing(1 << 30).tiles[:, 0] >= 0).sum())}
        call = partial(case.route, down.block_m)
        yield compare(setup, Point({"what": "route", **labels}, {"engine": call}, tolerance=1e-5))
        for name, config in (("gate_up", gate_up), ("down", down)):
            configs = dict.fromkeys([config, *([] if setup.dry else contenders(config, name == "gate_up"))])
            routings = {one.block_m: case.routing(one.block_m) for one in configs}
            flops = 2.0 * rows * experts.top_k * case.nbytes[name]
            nbytes = labels["experts_read"] * case.nbytes[name] * setup.dtype.itemsize
            yield compare(
                setup,
                Point(
                    labels={"what": name, **labels},
                    contenders={
                        name_of(one): partial(case.run, name, one, routings[one.block_m]) for one in configs
                    },
                    num_sets=case.num_sets,
                    limit_us=setup.limit_us(nbytes, flops),
                    chosen=name_of(config),
                ),
            )


def contenders(engine: GemmConfig, is_gated: bool) -> Iterator[GemmConfig]:
    """Around what the engine takes. The order of positions depends on the experts alone, so results are comparable."""
    halves = (max(16, engine.block_m // 2), engine.block_m, min(128, engine.block_m * 2))
    for block_m, block_n, block_k, stages in product(dict.fromkeys(halves), (32, 64, 128, 256), (64, 128), (3, 4, 6)):
        rows = block_n * (2 if is_gated else 1)
        fits = 2 * (block_m + rows) * block_k * stages <= SHARED_BYTES
        if fits and rows * block_k >= 4096 and block_m * rows <= 128 * 256:
            warps = 8 if block_m * rows >= 128 * 128 else 4
            yield GemmConfig("tile", block_n, block_m, block_k, stages, num_warps=warps)


def name_of(config: GemmConfig) -> str:
    return f"{config.block_m}x{config.block_n}x{config.block_k}x{config.stages}w{config.num_warps}"
