#!/usr/bin/env python3
"""Ways to share out a two-shot sum of few rows: checks every one of them, then times them behind a small product.

    python scripts/bench_two_shot.py --world 4 --out logs/                     hidden 5120, rows of decode steps
    python scripts/bench_two_shot.py --world 2 --hidden 4096 --out logs/       two ranks
    python scripts/bench_two_shot.py --world 4 --large --out logs/             prompts: no loss there?

A column of the table is parts a row x warps a program ("whole": the kernel for whole rows); us of a sum with residual
and norm, the residual left with its owners, the product's time taken off, slowest rank. Exit status 0: no sum was
wrong.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_ranks import EPS, MAX_SPINS, Rank, launch, time_call  # isort: skip  # forbids multicast
from bench_ranks import add_check_options, rank_parser  # isort: skip
from bench_all_reduce import Case, check  # isort: skip

import torch

from nanovllm.parallel.peer.all_reduce import PeerAllReduce, TwoShotPlan

DECODE_ROWS, TWO_RANKS_ROWS, LARGE_ROWS = (64, 96, 128, 160, 192, 224, 256), (128, 256, 512), (512, 2048, 8192)
PRODUCT_WIDTH, CALLS = 1024, 40


class PlanCase(Case):
    """A kind of call by one plan."""

    def __init__(
        self, rank: Rank, peer: PeerAllReduce, hidden: int, kind: str, rows: int, plan: TwoShotPlan | None
    ) -> None:
        self.plan = plan
        super().__init__(rank, peer, hidden, f"two_shot{kind}", rows)
        self.errors = [f"{name(hidden, plan)}: {error}" for error in self.errors]

    def call(self, addend: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.peer.plan_for = lambda rows: self.plan
        return super().call(addend, residual)


def plans_for(hidden: int) -> list[TwoShotPlan | None]:
    """Parts must be multiples of 16 bytes; with 512 columns a warp a lane has two accesses for each source's row, with
    128 the sources are spread over the warps."""
    plans = [TwoShotPlan(split) for split in (1, 2, 4, 5, 8)]
    plans += [TwoShotPlan(1, 512), TwoShotPlan(2, 512), TwoShotPlan(4, 128), TwoShotPlan(5, 128)]
    return [None, *(plan for plan in plans if hidden % (8 * plan.split) == 0)]


def name(hidden: int, plan: TwoShotPlan | None) -> str:
    return "whole" if plan is None else f"{plan.split}x{plan.warps(hidden)}"


def cases_of(rank: Rank, peer: PeerAllReduce, hidden: int, plans: Sequence[TwoShotPlan | None]) -> list[Case]:
    """Every plan with parts, without a residual, and with rows that fill neither units nor programs."""
    kinds = [("+norm", 192), ("+norm, halves", 97), ("+norm", 255), ("+norm, no residual", 6)]
    cases: list[Case] = [PlanCase(rank, peer, hidden, *kind, plan) for plan in plans for kind in kinds]
    return [*cases, Case(rank, peer, hidden, "one_shot+norm", 33), Case(rank, peer, hidden, "keys", 256)]


def time_line(
    rank: Rank, peer: PeerAllReduce, hidden: int, rows: int, parts: int, plans: Sequence[TwoShotPlan | None]
) -> list[float]:
    """us of a call by each plan; the product is timed first, alone."""
    generator = torch.Generator(rank.device).manual_seed(rank.rank)
    normal = partial(torch.randn, device=rank.device, generator=generator)
    x, residual = normal(rows, hidden).bfloat16(), normal(rows, hidden).bfloat16()
    if parts > 1:
        x = normal(parts, rows, hidden)
    gain = torch.ones(hidden, device=rank.device, dtype=torch.bfloat16)
    left = torch.zeros(rows, PRODUCT_WIDTH, device=rank.device, dtype=torch.bfloat16)
    right = torch.zeros(PRODUCT_WIDTH, hidden, device=rank.device, dtype=torch.bfloat16)
    product = torch.empty(rows, hidden, device=rank.device, dtype=torch.bfloat16)
    calls = CALLS if rows <= 512 else 10

    def step(plan: TwoShotPlan | None) -> None:
        torch.mm(left, right, out=product)
        peer.plan_for = lambda rows: plan
        peer.all_reduce_add_rms_norm(x, residual, gain, EPS, path="two_shot")

    alone = time_call(rank, peer, lambda: torch.mm(left, right, out=product), calls)
    return [time_call(rank, peer, partial(step, plan), calls) - alone for plan in plans]


def table(title: str, names: Sequence[str], lines: Sequence[tuple[int, int, list[float]]]) -> str:
    text = [title, "rows parts" + "".join(f"{word:>7}" for word in names)]
    text += [f"{rows:4d} {parts:5d}" + "".join(f"{us:7.1f}" for us in times) for rows, parts, times in lines]
    return "\n".join(text)


@torch.inference_mode()
def work(rank: Rank) -> bool:
    options = rank.options
    hidden = options.hidden
    plans = plans_for(hidden)
    memory = rank.memory(hidden)
    peer = PeerAllReduce(memory, max_spins=MAX_SPINS)
    fine = check(rank, peer, hidden, cases_of(rank, peer, hidden, plans))
    lines = []
    rows = LARGE_ROWS if options.large else DECODE_ROWS if rank.world > 2 else TWO_RANKS_ROWS
    for parts in (1, 2) if fine and not options.check_only else ():
        for count in rows:
            lines.append((count, parts, time_line(rank, peer, hidden, count, parts, plans)))
    if rank.rank == 0 and lines:
        title = f"{rank.world} ranks, hidden {hidden}, us of a sum behind a product, slowest rank; parts x warps"
        text = table(title, [name(hidden, plan) for plan in plans], lines)
        Path(options.out, f"two_shot_{rank.world}_{hidden}{'_large' if options.large else ''}.txt").write_text(text)
        print(text, flush=True)
    fine = fine and memory.aborted() == 0
    memory.close()
    rank.say("result:", "right" if fine else "WRONG")
    return fine


def main() -> int:
    parser = rank_parser(__doc__, "bench_two_shot", limit=170.0, world=4)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--large", action="store_true", help="rows of prompts")
    add_check_options(parser, 10_000)
    return launch(work, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
