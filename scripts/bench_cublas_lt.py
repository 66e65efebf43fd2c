"""Products of decode steps and prompts by each algorithm of cuBLASLt, against what multiplies now. Needs one GPU.

    python scripts/bench_cublas_lt.py --out lt.json                    # 100 s at most
    python scripts/bench_cublas_lt.py --models 8B 32B/4 --rows 128 256 --budget 40
    python scripts/bench_cublas_lt.py --models 8B --rows 1024 2048 3001 8192    # where the prompts' algorithm pays

8B/2 is what one of two ranks holds. Times are microseconds of CUDA-graph replays, contenders in turns, over the weights
of as many layers as defeat the L2 cache. Gate and up are timed together with the activation, o and down of one rank
with add + RMSNorm, which may sum parts of K. "now" is what the engine would take. A line ends with the fastest
algorithm as lt_config.py writes it. Last come all layers of the models of one rank, as a chain, with what is taken now
and with the best of all.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from bench_mid_gemm import (  # noqa: E402
    FLOPS_PER_US,
    LAYERS,
    READ_BYTES_PER_US,
    LayerChain,
    call,
    candidates,
    chosen,
    product,
    short,
)

from nanovllm.kernels.gemm import cublas_lt, cublas_lt_rule, cublas_lt_tune  # noqa: E402
from nanovllm.kernels.gemm.cublas_lt import CublasLtError, Problem  # noqa: E402
from nanovllm.kernels.gemm.lt_config import LtConfig  # noqa: E402
from nanovllm.kernels.gemm.skinny_tune import captured, rotation  # noqa: E402

HEAD_DIM, VOCABULARY = 128, 151936
DIMS = {  # hidden, query heads, key/value heads, intermediate
    "0.6B": (1024, 16, 8, 3072),
    "1.7B": (2048, 16, 8, 6144),
    "4B": (2560, 32, 8, 9728),
    "8B": (4096, 32, 8, 12288),
    "14B": (5120, 40, 8, 17408),
    "32B": (5120, 64, 8, 25600),
}
LAYER = ("qkv", "o", "gate_up", "down")
MANY_ROWS = 512
"""From here on the chip's power counts: contenders run long enough to feel it, and their median is taken."""
FINALISTS, EXISTING = 6, 3


def shapes(model: str) -> dict[str, tuple[int, int]]:
    """Weight shapes [N, K] of one rank; `model` is a name, or name/ranks."""
    name, _, ranks = model.partition("/")
    size = int(ranks or 1)
    hidden, heads, kv_heads, intermediate = DIMS[name]
    q, kv = heads // size * HEAD_DIM, max(1, kv_heads // size) * HEAD_DIM
    return {
        "qkv": (q + 2 * kv, hidden),
        "o": (hidden, q),
        "gate_up": (2 * intermediate // size, hidden),
        "down": (hidden, intermediate // size),
        "head": (VOCABULARY // size, hidden),
    }


@dataclass
class Case:
    """One product at one number of rows."""

    model: str
    part: str
    rows: int
    weights: Sequence[Tensor]

    @property
    def alone(self) -> bool:
        """Its consumer takes no parts of K: another kernel stands between, or it is the head."""
        return self.part not in ("o", "down") or "/" in self.model

    @property
    def limit(self) -> float:
        n, k = self.weights[0].shape
        return max(n * k * 2 / READ_BYTES_PER_US, 2 * self.rows * n * k / FLOPS_PER_US)

    def run(self, x: Tensor, config: Any) -> Callable[[Tensor], object]:
        if self.part == "gate_up" or not self.alone:
            return call(self.part, x, config, self.weights[0].shape[0])
        return lambda w: product(x, w, config)

    def existing(self) -> list[Any]:
        """Without F.linear itself."""
        if self.part == "head" or self.rows > MANY_ROWS:
            return []
        found = candidates(self.part, self.rows, self.weights[0].shape[1])
        return [c for c in found if c is not None and not (self.alone and c.splits > 1)]

    def named(self) -> LtConfig | None:
        """What the rule names for prompts, if this is one; it is timed also where its tiles do not come out even."""
        many = self.rows >= cublas_lt_rule.MANY_ROWS
        return cublas_lt_rule.many_rows_algorithm(*self.weights[0].shape) if many else None

    def now(self) -> Any:
        n, k = self.weights[0].shape
        if self.rows >= cublas_lt_rule.MANY_ROWS:
            config = self.named()
            return config if config and cublas_lt_rule.fills(config, self.rows, n) else None
        config = cublas_lt_rule.algorithms(self.part, n, k).get(self.rows)
        return config or (None if "/" in self.model else chosen(self.part, self.rows, n, k))

    def algorithms(self, x: Tensor, most: int) -> list[LtConfig]:
        """Of each way to leave parts of K to the consumer the library's proposals and what is near them."""
        parts = (1, 2, 4) if not self.alone and self.rows <= MANY_ROWS else (1,)
        found = []
        for count in parts:
            try:
                problem = Problem.of(x, self.weights[0], count)
                found += cublas_lt_tune.candidates(problem, most if count == 1 else most // 2)
            except CublasLtError as error:
                print(f"  {self.model} {self.part} {self.rows} rows in {count}: {error}")
        return found


def exact_us(runs: Sequence[Callable[[Tensor], object]], weights: Sequence[Tensor], rows: int) -> list[float]:
    """Each run's microseconds by graphs that take turns."""
    graphs = [captured([lambda w=w, run=run: run(w) for w in weights]) for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    begin, seconds = time.perf_counter(), 0.4 if rows > MANY_ROWS else 0.0
    while len(times[0]) < 6 or time.perf_counter() - begin < seconds:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
        graphs[-1].replay()
        marks[0].record()
        for graph, mark in zip(graphs, marks[1:], strict=True):
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        for index, taken in enumerate(times):
            taken.append(marks[index].elapsed_time(marks[index + 1]) * 1000 / len(weights))
    pick = statistics.median if rows > MANY_ROWS else min
    return [pick(taken) for taken in times]


def error_of(x: Tensor, weight: Tensor, config: LtConfig | None, want: Tensor) -> float:
    got = product(x, weight, config).float()
    got = got.sum(0) if got.dim() == 3 else got
    return ((got - want).norm() / want.norm()).item()


def measure(case: Case, most: int) -> dict[str, Any]:
    """Times everything roughly, the best few properly, checks their results. "best": the fastest configuration."""
    begin = time.perf_counter()
    n, k = case.weights[0].shape
    x = torch.randn(case.rows, k, device="cuda", dtype=torch.bfloat16)
    algorithms = case.algorithms(x, most if case.rows <= MANY_ROWS else min(most, 48))
    existing, now = case.existing(), case.now()
    listed = time.perf_counter()
    calls = 1 if case.limit > 100 else 2 if case.limit > 30 else 4
    runs = [case.run(x, config) for config in (*existing, *algorithms)]
    rough = cublas_lt_tune.rough_us(runs, case.weights, calls)
    roughly_timed = time.perf_counter()
    ranked = sorted(zip(rough, range(len(rough)), strict=True))
    works = [i for us, i in ranked if us < float("inf")]
    old = [existing[i] for i in works if i < len(existing)][:EXISTING]
    new = [algorithms[i - len(existing)] for i in works if i >= len(existing)][:FINALISTS]
    new = list(dict.fromkeys([*new, *(c for c in (now, case.named()) if isinstance(c, LtConfig))]))
    want = x.float() @ case.weights[0].float().T
    plain_error = error_of(x, case.weights[0], None, want)
    errors = {config: error_of(x, case.weights[0], config, want) for config in new}
    del want
    wrong = [config for config, error in errors.items() if not error < 1.2 * plain_error + 1e-4]
    new = [config for config in new if config not in wrong]
    contenders = list(dict.fromkeys([None, now, *old, *new]))
    exact = dict(zip(contenders, exact_us([case.run(x, c) for c in contenders], case.weights, case.rows), strict=True))
    ended = time.perf_counter()
    by_time = sorted(((us, c) for c, us in exact.items()), key=lambda pair: pair[0])
    return {
        "best": by_time[0][1], "limit": case.limit,
        "model": case.model, "part": case.part, "rows": case.rows, "n": n, "k": k,
        "linear": exact[None], "now": exact[now], "now_name": short(now), "linear_error": plain_error,
        "existing": [(us, short(c), asdict(c) if c else None) for us, c in by_time if not isinstance(c, LtConfig)],
        "lt": [(us, short(c), asdict(c), errors[c]) for us, c in by_time if isinstance(c, LtConfig)],
        "wrong": [(short(c), errors[c]) for c in wrong], "tried": len(algorithms),
        "failed": sum(us == float("inf") for us in rough), "raw": sum(bool(c.opaque) for c in algorithms),
        "rough": [(us, short(c)) for us, c in zip(rough[len(existing) :], algorithms, strict=True)],
        "seconds": [listed - begin, roughly_timed - listed, ended - roughly_timed],
    }  # fmt: skip


def show(record: dict[str, Any]) -> None:
    old_us, old_name, _ = record["existing"][0]
    line = (
        f"{record['model']:7s}{record['part']:8s}{record['rows']:5d} rows: limit {record['limit']:6.1f}, F.linear "
        f"{record['linear']:6.1f}, now {record['now']:6.1f} {record['now_name']}, existing {old_us:6.1f} {old_name}"
    )
    if record["lt"]:
        us, name, _, error = record["lt"][0]
        line += (
            f" | {us:6.1f} {name} ({1 - us / old_us:+.1%} of existing, {1 - us / record['linear']:+.1%} of F.linear; "
            f"error {error:.2e}, F.linear's {record['linear_error']:.2e})"
        )
    counts = f"{record['tried']} tried, {record['failed']} failed, {len(record['wrong'])} wrong, {record['raw']} raw"
    print(f"{line} [{counts}; {' + '.join(f'{s:.2f}' for s in record['seconds'])} s]", flush=True)


def summary(records: Sequence[dict[str, Any]]) -> None:
    print("\nSums over a layer's four products, us:\nmodel    rows   limit  F.linear     now  existing  best of all")
    cases = {(r["model"], r["rows"], r["part"]): r for r in records}
    for model, rows in dict.fromkeys(sorted((r["model"], r["rows"]) for r in records)):
        layer = [cases.get((model, rows, part)) for part in LAYER]
        if all(layer):
            done = [record for record in layer if record]
            old = [r["existing"][0][0] for r in done]
            best = sum(min([us, *(lt[0] for lt in r["lt"])]) for us, r in zip(old, done, strict=True))
            sums = [sum(r[key] for r in done) for key in ("limit", "linear", "now")]
            print(
                f"{model:7s}{rows:6d}{sums[0]:8.1f}{sums[1]:10.1f}{sums[2]:8.1f}{sum(old):10.1f}{best:13.1f}"
                f"  ({1 - best / sums[2]:.1%} less than now)"
            )


def chains(records: Sequence[dict[str, Any]], deadline: float) -> None:
    """All layers of a model, with what is taken now and with the best of all."""
    best = {(r["model"], r["rows"], r["part"]): r["best"] for r in records}
    print("\nAll layers as a chain, us:")
    for model, rows in dict.fromkeys((r["model"], r["rows"]) for r in records if r["rows"] <= MANY_ROWS):
        picks = {part: best.get((model, rows, part), ...) for part in LAYER}
        if model not in LAYERS or ... in picks.values() or time.perf_counter() > deadline:
            continue
        layers = LayerChain(model, rows)
        now = {part: chosen(part, rows, *layers.shapes[part]) for part in LAYER}
        plain, ours, new = layers.time(dict.fromkeys(LAYER), now, picks)
        want = layers.result(dict.fromkeys(LAYER))
        errors = [((layers.result(c) - want).norm() / want.norm()).item() for c in (now, picks)]
        print(
            f"{model:6s}{rows:5d} rows: F.linear {plain:7.0f}, now {ours:7.0f}, best {new:7.0f} ({1 - new / ours:.1%} "
            f"less than now), differences {errors[0]:.1e}, {errors[1]:.1e};",
            " ".join(f"{part} {short(config)}" for part, config in picks.items()),
            flush=True,
        )


def bench_model(
    model: str, row_counts: Sequence[int], parts: Sequence[str], most: int, deadline: float
) -> list[dict[str, Any]]:
    """Numbers of rows outermost: what the budget leaves out is whole numbers of rows."""
    weights: dict[str, list[Tensor]] = {}
    for part in parts:
        n, k = shapes(model)[part]
        count = max(1, -(-(160 << 20) // (2 * n * k)))
        made = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5 for _ in range(count)]
        chain = list(rotation(made))
        weights[part] = chain * max(1, (12 if part != "head" else 3) // len(chain))
    records = []
    for rows in row_counts:
        for part in parts:
            if part == "head" and rows > MANY_ROWS:
                continue
            if time.perf_counter() > deadline:
                print(f"{model}: out of time at {part}, {rows} rows")
                return records
            case = Case(model, part, rows, weights[part])
            if rows > MANY_ROWS:
                case.weights = case.weights[: max(2, int(1000 / case.limit))]  # about a millisecond
            try:
                records.append(measure(case, most))
                show(records[-1])
            except (RuntimeError, ValueError) as error:
                print(f"{model} {part} {rows} rows: {type(error).__name__}: {error}", flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["8B", "0.6B", "8B/2", "32B/4", "0.6B/2"])
    parser.add_argument("--rows", nargs="+", type=int, default=[256, 128, 64, 4096, 192, 32, 96, 160, 224, 208])
    parser.add_argument("--parts", nargs="+", choices=(*LAYER, "head"), default=[*LAYER, "head"])
    parser.add_argument("--most", type=int, default=240, help="algorithms to try for a product and a number of rows")
    parser.add_argument("--budget", type=float, default=95, help="seconds; models share them")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begin = time.perf_counter()
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    gc.freeze()  # capturing a graph collects
    print(f"cuBLASLt {cublas_lt.library().version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
    records: list[dict[str, Any]] = []
    for index, model in enumerate(args.models):
        now = time.perf_counter()
        left = begin + 0.88 * args.budget - now  # the rest is for the chains
        records += bench_model(model, args.rows, args.parts, args.most, now + left / (len(args.models) - index))
        if args.out:
            kept = [{key: value for key, value in record.items() if key != "best"} for record in records]
            args.out.write_text(json.dumps(kept), encoding="utf-8")
    summary(records)
    chains(records, begin + args.budget)
    print(f"{len(records)} products in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
