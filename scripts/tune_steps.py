"""Chooses what multiplies in decode steps by timing whole steps, and writes a table of GEMM choices.

    python scripts/tune_steps.py --model Qwen3-8B --out choices.json
    python scripts/tune_steps.py --model /path/to/checkpoint --tensor-parallel-size 2 --rows 2 4 8 16 --budget 120
    python scripts/tune_steps.py --model Qwen3-32B --tensor-parallel-size 2 --out choices.json --hf-overrides \\
        '{"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 12800,
                       "vocab_size": 75968, "eos_token_id": 7}'

The last is what each of four ranks holds of 32B, on two GPUs: half a model over half as many ranks. Weights are random,
for their values do not matter.

Each GEMM in turn takes every contender, inside steps with attention, norms and all-reduces, and keeps what makes the
step shortest: kernels that start early help or hinder their neighbours, which a GEMM by itself does not show. The file
serves as `kernel_choices`, or as a table of the package (nanovllm/kernels/plan/tuned); what it holds already, of other
models, is kept. Needs a GPU for each rank; some 10 s for a number of rows, and twice that where kernels are compiled.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nanovllm import LLM, SamplingParams
from nanovllm.cli.bench.engine import add_engine_options, engine_options
from nanovllm.cli.options import Parser
from nanovllm.kernels.plan.config import (
    FP8,
    LIBRARY,
    SHARED_BYTES,
    SKINNY_ROWS,
    STREAM_ROWS,
    SUMMED,
    TILE_ROWS,
    Choices,
    Gemm,
    GemmConfig,
    Kernel,
    Ranges,
    streaming,
    with_roles,
)
from nanovllm.kernels.plan.fits import why_not
from nanovllm.kernels.plan.plan import choose
from nanovllm.kernels.plan.table import GemmTable, load, ranges_of, save
from nanovllm.layers.linear import ParallelLinear
from nanovllm.wire.shapes import decode_buckets

GAIN = 0.0015
"""Share of a step that a choice must save, twice: less is noise."""

Timer = Callable[[Choices, int], float]
"""Microseconds of a step with these choices, over so many replays."""

_FMA_ONE_ROW = [
    (16, 512, 3, 4), (16, 1024, 2, 8), (4, 1024, 3, 2), (8, 1024, 3, 4), (8, 512, 4, 4), (16, 512, 2, 4),
    (4, 512, 4, 2), (8, 512, 2, 4), (8, 2048, 1, 8), (4, 2048, 2, 4),
]  # fmt: skip
_FMA_TWO_ROWS = [(16, 512, 1, 4), (8, 1024, 3, 4), (16, 1024, 1, 4)]
"""(weight rows, columns of a step, stages, warps)"""
_DECODE = [
    (64, 16, 256, 5, 4), (64, 32, 256, 4, 4), (32, 64, 256, 4, 4), (64, 64, 128, 6, 4), (64, 128, 128, 4, 4),
]  # fmt: skip
_DECODE_GATED = [
    (64, 32, 128, 5, 4), (32, 64, 128, 6, 4), (64, 64, 128, 4, 4), (128, 64, 64, 5, 8), (64, 128, 64, 6, 8),
    (64, 32, 64, 5, 4), (16, 64, 128, 6, 4),
]  # fmt: skip
"""(weight rows, rows, columns of a step, stages, warps)"""
_SHARING = [
    (64, 16, 256, 2, 4), (64, 16, 128, 5, 4), (64, 32, 128, 4, 4), (32, 64, 128, 4, 4), (64, 64, 128, 3, 4),
    (64, 128, 64, 4, 4), (64, 128, 128, 2, 4),
]  # fmt: skip
_SHARING_GATED = [
    (64, 16, 128, 2, 4), (64, 16, 64, 6, 4), (64, 32, 64, 5, 4), (32, 64, 64, 6, 4), (64, 64, 64, 4, 4),
    (64, 128, 64, 3, 8),
]  # fmt: skip
"""Tiles as those of _DECODE, with rings of at most 113 KB: two programs share a multiprocessor, so that those of the
next product fetch their first weights while this one ends."""
_FP8 = {
    16: [(64, 16, 128, 6, 4), (64, 16, 256, 4, 4)],
    32: [(64, 32, 128, 5, 4), (64, 32, 256, 4, 4)],
    64: [(64, 64, 128, 5, 4), (64, 64, 256, 3, 4)],
    256: [(64, 128, 128, 3, 4), (64, 128, 256, 2, 4)],
}
"""Tiles by the most rows; each as in _DECODE."""
_FP8_GATED = {
    16: [(64, 16, 128, 5, 4), (64, 16, 256, 3, 4)],
    32: [(64, 32, 128, 5, 4), (64, 32, 256, 3, 4)],
    64: [(64, 64, 128, 4, 4), (64, 64, 256, 2, 4)],
    256: [(64, 128, 128, 3, 8)],
}
_FP8_ROLES = [(64, 64, 6), (128, 64, 4), (64, 128, 8), (128, 128, 4), (128, 128, 6), (64, 256, 5), (128, 256, 4)]
"""(weight rows, rows, stages)"""
_FP8_ONE_ROW = [(2, 8), (4, 8), (4, 6), (4, 4), (4, 3), (4, 2), (8, 4), (8, 3)]
_STREAM = [(4, 4), (4, 8), (8, 3), (8, 6), (16, 3)]
"""(warps, stages), of one row and of several."""
_STREAM_WIDE = [(4, 2), (4, 3), (4, 4), (4, 5), (8, 3)]
"""The same, with two groups of columns a warp and step."""
_REGISTERS = (0, 96, 128, 144, 168, 224, 255)
"""Limits of a thread's registers; 0: the compiler's."""
_INT4 = {
    16: [(128, 5, 4), (64, 6, 4)],
    32: [(128, 4, 8), (64, 5, 4)],
    64: [(128, 3, 8), (64, 4, 4)],
    128: [(64, 3, 4), (128, 3, 8)],
}
"""Tiles by their rows: (weight rows, stages, warps)."""
_INT4_ONE_ROW = [(64, 2, 4), (32, 3, 4), (32, 4, 4), (32, 3, 8), (16, 3, 8), (16, 4, 8), (16, 6, 4), (32, 4, 8)]
"""(weight rows, stages, warps)"""


def int4_contenders(gemm: Gemm, rows: int) -> list[GemmConfig]:
    """Kernels that are worth timing for `rows` rows of a GEMM by 4-bit weights."""
    block_m = next((size for size in _INT4 if rows <= size), 128)
    kernels: tuple[Kernel, ...] = ("int4", "int4_whole") if gemm.kind in SUMMED else ("int4_whole",)
    found = [
        GemmConfig(kernel, n, block_m, 128, stages, split_k, warps)
        for n, stages, warps in _INT4[block_m] for kernel in kernels for split_k in (1, 2, 4, 8)
        if (gemm.kind in SUMMED) <= (split_k > 1) and not (gemm.kind == "gate_up" and split_k > 2)
    ]  # fmt: skip
    if rows == 1:
        found += [streaming(warps, stages, n) for n, stages, warps in _INT4_ONE_ROW]
    return [LIBRARY] * (rows > 64) + [config for config in found if not why_not(gemm, config)]


def contenders(gemm: Gemm, rows: int) -> list[GemmConfig]:
    """Kernels that are worth timing for `rows` rows of a GEMM; the library first, then our skinny kernels."""
    found = [LIBRARY]
    if gemm.dtype == FP8:
        by_rows = _FP8_GATED if gemm.kind == "gate_up" else _FP8
        if rows == 1:
            found += [streaming(*sizes) for sizes in _FP8_ONE_ROW]
        if 1 < rows <= STREAM_ROWS:
            found += [streaming(*sizes, columns=256) for sizes in _STREAM_WIDE]
            found += [streaming(*sizes) for sizes in _STREAM]
        for n, m, k, stages, warps in next(tiles for most, tiles in by_rows.items() if rows <= most):
            found += [GemmConfig("tile", n, m, k, stages, split_k, warps) for split_k in (1, 2, 3, 4)]
        found += [with_roles(*sizes, split_k) for sizes in _FP8_ROLES if rows > 1 for split_k in (1, 2, 4)]
        return [config for config in found if not why_not(gemm, config)]
    if rows <= SKINNY_ROWS:
        for n, k, stages, warps in _FMA_ONE_ROW if rows == 1 else _FMA_TWO_ROWS:
            found.append(GemmConfig("fma", n, block_k=k, stages=stages, num_warps=warps))
    if 1 < rows <= STREAM_ROWS:
        found += [streaming(*sizes, columns=64) for sizes in _STREAM]
        found += [streaming(*sizes, columns=128) for sizes in _STREAM_WIDE]
    if 1 < rows <= (16 if gemm.kind == "head" else TILE_ROWS):
        tiles = _DECODE_GATED + _SHARING_GATED if gemm.kind == "gate_up" else _DECODE + _SHARING
        for n, m, k, stages, warps in tiles:
            if min(rows, 32) <= max(m, 16) * 4 and m <= max(64, 2 * rows):
                found += [GemmConfig("tile", n, m, k, stages, split_k, warps) for split_k in (1, 2, 4)]
    found.append(GemmConfig("split", split_k=2))
    normed_rows = rows if gemm.fused and gemm.kind in ("qkv", "gate_up") else 0
    return [config for config in found if not why_not(gemm, config, normed_rows=normed_rows)]


def skinny(gemm: Gemm, rows: int, rank: int) -> GemmConfig | None:
    """The first (rank 0) or last (-1) skinny contender for a layer's product."""
    found = [config for config in contenders(gemm, rows) if config.is_skinny and gemm.kind != "head"]
    return found[rank] if found else None


def sharing(gemm: Gemm, rows: int, processors: int) -> GemmConfig | None:
    """The contender of which two programs share a multiprocessor that makes most nearly two programs for each."""
    found = [config for config in contenders(gemm, rows) if config.kernel == "tile"]
    found = [config for config in found if ring_bytes(gemm, config) <= SHARED_BYTES // 2 and gemm.kind != "head"]

    def programs(config: GemmConfig) -> int:
        width = gemm.n // 2 if gemm.kind == "gate_up" else gemm.n
        return -(-width // config.block_n) * -(-rows // config.block_m) * config.split_k

    return min(found, key=lambda config: abs(programs(config) - 2 * processors), default=None)


def ring_bytes(gemm: Gemm, config: GemmConfig) -> int:
    """Bytes of shared memory that the steps in flight of "tile" take."""
    weight_rows = config.block_n * (2 if gemm.kind == "gate_up" else 1)
    return config.stages * config.block_k * (config.block_m + weight_rows) * (1 if gemm.dtype == FP8 else 2)


def with_limits(config: GemmConfig) -> list[GemmConfig]:
    """A skinny kernel with each limit of registers; nothing for others."""
    return [replace(config, max_registers=limit) for limit in _REGISTERS] if config.is_skinny else []


def with_choice(choices: Choices, gemm: Gemm, rows: int, config: GemmConfig) -> Choices:
    """`choices`, with another for one GEMM and number of rows."""
    return {**choices, gemm: choices.get(gemm, {}) | {rows: config}}


def improve(
    choices: Choices, rows: int, gemms: dict[Gemm, list[GemmConfig]], step_us: Timer, deadline: float
) -> Choices:
    """`choices` with the best contender for each of `gemms`, one after the other, as far as the time goes."""
    fastest = min(step_us(choices, 8), step_us(choices, 8))
    for gemm, contending in gemms.items():
        base, tried = choices, {choices.get(gemm, {}).get(rows, LIBRARY)}
        for config in contending:
            if config in tried or time.monotonic() > deadline:
                continue
            tried.add(config)
            trial = with_choice(base, gemm, rows, config)
            us = step_us(trial, 5)
            if us < fastest * (1 - GAIN) and (us := max(us, step_us(trial, 8))) < fastest * (1 - GAIN):
                fastest, choices = us, trial
                print(f"  {rows} rows: {gemm.kind} by {config}: {us:.1f} us", flush=True)
    return choices


def table_of(device: str, choices: Choices, before: GemmTable | None = None) -> GemmTable:
    """The choices as a table for one device, beside what the table `before` has of other GEMMs."""
    tuned = {
        gemm._replace(dtype="bfloat16" if gemm.dtype == "float16" else gemm.dtype): ranges_of(sorted(by_rows.items()))
        for gemm, by_rows in choices.items()
        if by_rows
    }
    devices, near = ((device,), ()) if before is None else (before.devices, before.near)
    return GemmTable(devices, {**(before.entries if before else {}), **tuned}, near)


class Tuner:
    """An engine that runs the same decode step over and over."""

    def __init__(self, llm: LLM) -> None:
        self.executor = llm.engine.executor
        runner = self.executor.runner
        self.rules = runner.planner.rules
        linears = (module for module in runner.model.modules() if isinstance(module, ParallelLinear))
        self.products = {linear.product.gemm(self.rules.world): linear.product for linear in linears}
        self.gemms, self.measured = list(self.products), self.rules.table.measured
        self.processors = self.rules.device.processors

    def lookup(self, gemm: Gemm, rows: int) -> GemmConfig:
        """Kernel that multiplies now."""
        return choose(self.products[gemm], rows, replace(self.rules, own_kernels=True, tried={}))[0]

    def step_us(self, rows: int) -> Timer:
        """The slowest rank's."""
        return lambda choices, replays: max(self.executor.call("time_step", choices, rows, replays))

    def starts(self, rows: int) -> Iterator[Choices]:
        """The present choices; and chains of one kind for all of a layer, where one kernel among others brings little:
        skinny ones, which fuse norm and residual, and tiles of which two share a multiprocessor."""
        present = {gemm: self.lookup(gemm, rows) for gemm in self.gemms}
        yield {gemm: {rows: config} for gemm, config in present.items()}
        for chain in (partial(skinny, rank=0), partial(skinny, rank=-1), partial(sharing, processors=self.processors)):
            found = {gemm: chain(gemm, rows) or present[gemm] for gemm in self.gemms}
            if found != present:
                yield {gemm: {rows: config} for gemm, config in found.items()}

    def tune(self, rows: int, deadline: float) -> Choices:
        """The best choices for so many rows, which must be those of the engine's last step."""
        starts, step_us = list(self.starts(rows)), self.step_us(rows)
        best = min(starts, key=lambda choices: step_us(choices, 8))
        largest_first = sorted(self.gemms, key=lambda gemm: (gemm.kind == "head", -gemm.n * gemm.k))
        best = improve(best, rows, {gemm: contenders(gemm, rows) for gemm in largest_first}, step_us, deadline)
        for _ in range(2):  # what one kernel leaves of the registers decides when the next one's programs start
            limited = {gemm: with_limits(best[gemm][rows]) for gemm in largest_first}
            best = improve(best, rows, limited, step_us, deadline)
        before, now = (min(step_us(choices, 8) for _ in range(2)) for choices in (starts[0], best))
        print(f"{rows} rows: {before:.1f} us before, {now:.1f} now ({1 - now / before:.1%} less)", flush=True)
        return best if now < before else starts[0]


def fill_between(chosen: Choices, tuned: list[int], measured: Callable[[Gemm], Ranges] = lambda _: ()) -> Choices:
    """`chosen`, where numbers of rows between two tuned ones take the choice of the larger, unless what was `measured`
    before told the two apart."""
    least, filled = min(tuned), dict(chosen)
    for gemm, by_rows in chosen.items():
        ends = [most for most, _ in measured(gemm)]
        for rows in by_rows:
            larger = min((most for most in tuned if most >= rows), default=rows)
            if rows > least and not any(rows <= end < larger for end in ends):
                filled = with_choice(filled, gemm, rows, by_rows[larger])
    return filled


def tune_all(llm: LLM, all_rows: list[int], budget: float) -> Choices:
    """The best choices for each number of rows, most first, as far as `budget` seconds go."""
    # Few tokens each: where all that they may still want exceeds the KV cache, admission would look ahead and wait.
    params = SamplingParams(temperature=0.6, max_tokens=512, ignore_eos=True)
    # Prompts of one token each, which no two share, so that no keys are read for two.
    running = [llm.add_request([number + 1] * (300 + 3 * number), params) for number in range(all_rows[0])]
    while (stats := llm.stats()).num_waiting or stats.num_running < len(running):
        llm.step()
    tuner, deadline = Tuner(llm), time.monotonic() + budget
    chosen: Choices = {
        gemm: {rows: tuner.lookup(gemm, rows) for rows in decode_buckets(TILE_ROWS)} for gemm in tuner.gemms
    }
    tuned = []
    for rows in all_rows:
        while len(running) > rows:
            llm.abort(running.pop())
        for _ in range(4):  # until the last step is one of so many rows
            llm.step()
        if time.monotonic() > deadline:
            print(f"out of time before {rows} rows", flush=True)
            break
        for gemm, by_rows in tuner.tune(rows, deadline).items():
            chosen = with_choice(chosen, gemm, rows, by_rows[rows])
        tuned.append(rows)
    return fill_between(chosen, tuned, tuner.measured) if tuned else chosen


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, "8B")
    rows = "default: those of captured steps up to 256; others between two take the larger's choice or keep theirs"
    parser.add_argument("--rows", type=int, nargs="+", help=rows)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of searching")
    parser.add_argument("--out", type=Path, help="where the table goes; one that is there is kept and added to")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a GPU is needed: what is timed are its kernels")
    buckets = decode_buckets(TILE_ROWS)
    all_rows = sorted(args.rows or buckets, reverse=True)
    if not set(all_rows) <= set(buckets):
        parser.error(f"--rows {args.rows}: must be of {buckets}")
    defaults = {"load_format": "dummy", "max_num_seqs": TILE_ROWS}
    options = engine_options(parser, args, **defaults, gpu_memory_utilization=0.85, step_timeout=300.0)
    try:
        before = load(args.out) if args.out and args.out.exists() else None
    except ValueError as error:
        parser.error(str(error))
    with LLM(**options) as llm:
        chosen = tune_all(llm, all_rows, args.budget)
    if args.out:
        save(args.out, table_of(torch.cuda.get_device_name(), chosen, before))


if __name__ == "__main__":
    main()
