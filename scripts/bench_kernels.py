#!/usr/bin/env python3
"""Times kernels by case: every contender is checked first, then timed. A table comes last.

    python scripts/bench_kernels.py gemm --model 8B --rows 1 16 64        GEMMs, with what is fused to them
    python scripts/bench_kernels.py int4_gemm --model 8B --rows 1 16      the same with 4-bit weights
    python scripts/bench_kernels.py fp8_gemm --model 8B --rows 1 64 4096    with FP8 weights
    python scripts/bench_kernels.py attention --model 8B --batches 256xragged 1x576
    python scripts/bench_kernels.py sampling --rows 256
    python scripts/bench_kernels.py moe --model 30B-A3B --rows 1 256     routing and grouped GEMMs
    python scripts/bench_kernels.py all_reduce --ranks 4 --model 32B       needs a GPU for each rank
    python scripts/bench_kernels.py all_reduce --ranks 2 --check-only --share-gpus      on one GPU
    python scripts/bench_kernels.py gemm attention sampling --dry          small shapes on a CPU, no times

Times are microseconds: the median replay of a CUDA graph over inputs that together exceed the L2 cache, the least of
two turns, and the slowest rank's. A star marks what the engine takes. Exit status 0: every result was right.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CASES = ("gemm", "fp8_gemm", "int4_gemm", "attention", "sampling", "moe", "all_reduce")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--model", default="8B", help="a published size: its shapes, random weights")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share the model")
    parser.add_argument("--rows", type=int, nargs="+", help="default: by case")
    parser.add_argument("--batches", nargs="+", help="of attention: ROWSxKEYS, or ROWSxragged (100 to 1,800 keys)")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="of attention")
    parser.add_argument("--most", type=int, default=4, help="contenders shown in a line")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds after which ranks are ended")
    parser.add_argument("--iterations", type=int, default=20_000, help="all-reduces of the check with delayed ranks")
    parser.add_argument("--check-only", action="store_true", help="no times")
    parser.add_argument("--share-gpus", action="store_true", help="ranks take turns on fewer GPUs; check only")
    parser.add_argument("--dry", action="store_true", help="small shapes by Triton's interpreter on a CPU; no times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines there as well")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    options.check_only |= options.dry or options.share_gpus
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel
    import torch

    from bench_cases.harness import run_case, table
    from nanovllm.cli.bench.engine import SIZES, published_name

    name = published_name(options.model)
    if name is None:
        parser.error(f"--model {options.model}: not one of {SIZES}")
    options.model = name
    if not options.dry and not torch.cuda.is_available():
        parser.error("a GPU is needed; --dry does without")
    found, fine = {}, True
    for case in dict.fromkeys(options.cases):
        lines = found[case] = run_case(case, options)
        fine = fine and bool(lines) and all(line.get("right", True) for line in lines)
    for case, lines in found.items():
        print(f"\n{case}, {options.model}, {options.ranks} ranks\n{table(lines)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
