#!/usr/bin/env python3
"""Products that store straight into the places of the sum behind them, against products stored locally.

    python scripts/bench_push.py --world 2 --model 8B --out logs/
    python scripts/bench_push.py --world 4 --model 32B --rows 1 4 16 64 --out logs/

First correctness: pushed products give the bits of local ones, from graphs of many kinds of calls and with ranks
delayed at random. Then layers of one rank without attention as one CUDA graph, us a layer, slowest rank, by rows:

- local, pushed: what the engine multiplies with, its own whole products of o and down stored locally or pushed;
- own local, own pushed: o and down by the whole products of our kernels that are fastest pushed, where that gains.

"same bits" says that both orders of a pair agree. Ends at --limit seconds, with what is done.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_ranks import EPS, MAX_SPINS, Rank, add_check_options, launch, rank_parser  # isort: skip  # forbids multicast
from bench_all_reduce import BANK, Case, check_graphs  # isort: skip

import bench_mid_gemm
import torch
from bench_mid_gemm import PARTS, TILES, Config, activated, product
from bench_tp_chain import NAMES, Chain, OutOfTime, Plan

from nanovllm.config import PUBLISHED_SHAPES, ModelConfig
from nanovllm.kernels.gemm import cublas_lt_rule, few_rows_rule
from nanovllm.kernels.gemm.decode import MidConfig
from nanovllm.kernels.gemm.skinny import GemmConfig, candidate_configs
from nanovllm.layers.few_rows import pushed_linear
from nanovllm.parallel.peer.all_reduce import PeerAllReduce

CHECKED_ROWS = (1, 3, 16, 24, 64)


def whole(config: Any) -> bool:
    """Whether it is of a kernel of ours that leaves no parts."""
    return isinstance(config, GemmConfig) or (isinstance(config, MidConfig) and config.splits == 1)


def own_configs(rows: int, n: int, k: int) -> list[Any]:
    """Whole products of our kernels to try."""
    if rows <= 16:
        return list(candidate_configs(rows, n, k))
    return [MidConfig(*tile) for tile in TILES if tile[1] < 2 * rows]


def chosen(part: str, rows: int, n: int, k: int) -> Any:
    """What the engine's rules multiply with."""
    algorithm = cublas_lt_rule.algorithms(part, n, k).get(rows)
    if algorithm is not None or rows > 16:
        return algorithm or bench_mid_gemm.chosen(part, rows, n, k)
    return few_rows_rule.choice(part, rows, n, k, item_size=2, tma=True, fused=False)


def short(config: Any) -> str:
    if isinstance(config, GemmConfig):
        return f"{config.kernel}{config.block_n}x{config.block_k}d{config.depth}/{config.split_k}"
    return bench_mid_gemm.short(config)


@dataclass(frozen=True)
class PushPlan(Plan):
    """push: whole products of o and down are pushed."""

    push: bool = False

    def describe(self) -> dict[str, str]:
        return {part: short(getattr(self, part)) for part in PARTS}


class PushChain(Chain):
    def run(self, plan: Any) -> torch.Tensor:
        x, rows, width = self.start, self.start.shape[0], self.shapes["o"][1]
        for w in self.layers:
            qkv = product(x, w["qkv"], plan.qkv)
            x = self.summed(qkv.view(-1)[: rows * width].view(rows, width), w["o"], plan.o, plan.push)
            x = self.summed(activated(x, w["gate_up"], plan.gate_up), w["down"], plan.down, plan.push)
        return x

    def summed(self, x: torch.Tensor, weight: torch.Tensor, config: Any, push: bool) -> torch.Tensor:
        """The product, its sum over the ranks, added to the residual and normalised, as the engine does it."""
        push = push and whole(config) and self.peer.path(x.shape[0]) == "one_shot"
        partial: Any = pushed_linear(x, weight, config, self.peer) if push else product(x, weight, config)
        dependent = isinstance(config, GemmConfig | MidConfig)
        args: Any = (partial, self.residual, self.gain, EPS)
        return self.peer.all_reduce_add_rms_norm(*args, dependent=dependent)[0]


class Pair(Case):
    """A pushed product and its sum; `expected`: the bits of the same through local memory."""

    def __init__(self, rank: Rank, peer: PeerAllReduce, weight: torch.Tensor, rows: int, config: Any) -> None:
        self.rank, self.peer, self.rows, self.kind = rank, peer, rows, f"{rows} rows pushed by {short(config)}"
        self.matrix, self.config = weight, config
        (hidden, k), device = weight.shape, rank.device
        own, same = (torch.Generator(device).manual_seed(rows * 131 + extra) for extra in (rank.rank, 99))
        self.mine = torch.randn(BANK, rows, k, device=device, generator=own).bfloat16()
        self.residual = torch.randn(BANK, rows, hidden, device=device, generator=same).bfloat16()
        self.weight = 1 + 0.1 * torch.randn(hidden, device=device, generator=same).bfloat16()
        self.pause = (0, 0, 0, 20_000)[(rows + rank.rank) % 4]
        outputs, self.errors, self.negative_zeros = [], list[str](), 0
        for i in range(BANK):
            partial = product(self.mine[i], weight, config)
            self.negative_zeros += int((partial.view(torch.int16) == -(2**15)).sum())
            local = self.sum(partial, self.residual[i].clone())
            pushed = self.call(self.mine[i], self.residual[i].clone())
            outputs.append(local)
            if not all(torch.equal(a, b) for a, b in zip(local, pushed, strict=True)):
                self.errors.append("other bits")
        self.expected = [torch.stack(column) for column in zip(*outputs, strict=True)]
        if not all(rank.same_bits(tensor) for tensor in self.expected):
            self.errors.append("ranks differ in bits")

    def sum(self, partial: Any, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.pause:
            torch.cuda._sleep(self.pause)
        return self.peer.all_reduce_add_rms_norm(partial, residual, self.weight, EPS, dependent=not self.pause)

    def call(self, addend: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.sum(pushed_linear(addend, self.matrix, self.config, self.peer), residual)


def check(rank: Rank, chain: PushChain) -> bool:
    """Pairs by several kernels in graphs with sums of other kinds."""
    peer, hidden = chain.peer, len(chain.gain)
    weights = {part: chain.layers[0][part] for part in ("o", "down")}
    for weight in weights.values():
        weight[3] = 0
        weight[3, 0] = 1e-40  # a column of numbers too small for bfloat16: zeros, half of them -0.0
    pairs = [
        Pair(rank, peer, weights["o" if rows % 16 else "down"], rows, config)
        for rows in CHECKED_ROWS
        for config in own_configs(rows, hidden, weights["o" if rows % 16 else "down"].shape[1])[:2]
    ]
    cases: list[Case] = [*pairs, *(Case(rank, peer, hidden, kind, rows) for kind, rows in (
        ("one_shot+norm", 1), ("one_shot+norm", 64), ("two_shot+norm", 5), ("keys", 256)
    ))]  # fmt: skip
    for case in cases:
        if case.errors:
            print(f"rank {rank.rank} {case.kind} {case.rows} rows: {case.errors}", flush=True)
    fine = rank.all_agree(not any(case.errors for case in cases))
    zeros = sum(pair.negative_zeros for pair in pairs)
    rank.say(f"{len(pairs)} pushed products, {zeros} x -0.0, against local ones:", "same bits" if fine else "WRONG")
    fine = fine and check_graphs(rank, peer, hidden, cases)
    places = peer.memory.block[: peer.memory.layout.scatter].view(torch.int16)
    clean = rank.all_agree(bool((places == -(2**15)).all()))
    rank.say("places left clean:", "right" if clean else "WRONG")
    return fine and clean


def same_bits(chain: PushChain, plan: PushPlan) -> bool:
    """Of a pass of layers, pushed or not, on all ranks."""
    one, other = (chain.result(replace(plan, push=push)) for push in (False, True))  # type: ignore[arg-type]
    return chain.rank.all_agree(torch.equal(one, other) and chain.rank.same_bits(one))


def lines_of(chain: PushChain, row_counts: list[int]) -> Iterator[dict[str, Any]]:
    """One line of the table after the other; us a layer. The second pass tries other configurations."""
    for search in (False, True):
        for rows in row_counts:
            chain.set_rows(rows)
            rule = PushPlan(**{part: chosen(part, rows, *chain.shapes[part]) for part in PARTS})
            best = replace(rule, push=True)
            if search:
                if chain.peer.path(rows) != "one_shot":
                    continue
                for part in ("o", "down"):
                    configs: list[Config] = own_configs(rows, *chain.shapes[part])
                    best = chain.improve(best, part, configs)  # type: ignore[assignment]
                if replace(best, push=False) == rule:
                    continue
            plans = [replace(best, push=push) for push in (False, True)]
            local, pushed = chain.again(plans)
            yield {
                "rows": rows,
                "what": "own" if search else "rule",
                "local": local,
                "pushed": pushed,
                "right": same_bits(chain, best),
                "path": chain.peer.path(rows),
                "by": {part: short(getattr(best, part)) + "*" * whole(getattr(best, part)) for part in PARTS},
            }


def shown(line: dict[str, Any]) -> str:
    numbers = f"{line['rows']:5d} {line['what']:5s}{line['local']:8.1f}{line['pushed']:8.1f}"
    by = "  ".join(f"{part} {line['by'][part]}" for part in PARTS)
    return f"{numbers}  {'same bits' if line['right'] else 'WRONG'}  {line['path']}  {by}"


@torch.inference_mode()
def work(rank: Rank) -> bool:
    options = rank.options
    config = ModelConfig.from_dict(PUBLISHED_SHAPES[f"Qwen3-{options.model}"])
    memory = rank.memory(config.hidden_size)
    with torch.cuda.stream(torch.cuda.Stream()):  # workspaces belong to a stream: the one that is captured
        chain = PushChain(rank, PeerAllReduce(memory, max_spins=MAX_SPINS), config)
        fine = check(rank, chain)
        text = f"{options.model}, {rank.world} ranks, {chain.shapes}; us a layer; * whole products of ours"
        text += f"\n{'rows':>5} {'':5s}{'local':>8}{'pushed':>8}"
        lines: list[dict[str, Any]] = []
        rank.say(text)
        try:
            for line in lines_of(chain, options.rows) if fine and not options.check_only else ():
                lines.append(line)
                rank.say(shown(line))
                if rank.rank == 0:
                    name = f"push_{options.model}_{rank.world}"
                    Path(options.out, f"{name}.json").write_text(json.dumps(lines, indent=1))
                    Path(options.out, f"{name}.txt").write_text("\n".join([text, *map(shown, lines)]) + "\n")
        except OutOfTime:
            rank.say("out of time")
        fine = fine and all(line["right"] for line in lines) and rank.all_agree(memory.aborted() == 0)
    rank.say("result:", "right" if fine else "WRONG")
    memory.close()
    return fine


def main() -> int:
    parser = rank_parser(__doc__, "bench_push", limit=118.0)
    parser.add_argument("--model", default="8B", choices=NAMES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32, 64, 96, 128])
    add_check_options(parser, 2000)
    return launch(work, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
