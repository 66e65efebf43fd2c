#!/usr/bin/env python3
"""Layers of one rank under tensor parallelism, without attention: what multiplies best around sums through peer memory.

    python scripts/bench_tp_chain.py --world 2 --model 8B --out logs/
    python scripts/bench_tp_chain.py --world 4 --model 32B --rows 64 200 --out logs/

All products, sums and activations of a few layers as one CUDA graph, us a layer, slowest rank, by rows:

- plain: cuBLAS, as the sums have it without any of the below;
- parts: o and down by cuBLAS over parts of K where that is faster, which the sum adds up;
- own: also our kernels, one product after the other, each kept where it is faster; with sums launched dependently
  ("pdl") or not, whatever is faster in the end.

Correctness comes with them: plain's results up to rounding, the same bits on all ranks, or the line says WRONG. The
configurations named are for kernels/gemm/decode_rule.py.
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_ranks import EPS, MAX_SPINS, Rank, launch, rank_parser, time_call  # isort: skip  # it forbids multicast

import torch
from bench_mid_gemm import PARTS, Config, activated, candidates, product, short

from nanovllm.kernels.gemm.decode import SplitConfig
from nanovllm.layers.linear import HeadSplit
from nanovllm.model_config import ModelConfig
from nanovllm.models.published import PUBLISHED_SHAPES
from nanovllm.models.registry import parse_config
from nanovllm.parallel.peer import all_reduce
from nanovllm.parallel.peer.all_reduce import PeerAllReduce

ENOUGH_BYTES = 320 << 20  # of weights, that none is still in the cache when its turn comes again
GAIN = 0.995  # of the time before: what a configuration must bring to be taken
RESERVE = 30.0  # seconds before the limit in which nothing new is begun
NAMES = [name.removeprefix("Qwen3-") for name in PUBLISHED_SHAPES]


@dataclass(frozen=True)
class Plan:
    """What multiplies, and whether sums are launched dependently."""

    qkv: Config = None
    o: Config = None
    gate_up: Config = None
    down: Config = None
    pdl: bool = False

    def describe(self) -> dict[str, str]:
        return {part: short(getattr(self, part)) for part in PARTS} | {"pdl": "yes" if self.pdl else "no"}


class OutOfTime(Exception):
    pass


def shapes(config: ModelConfig, rank: int, world: int) -> dict[str, tuple[int, int]]:
    """[N, K] of this rank's weights in a layer."""
    heads = HeadSplit(config.num_attention_heads, config.num_key_value_heads, rank, world)
    hidden, size, dim = config.hidden_size, config.intermediate_size // world, config.head_dim
    qkv = (heads.local_heads + 2 * heads.local_kv_heads) * dim
    return {
        "qkv": (qkv, hidden),
        "o": (hidden, heads.local_heads * dim),
        "gate_up": (2 * size, hidden),
        "down": (hidden, size),
    }


class Chain:
    """Layers of one rank. o reads a part of qkv's output in place of attention's."""

    def __init__(self, rank: Rank, peer: PeerAllReduce, config: ModelConfig) -> None:
        self.rank, self.peer = rank, peer
        self.shapes = shapes(config, rank.rank, rank.world)
        layer_bytes = 2 * sum(n * k for n, k in self.shapes.values())
        count = min(config.num_hidden_layers, max(3, -(-ENOUGH_BYTES // layer_bytes)))
        generator = torch.Generator(rank.device).manual_seed(rank.rank)
        make = partial(torch.randn, device=rank.device, generator=generator)
        self.layers = [
            {part: (make(n, k) * (0.5 / k**0.5)).bfloat16() for part, (n, k) in self.shapes.items()}
            for _ in range(count)
        ]
        self.gain = torch.ones(config.hidden_size, device=rank.device, dtype=torch.bfloat16)
        self.us = cache(self._us)

    def set_rows(self, rows: int) -> None:
        same = torch.Generator(self.rank.device).manual_seed(rows)
        self.start = torch.randn(rows, len(self.gain), device=self.rank.device, generator=same).bfloat16()
        self.residual = self.start.clone()
        self.us = cache(self._us)

    def run(self, plan: Plan) -> torch.Tensor:
        all_reduce.PDL_ROWS = 256 if plan.pdl else 0
        x, rows, width = self.start, self.start.shape[0], self.shapes["o"][1]
        for w in self.layers:
            qkv = product(x, w["qkv"], plan.qkv)
            attended = qkv.view(-1)[: rows * width].view(rows, width)
            x = self._sum(product(attended, w["o"], plan.o))
            x = self._sum(product(activated(x, w["gate_up"], plan.gate_up), w["down"], plan.down))
        return x

    def _sum(self, partial: torch.Tensor) -> torch.Tensor:
        args: Any = (partial, self.residual, self.gain, EPS)
        return self.peer.all_reduce_add_rms_norm(*args)[0]

    def result(self, plan: Plan) -> torch.Tensor:
        """The hidden state [rows, hidden] after one pass."""
        self.residual.copy_(self.start)
        return self.run(plan).clone()

    def _us(self, plan: Plan, repeats: int = 7) -> float:
        """Of a layer, the slowest rank's, so that all ranks decide alike; nan where the plan cannot run."""
        left = self.rank.options.limit - RESERVE - (time.monotonic() - self.rank.begin)
        if not self.rank.all_agree(left > 0):
            raise OutOfTime
        self.residual.copy_(self.start)
        return time_call(self.rank, self.peer, lambda: self.run(plan), 1, repeats) / len(self.layers)

    def improve(self, plan: Plan, part: str, configs: Iterable[Config]) -> Plan:
        """`plan` with the fastest of `configs` for `part`, if one is faster than what it has."""
        best = plan
        for config in configs:
            change: dict[str, Any] = {part: config}
            trial = replace(plan, **change)
            if self.us(trial) < self.us(best) * (GAIN if best is plan else 1):
                best = trial
        return best

    def again(self, plans: Sequence[Plan]) -> list[float]:
        """us of each, best of turns: a chip that grows hot grows slow."""
        turns = [[self._us(plan, 11) for plan in plans] for _ in range(2)]
        return [min(times) for times in zip(*turns, strict=True)]


def right(chain: Chain, plans: Iterable[Plan]) -> bool:
    """Whether each of the plans, whose first is plain, gives its result up to rounding, the same bits on all ranks."""
    want, fine = None, True
    for plan in plans:
        got = chain.result(plan)
        want = got.double() if want is None else want
        error = ((got.double() - want).norm() / want.norm()).item()
        same = chain.rank.same_bits(got)
        if not chain.rank.all_agree(error < 0.05 and same):
            fine = False
            print(f"rank {chain.rank.rank}: {plan.describe()}: error {error:.4f}, same bits: {same}", flush=True)
    return fine and chain.rank.all_agree(chain.peer.memory.aborted() == 0)


def measure(chain: Chain, rows: int) -> dict[str, Any]:
    """One line of the table; us a layer."""
    chain.set_rows(rows)
    k = {part: chain.shapes[part][1] for part in PARTS}
    plain = Plan(pdl=rows <= 16)
    parts = plain
    for part in ("o", "down"):
        parts = chain.improve(parts, part, [c for c in candidates(part, rows, k[part]) if isinstance(c, SplitConfig)])
    own = []
    for pdl in (False, True):
        plan = replace(parts, pdl=pdl)
        for part in ("o", "down", "qkv", "gate_up"):
            plan = chain.improve(plan, part, candidates(part, rows, k[part]))
        own.append(plan)
    best = min([parts, *own], key=chain.us)
    plans = list(dict.fromkeys([plain, parts, *own]))
    fine = right(chain, plans)
    us = dict(zip(plans, chain.again(plans), strict=True))
    return {
        "rows": rows,
        "right": fine,
        "path": chain.peer.path(rows),
        "plain": us[plain],
        "parts": us[parts],
        "own": min(us[plan] for plan in own),
        "parts by": parts.describe(),
        "best by": best.describe(),
    }


def table(lines: Sequence[dict[str, Any]]) -> str:
    text = [f"{'rows':>5}{'plain':>8}{'parts':>8}{'own':>8}"]
    for line in lines:
        us = [line[name] for name in ("plain", "parts", "own")]
        text.append(
            f"{line['rows']:5d}"
            + "".join(f"{value:8.1f}" for value in us)
            + "  "
            + "  ".join(f"{part} {name}" for part, name in line["best by"].items())
            + (f"  (parts: o {line['parts by']['o']}, down {line['parts by']['down']}; {line['path']})")
            + ("" if line["right"] else "  WRONG")
        )
    return "\n".join(text)


@torch.inference_mode()
def work(rank: Rank) -> bool:
    options = rank.options
    config = parse_config(PUBLISHED_SHAPES[f"Qwen3-{options.model}"])
    memory = rank.memory(config.hidden_size)
    chain = Chain(rank, PeerAllReduce(memory, max_spins=MAX_SPINS), config)
    title = f"{options.model}, {rank.world} ranks, {len(chain.layers)} layers of {chain.shapes}; us a layer"
    rank.say(title)
    lines: list[dict[str, Any]] = []
    try:
        for rows in options.rows:
            lines.append(measure(chain, rows))
            rank.say(f"\n{table(lines[-1:])}")
            if rank.rank == 0:
                Path(options.out, f"tp_chain_{options.model}_{rank.world}.json").write_text(json.dumps(lines, indent=1))
    except OutOfTime:
        rank.say(f"out of time; done: {[line['rows'] for line in lines]} rows")
    if rank.rank == 0 and lines:
        text = f"{title}\n{table(lines)}"
        print(text, flush=True)
        Path(options.out, f"tp_chain_{options.model}_{rank.world}.txt").write_text(text + "\n")
    memory.close()
    return bool(lines) and all(line["right"] for line in lines)


def main() -> int:
    parser = rank_parser(__doc__, "bench_tp_chain", limit=100.0)
    parser.add_argument("--model", default="8B", choices=NAMES)
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 32, 64, 96, 128, 160, 192, 224, 256])
    return launch(work, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
