#!/usr/bin/env python3
"""Decode attention on one GPU over its tunings: checked first, then timed in CUDA graphs. Under two minutes.

    python scripts/bench_decode_attention.py --out logs/
    python scripts/bench_decode_attention.py --heads 2x8 4x4 --batches 256xragged 128xragged --budget 60

Heads are KV heads of a rank x query heads of each; batches rows x keys, ragged: 100 to 1,800 keys. Every call of a
graph reads keys and values of its own, together more than the L2 cache holds, and follows an ordinary kernel, the time
of which is taken off. Chunk and programs are varied first, the rest around the best two. "present" is the choice of
decode_plan.py, "by rows" its choice for as many rows of 8 KV heads; where no row is cut, also the time without the
merge kernel. A plan is paid once a step.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from nanovllm.kernels.attention.decode import DecodeAttention, decode_attention_reference
from nanovllm.kernels.attention.decode_plan import TUNED_KV_HEADS, DecodeConfig, tuning
from nanovllm.kernels.gemm.skinny_tune import graph_us
from nanovllm.startup.compile_pool import KernelCompiler, process_count
from nanovllm.startup.compile_server import settle_keys
from nanovllm.startup.dry_run import launching_nothing

READ_BYTES_PER_US = 4.4e6  # what reads reach on an H200
HEAD_DIM = PAGE = 128
MAX_MODEL_LEN, MAX_SPLITS, SHORTEST, LONGEST = 4096, 32, 100, 1800
ROTATION_BYTES, MOST_SETS = 200 << 20, 256
FEW_ROWS = 64
"""Up to so many rows smaller chunks are tried, and a program merges one head."""
CHUNKS = {True: (64, 128, 256, 512, 1024, 2048), False: (256, 512, 1024, 2048)}
PROGRAMS = {True: (2, 3, 4, 6, 8, 12), False: (2, 3, 4, 6, 8, 16)}
KERNELS: list[dict[str, Any]] = [
    {"block_n": n, "num_warps": warps, "num_stages": stages} for n, warps, stages in product((64, 32), (2, 4), (2, 3))
]
HEADS = ["8x2", "8x4", "4x2", "4x4", "2x8"]
BATCHES = ["256xragged", "192xragged", "128xragged", "96xragged", "64xragged", "32xragged", "256x560", "64x600",
           "16xragged", "1x576"]  # fmt: skip


@dataclass
class Case:
    """A batch over `tables`, one for each call of a graph: q [rows, Hq, D], caches [blocks, Hkv, PAGE, D]."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: list[torch.Tensor]
    row_slot: torch.Tensor
    context_lens: torch.Tensor
    longest: int
    reads_us: float
    out: torch.Tensor
    before: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.q.shape[0]


def make_case(batch: str, num_kv_heads: int, group: int) -> Case:
    rows_text, keys = batch.split("x")
    rows, host = int(rows_text), torch.Generator().manual_seed(7)
    if keys == "ragged":
        lens = torch.randint(SHORTEST, LONGEST + 1, (rows,), generator=host, dtype=torch.int32)
    else:
        lens = torch.full((rows,), int(keys), dtype=torch.int32)
    size = int(lens.sum()) * num_kv_heads * HEAD_DIM * 2 * 2
    num_sets = min(MOST_SETS, max(2, -(-ROTATION_BYTES // size)))
    counts = -(-lens // PAGE)
    blocks = torch.randperm(num_sets * int(counts.sum()), generator=host).int()
    tables = []
    for of_set in blocks.chunk(num_sets):
        table = torch.zeros(rows, MAX_MODEL_LEN // PAGE, dtype=torch.int32)
        table[torch.arange(table.shape[1]) < counts[:, None]] = of_set
        tables.append(table.cuda())
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    k, v = (torch.randn(len(blocks), num_kv_heads, PAGE, HEAD_DIM, **made) for _ in range(2))
    # As the layers pass it: a view into the packed query, key and value projections.
    num_q_heads = num_kv_heads * group
    q = torch.randn(rows, num_q_heads + 2 * num_kv_heads, HEAD_DIM, **made)[:, :num_q_heads]
    row_slot = torch.arange(rows, dtype=torch.int32, device="cuda")
    out, before = torch.zeros(q.shape, **made), torch.zeros(1024, **made)
    return Case(q, k, v, tables, row_slot, lens.cuda(), int(lens.max()), size / READ_BYTES_PER_US, out, before)


def build(case: Case, config: DecodeConfig | None) -> DecodeAttention:
    """With the engine's own tuning for None. A given one has the same MAX_SPLITS whatever its chunks, which saves
    compiling."""
    num_kv_heads = case.k_cache.shape[1]
    limit = MAX_MODEL_LEN if config is None else MAX_SPLITS * config.min_chunk
    device = case.q.device
    return DecodeAttention(case.q.shape[1], num_kv_heads, HEAD_DIM, PAGE, case.num_rows, limit, device, config)


def plan(case: Case, attention: DecodeAttention) -> None:
    attention.plan(case.row_slot, case.context_lens, case.num_rows)


def run(case: Case, attention: DecodeAttention, table: torch.Tensor, bound: int) -> None:
    attention(case.q, case.k_cache, case.v_cache, table, bound, case.out)


def call_us(case: Case, call: Callable[[torch.Tensor], object]) -> float:
    """Of `call(table)` behind an ordinary kernel."""

    def behind_another(table: torch.Tensor) -> None:
        case.before.zero_()
        call(table)

    return graph_us([partial(behind_another, table) for table in case.tables])


def attention_us(case: Case, attention: DecodeAttention, alone_us: float) -> dict[str, float]:
    """`us`, and `unsplit_us` where no row is cut: without the merge kernel."""
    plan(case, attention)
    times = {"us": call_us(case, lambda t: run(case, attention, t, attention.max_model_len)) - alone_us}
    if case.longest <= attention._config(case.num_rows).unsplit_context_len:
        times["unsplit_us"] = call_us(case, lambda t: run(case, attention, t, case.longest)) - alone_us
    return times


def first_candidates(rows: int) -> list[DecodeConfig]:
    few = rows <= FEW_ROWS
    merge_heads = 1 if few else 8
    pairs = product(CHUNKS[few], PROGRAMS[few])
    return [DecodeConfig(min_chunk=c, programs_per_sm=p, merge_heads=merge_heads, **KERNELS[0]) for c, p in pairs]


def short(config: DecodeConfig) -> str:
    c = config
    return f"{c.min_chunk}k p{c.programs_per_sm} n{c.block_n} w{c.num_warps} s{c.num_stages} m{c.merge_heads}"


def warm(heads: list[tuple[int, int]], batches: list[str]) -> None:
    """Has every kernel compiled, side by side, before the first is launched."""
    settle_keys()
    processes = process_count(len(os.sched_getaffinity(0)))
    if processes == 0:
        return
    compiler = KernelCompiler(processes)
    try:
        # Programs and keys do not matter to what is compiled, and rows but to the plan and to which choices there are.
        small = {rows: f"{rows}x{PAGE}" for rows in sorted({int(batch.split("x")[0]) for batch in batches})}
        with launching_nothing(compiler.submit):
            for num_kv_heads, group in heads:
                for rows, batch in small.items():
                    case = make_case(batch, num_kv_heads, group)
                    by_chunk = {config.min_chunk: config for config in first_candidates(rows)}
                    configs: list[DecodeConfig | None] = [None, by_rows(rows), *by_chunk.values()]
                    if rows == min(small):
                        configs += [replace(first_candidates(rows)[0], **kernel) for kernel in KERNELS]
                    for config in configs:
                        attention = build(case, config)
                        plan(case, attention)
                        run(case, attention, case.tables[0], attention.max_model_len)
        if not compiler.wait(120):
            print("compiled one by one:", "; ".join(compiler.failures))
    finally:
        compiler.close()


def by_rows(rows: int) -> DecodeConfig:
    return next(config for most, config in tuning(TUNED_KV_HEADS) if most is None or rows <= most)


def check(num_kv_heads: int, group: int) -> None:
    """Every kernel against the reference, on rows that are cut and rows that are not. Ends the run where one is off."""
    case = make_case("16xragged", num_kv_heads, group)
    table = case.tables[0]
    args = (case.q, case.k_cache, case.v_cache, case.row_slot, case.context_lens, table, HEAD_DIM**-0.5)
    want = decode_attention_reference(*args)
    configs = [config for _, config in tuning(num_kv_heads)]
    configs += [replace(first_candidates(16)[2], **kernel) for kernel in KERNELS]
    for config in configs:
        attention = build(case, config)
        plan(case, attention)
        case.out.fill_(float("nan"))
        run(case, attention, table, attention.max_model_len)
        error = float((case.out.float() - want).norm() / want.norm())
        if not error < 1e-2:
            sys.exit(f"WRONG {num_kv_heads}x{group} {config}: relative error {error:.1e}")
        if case.longest <= config.unsplit_context_len:
            case.out.fill_(float("nan"))
            run(case, attention, table, case.longest)
            if not float((case.out.float() - want).norm() / want.norm()) < 1e-2:
                sys.exit(f"WRONG {num_kv_heads}x{group} {config}: without the merge")


def measure(case: Case, deadline: float) -> dict[str, Any]:
    """The present choice and every candidate until time.monotonic() passes `deadline`."""
    alone_us = call_us(case, lambda table: None)
    present = build(case, None)
    times = attention_us(case, present, alone_us)
    plan_us = graph_us([lambda: plan(case, present)] * 8)
    timed: dict[DecodeConfig, dict[str, float]] = {}

    def time_all(configs: list[DecodeConfig]) -> list[DecodeConfig]:
        """Of all timed so far, the fastest first."""
        for config in configs:
            if config not in timed and time.monotonic() < deadline:
                timed[config] = attention_us(case, build(case, config), alone_us)
        return sorted(timed, key=lambda config: min(timed[config].values()))

    time_all([by_rows(case.num_rows)])
    best = time_all(first_candidates(case.num_rows))[:2]
    order = time_all([replace(config, **kernel) for config in best for kernel in KERNELS])
    return {
        "reads_us": case.reads_us,
        "plan_us": plan_us,
        "present": {"config": asdict(present._config(case.num_rows)), **times},
        "by_rows": timed.get(by_rows(case.num_rows)),
        "candidates": [{"name": short(config), "config": asdict(config), **timed[config]} for config in order],
    }


def shown(times: dict[str, float] | None) -> str:
    if times is None:
        return "-"
    return f"{times['us']:.1f}" + (f" ({times['unsplit_us']:.1f} unmerged)" if "unsplit_us" in times else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="+", default=HEADS, help="KV heads x query heads of each")
    parser.add_argument("--batches", nargs="+", default=BATCHES, help="rows x keys, or rows x ragged")
    parser.add_argument("--budget", type=float, default=100.0, help="seconds; what is left is shared out among cases")
    parser.add_argument("--most", type=int, default=4, help="configurations shown of a case")
    parser.add_argument("--out", type=Path, help="a folder for decode_attention.json")
    args = parser.parse_args()
    begin = time.monotonic()
    torch.manual_seed(0)
    heads = [(int(a), int(b)) for a, b in (text.split("x") for text in args.heads)]
    warm(heads, args.batches)
    for layout in heads:
        check(*layout)
    print(f"compiled and checked after {time.monotonic() - begin:.0f} s", flush=True)
    cases = [(layout, batch) for layout in heads for batch in args.batches]
    results = []
    for done, (layout, batch) in enumerate(cases):
        now = time.monotonic()
        left = begin + args.budget - now
        found = measure(make_case(batch, *layout), now + left / (len(cases) - done))
        name = f"{layout[0]}x{layout[1]} {batch}"
        results.append({"case": name, **found})
        ranking = "  ".join(f"{shown(c)} {c['name']}" for c in found["candidates"][: args.most])
        print(
            f"{name:16s} reads {found['reads_us']:6.1f}, present {shown(found['present'])}, by rows "
            f"{shown(found['by_rows'])}, plan {found['plan_us']:.1f} | {ranking} | of {len(found['candidates'])}",
            flush=True,
        )
        if args.out:  # after every case: what is known survives a run that is cut short
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "decode_attention.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
