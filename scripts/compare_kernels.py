#!/usr/bin/env python3
"""Times kernels of two checkouts in turn on one GPU: what a change that is not meant to be felt does to them.

    git archive COMMIT | tar -x -C /tmp/before      (in a fresh folder)
    python scripts/compare_kernels.py /tmp/before [--turns 3]

Prints microseconds before and after, the least of all turns, and their ratio: kernels that round to e4m3, products of
FP8 rows, and decode attention between its neighbours in a layer. Shapes are those of Qwen3-8B. Takes a minute or two.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROWS = (1, 16, 64, 128, 256)
HIDDEN, WIDTH, HEADS, KV_HEADS, DIM, PAGE, CONTEXT = 4096, 12288, 32, 8, 128, 256, 900
COPIES = 24
"""Launches of a graph, over inputs that are larger than the L2 cache together."""


def first_module(*names: str) -> Any:
    """The first of these modules of nanovllm.kernels that the checkout has."""
    for name in names:
        try:
            return importlib.import_module(f"nanovllm.kernels.{name}")
        except ModuleNotFoundError:
            continue
    raise SystemExit(f"this checkout has none of {', '.join(names)}")


def bf16(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def product_cases() -> dict[str, list[Callable[[], object]]]:
    """Name -> the launches of a graph: kernels that round to e4m3, and products of FP8 rows."""
    import torch

    from nanovllm.kernels.fp8 import gemm
    from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
    from nanovllm.kernels.fp8.quantize import quantize_rows
    from nanovllm.kernels.pointwise import activation, norm
    from nanovllm.kernels.pointwise.norm import Norm

    add_norms = getattr(norm, "add_norms_fp8", partial(norm.add_norms, rounds=True))  # of an older checkout
    silu_mul = getattr(activation, "silu_mul_fp8", partial(activation.activation, kind="silu", gated=True, rounds=True))
    config, device = first_module("plan.config", "gemm.choice").GemmConfig, torch.device("cuda")
    stream = first_module("gemm.stream", "fp8.one_row")
    names = ("stream", "roles") if stream.__name__.endswith("stream") else ("quantized_row", "specialized")
    found: dict[str, list[Callable[[], object]]] = {}

    def weight(n: int, k: int) -> FP8Weight:
        values = torch.randint(0, 100, (n, k), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        return FP8Weight(values, torch.rand(n // 128, k // 128, device=device) / 1000, 128)

    gain = Norm(bf16(HIDDEN), 1e-6)
    for rows in ROWS:
        xs, kept, wide = [bf16(rows, HIDDEN) for _ in range(COPIES)], bf16(rows, HIDDEN), bf16(rows, 2 * WIDTH)
        found[f"quantize {rows}"] = [partial(quantize_rows, x) for x in xs]
        found[f"add_norms_fp8 {rows}"] = [partial(add_norms, x, kept, gain) for x in xs]
        found[f"silu_mul_fp8 {rows}"] = [partial(silu_mul, wide)] * COPIES
    row, many = bf16(1, HIDDEN), bf16(64, HIDDEN)
    gates_and_ups = [weight(2 * WIDTH, HIDDEN) for _ in range(3)]
    one = config(names[0], 16, block_k=512, stages=4)
    roles = config(names[1], 128, 64, 128, 4)
    rounded = FP8Rows(*quantize_rows(many)[:2], many.dtype)
    found["norm, gate and up, fp8 1"] = [
        partial(stream.linear, row, w, one, norm=gain, gated=True) for w in gates_and_ups * 4
    ]
    found["gate and up, fp8 64"] = [partial(gemm.linear, rounded, w, roles, gated=True) for w in gates_and_ups * 4]
    return found


def layer_cases() -> dict[str, list[Callable[[], object]]]:
    """Name -> the launches of a graph: decode attention between its neighbours in a layer."""
    import torch

    from nanovllm.kernels.attention.decode import DecodeAttention, DecodeScratch
    from nanovllm.kernels.attention.spec import AttentionSpec
    from nanovllm.kernels.pointwise.norm import Norm, add_norms
    from nanovllm.kernels.pointwise.rope import QKNormRope, qk_norm_rope_store

    lists = first_module("attention.decode_work_list", "attention.decode_plan")
    make_list = getattr(lists, "WorkList", None) or lists.DecodePlan  # of an older checkout
    device, norm = torch.device("cuda"), Norm(bf16(HIDDEN), 1e-6)
    found: dict[str, list[Callable[[], object]]] = {}
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5)
    how, cos_sin = QKNormRope(HEADS, KV_HEADS, DIM, rotary_dim=DIM), torch.rand(CONTEXT, DIM, device=device)
    for rows in ROWS:
        blocks = -(-CONTEXT // PAGE)
        k, v = (bf16(rows * blocks, KV_HEADS, PAGE, DIM) for _ in range(2))
        table = torch.arange(rows * blocks, dtype=torch.int32, device=device).view(rows, blocks)
        work_list = make_list(KV_HEADS, DIM, None, rows, CONTEXT, device)
        attention = DecodeAttention(spec, PAGE, work_list, DecodeScratch.for_specs({spec: work_list}, device))
        lengths = torch.full((rows,), CONTEXT, dtype=torch.int32, device=device)
        work_list.make(torch.arange(rows, dtype=torch.int32, device=device), lengths, rows)
        slots = (table[:, -1] * PAGE + (CONTEXT - 1) % PAGE).int()
        qkv, out, x = bf16(rows, (HEADS + 2 * KV_HEADS) * DIM), bf16(rows, HEADS, DIM), bf16(rows, HIDDEN)

        positions = lengths - 1

        def layer(x: Any, qkv: Any, caches: Any, where: Any, table: Any, attention: Any, out: Any) -> None:
            q = qk_norm_rope_store(qkv, how, *where, *caches, cos_sin=cos_sin)
            attention(q, *caches, table, CONTEXT, out)
            add_norms(out.view(len(x), -1), x, norm)

        around = (x, qkv, (k, v), (positions, slots), table, attention, out)
        found[f"rope, attention, norm {rows}"] = [partial(layer, *around)] * 12
    return found


def measure() -> dict[str, float]:
    """Microseconds of one launch of each case, with the package on the path."""
    from nanovllm.kernels.base.graph_timing import graph_us

    return {name: graph_us(calls, replays=20) for name, calls in (product_cases() | layer_cases()).items()}


def times_of(root: Path) -> dict[str, float]:
    """Times with the package of a checkout, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, __file__, str(root), "--only-here"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{root}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a folder with the older checkout")
    parser.add_argument("--turns", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--only-here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only_here:
        print(json.dumps(measure()))
        return 0
    turns = [(times_of(args.before.resolve()), times_of(ROOT)) for _ in range(args.turns)]
    print(f"{'us':32}{'before':>10}{'after':>10}{'ratio':>8}")
    for name in turns[0][1]:
        before, after = (min(turn[side][name] for turn in turns) for side in range(2))
        print(f"{name:32}{before:10.2f}{after:10.2f}{after / before:8.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
