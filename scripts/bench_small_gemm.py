"""Small-row GEMM kernels against cuBLAS with separate kernels, on the shapes of Qwen3. Needs one GPU.

    python scripts/bench_small_gemm.py                       # accuracy, the table, the layer chains
    python scripts/bench_small_gemm.py --sweep --models 8B   # every configuration, to choose `candidate_configs` by

Times are of CUDA-graph replays over the weights of as many layers as defeat the L2 cache; "ours" is the best
configuration under programmatic dependent launch, "lib" is cuBLAS with torch's norm, activation and add kernels, "gemm"
is cuBLAS alone.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.gemm import skinny as sg
from nanovllm.kernels.gemm.skinny import GemmConfig
from nanovllm.kernels.gemm.skinny_tune import (
    EPS,
    ROTATION_BYTES,
    autotune_chain,
    autotune_small_gemm,
    graph_us,
    kernel_call,
    library_call,
)

READ_BYTES_PER_US = 4.55e6  # what reads reach on an H200
LAYERS = {"0.6B": 28, "8B": 36, "32B/TP4": 64}
# Weight shapes [N, K] of one layer and the head.
MODELS = {
    "0.6B": {
        "qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072), "head": (151936, 1024),
    },
    "8B": {
        "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288), "head": (151936, 4096),
    },
    "32B/TP4": {"qkv": (2560, 5120), "o": (5120, 2048), "gate_up": (12800, 5120), "down": (5120, 6400)},
}  # fmt: skip
OPS = {
    "qkv": "norm_linear", "o": "linear_residual", "gate_up": "norm_linear_silu_mul", "down": "linear_residual",
    "head": "norm_linear",
}  # fmt: skip
LAYER_PARTS = ("qkv", "o", "gate_up", "down")
Job = tuple[str, int, int, int, GemmConfig]  # part, n, k, rows, config


def sweep_configs(part: str, n: int, k: int, rows: int) -> list[GemmConfig]:
    """A wide choice of configurations for one shape, the tuner's own candidates first."""
    configs = list(sg.candidate_configs(rows, n, k))
    fma: list[tuple[int, int, int, int]] = []
    if rows == 1:
        fma = [(4, 1024, 2, 4), (8, 1024, 1, 4), (8, 1024, 2, 4), (16, 1024, 2, 4), (16, 1024, 1, 8), (8, 512, 4, 4)]
        fma += [(32, 1024, 1, 8)] if part in ("head", "gate_up") else []
    elif rows <= 4:
        fma = [(4, 1024, 2, 4), (8, 1024, 1, 4), (8, 512, 2, 4), (16, 512, 1, 4)]
    elif rows <= 8:
        fma = [(8, 512, 1, 4)]
    configs += [GemmConfig("fma", bn, bk, depth, 1, warps) for bn, bk, depth, warps in fma]
    if rows >= 4:
        tiles = [(16, 1024, 1), (16, 1024, 2), (32, 512, 2), (8, 1024, 2)]
        configs += [GemmConfig("tile", bn, bk, depth) for bn, bk, depth in tiles]
        for bn, bk, stages in ((64, 128, 4), (64, 128, 3), (32, 128, 4), (128, 64, 4)):
            splits = [s for s in (1, 2, 4, 8) if 128 <= -(-n // bn) * s <= 700] or [1]
            configs += [GemmConfig("stream", bn, bk, stages, split) for split in splits[:2]]
    return list(dict.fromkeys(c for c in configs if fits(part, n, k, c)))


def fits(part: str, n: int, k: int, config: GemmConfig) -> bool:
    """Whether a configuration can run on a shape at all."""
    if part == "gate_up" and config.kernel == "fma" and config.block_n < 2 * config.num_warps:
        return False
    padded = -(-n // config.block_n) * config.block_n
    scratch = config.split_k * sg.MAX_ROWS * padded if config.split_k > 1 else 0
    return config.block_k * config.split_k <= k and scratch <= sg.SCRATCH_FLOATS


def compile_job(job: Job) -> str:
    """Run one configuration once in a worker process, to put it in Triton's cache; an error message or ''."""
    part, n, k, rows, config = job
    n = min(n, 16384)
    x = torch.randn(rows, k, device="cuda").bfloat16()
    weight = torch.zeros(n, k, device="cuda", dtype=torch.bfloat16)
    try:
        kernel_call(OPS[part], x, torch.ones_like(x[0]), n, config, True)(weight)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job}: {type(error).__name__} {str(error)[:160]}"
    return ""


def accuracy_job(config: GemmConfig) -> str:
    """A configuration's largest relative error against float64, and whether a row depends on how many there are."""
    counts = (1, 2, 3, 4) if config.kernel == "fma" else (1, 5, 8, 16)
    torch.manual_seed(1)
    worst, invariant, first = 0.0, True, None
    for n, k in ((512, 1024), (304, 3080)):
        make = lambda *shape: torch.randn(*shape, device="cuda").bfloat16()  # noqa: E731
        x, gain, residual = make(counts[-1], k), make(k), make(counts[-1], n)
        weight = (make(n, k) / k**0.5).bfloat16()
        normed = F.rms_norm(x.float(), (k,), None, EPS).bfloat16() * gain
        y = normed.double() @ weight.double().T
        gate, up = y.chunk(2, dim=-1)
        plain = x.double() @ weight.double().T
        wanted = (y, F.silu(gate) * up, plain, residual.double() + plain)
        for rows in counts:
            part = x[:rows].contiguous()
            got = (
                sg.norm_linear(part, gain, EPS, weight, config=config),
                sg.norm_linear_silu_mul(part, gain, EPS, weight, config=config),
                sg.linear(part, weight, config=config),
                sg.linear_residual(part, weight, residual[:rows].clone(), config=config),
            )
            errors = [
                ((a.double() - b[:rows]).norm() / b[:rows].norm()).item() for a, b in zip(got, wanted, strict=True)
            ]
            worst = max(worst, *(error if error == error else float("inf") for error in errors))
            first = first if first and rows != counts[0] else got
            invariant &= all(torch.equal(a[:1], b[:1]) for a, b in zip(got, first, strict=True))
    return f"{short(config):26s} worst error {worst:.1e}, row 0 the same bits at {counts} rows: {invariant}"


def short(config: GemmConfig | None) -> str:
    if config is None:
        return "cuBLAS"
    return f"{config.kernel}:{config.block_n}x{config.block_k}x{config.depth}/s{config.split_k}/w{config.num_warps}"


def layer_weights(n: int, k: int, most: int = 28) -> list[Tensor]:
    count = max(2, min(most, -(-ROTATION_BYTES // (n * k * 2))))
    return [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5 for _ in range(count)]


def table_rows(model: str, part: str, weights: Sequence[Tensor], rows: int, sweep: bool) -> dict:
    """Time every configuration of one shape at one row count, and cuBLAS."""
    n, k = weights[0].shape
    op, repeat = OPS[part], max(1, 24 // len(weights))
    x = torch.randn(rows, k, device="cuda").bfloat16()
    gain, residual = torch.ones_like(x[0]), x.new_zeros(rows, n)

    def time_of(call: Callable[[Tensor], object]) -> float:
        return graph_us([lambda w=w: call(w) for w in weights] * repeat)

    library = library_call(op, gain, residual)
    entry = {"model": model, "part": part, "rows": rows, "floor": n * k * 2 / READ_BYTES_PER_US}
    entry["gemm"] = time_of(lambda w: F.linear(x, w))
    entry["lib"] = time_of(lambda w: library(x, w))
    configs = sweep_configs(part, n, k, rows) if sweep else sg.candidate_configs(rows, n, k)
    timed = sorted(((time_of(kernel_call(op, x, gain, n, c, True)), c) for c in configs), key=lambda pair: pair[0])
    entry["ours"], best = timed[0]
    entry["no_pdl"] = time_of(kernel_call(op, x, gain, n, best, False)) if rows == 1 else None
    entry["best"] = best
    entry["all"] = [(us, short(config)) for us, config in timed]
    return entry


def show(entry: dict, most: int) -> None:
    share = entry["floor"] / entry["ours"]
    plain = f" no-pdl {entry['no_pdl']:6.1f}" if entry["no_pdl"] else ""
    others = "  ".join(f"{us:.1f} {name}" for us, name in entry["all"][:most])
    print(
        f"{entry['model']:7s} {entry['part']:7s} M{entry['rows']:2d} ours {entry['ours']:6.1f} ({share:4.0%}){plain} "
        f"gemm {entry['gemm']:6.1f} lib {entry['lib']:6.1f} | {others}",
        flush=True,
    )


class LayerChain:
    """The four matrix products of every layer in decode order, without attention: o reads a part of qkv's output."""

    def __init__(self, model: str, rows: int) -> None:
        shapes = MODELS[model]
        hidden = shapes["qkv"][1]

        def weight(part: str) -> Tensor:
            n, k = shapes[part]
            return torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * (0.5 / k**0.5)

        self.weights = [{part: weight(part) for part in LAYER_PARTS} for _ in range(LAYERS[model])]
        self.bytes = sum(w.numel() * 2 for layer in self.weights for w in layer.values())
        self.start = torch.randn(rows, hidden, device="cuda").bfloat16()
        self.hidden, self.gain = self.start.clone(), self.start.new_ones(hidden)
        # The 32B shard's o takes K = 2048 of qkv's 2560 columns.
        self.qkv = self.start.new_empty(rows, shapes["qkv"][0])
        self.attended = self.qkv.view(-1)[: rows * shapes["o"][1]].view(rows, -1)
        self.act = self.start.new_empty(rows, shapes["gate_up"][0] // 2)

    def run(self, configs: Mapping[str, GemmConfig | None], pdl: bool = True) -> None:
        """One pass. A part whose configuration is None goes to cuBLAS and torch."""
        for w in self.weights:
            self._qkv(w["qkv"], configs["qkv"], pdl)
            self._add(self.attended, w["o"], configs["o"], pdl)
            act = self._gate_up(w["gate_up"], configs["gate_up"], pdl)
            self._add(act, w["down"], configs["down"], pdl)

    def _qkv(self, w: Tensor, config: GemmConfig | None, pdl: bool) -> None:
        if config:
            sg.norm_linear(self.hidden, self.gain, EPS, w, out=self.qkv, config=config, pdl=pdl)
        else:
            torch.mm(F.rms_norm(self.hidden, self.gain.shape, self.gain, EPS), w.T, out=self.qkv)

    def _gate_up(self, w: Tensor, config: GemmConfig | None, pdl: bool) -> Tensor:
        if config:
            return sg.norm_linear_silu_mul(self.hidden, self.gain, EPS, w, out=self.act, config=config, pdl=pdl)
        gate, up = F.linear(F.rms_norm(self.hidden, self.gain.shape, self.gain, EPS), w).chunk(2, dim=-1)
        return F.silu(gate) * up

    def _add(self, x: Tensor, w: Tensor, config: GemmConfig | None, pdl: bool) -> None:
        if config:
            sg.linear_residual(x, w, self.hidden, config=config, pdl=pdl)
        else:
            self.hidden.add_(F.linear(x, w))

    def time(self, run: Callable[[], None]) -> tuple[float, Tensor]:
        """(microseconds of the whole chain, the hidden state after one pass)."""
        us = graph_us([run])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        self.hidden.copy_(self.start)
        graph.replay()
        return us, self.hidden.clone()


def chain_row(model: str, rows: int, best: Mapping[tuple[str, str, int], GemmConfig]) -> dict:
    """Time all layers with the best configuration of each part by itself, then with those chosen within the chain."""
    chain = LayerChain(model, rows)
    start = {part: best[model, part, rows] for part in LAYER_PARTS}
    options: dict[str, list[GemmConfig | None]] = {}
    for part in LAYER_PARTS:
        options[part] = [*sg.candidate_configs(rows, *MODELS[model][part]), None]
    chosen = autotune_chain(chain.run, options, start)
    entry: dict = {"model": model, "rows": rows, "floor": chain.bytes / READ_BYTES_PER_US, "chosen": chosen}
    entry["alone"], _ = chain.time(lambda: chain.run(start))
    entry["chain"], with_pdl = chain.time(lambda: chain.run(chosen))
    entry["no_pdl"], without = chain.time(lambda: chain.run(chosen, pdl=False))
    entry["lib"], library = chain.time(lambda: chain.run(dict.fromkeys(LAYER_PARTS)))
    entry["same"] = torch.equal(with_pdl, without)
    entry["error"] = ((with_pdl.double() - library.double()).norm() / library.double().norm()).item()
    print(
        f"chain {model} M{rows}: {entry['chain']:.0f} us (parts chosen alone {entry['alone']:.0f}, without pdl "
        f"{entry['no_pdl']:.0f}), lib {entry['lib']:.0f}, floor {entry['floor']:.0f}; same bits with and without pdl: "
        f"{entry['same']}; against lib {entry['error']:.1e};",
        " ".join(f"{part} {short(config)}" for part, config in chosen.items()),
        flush=True,
    )
    return entry


def precompile(jobs: Sequence[Job], checked: Sequence[GemmConfig], workers: int) -> None:
    start = time.time()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        accuracy = [pool.submit(accuracy_job, config) for config in checked]
        for message in pool.map(compile_job, jobs, chunksize=2):
            if message:
                print(message)
        for future in accuracy:
            print(future.result())
    print(f"{len(jobs)} kernels compiled or found in the cache in {time.time() - start:.0f} s", flush=True)


def tuning_cost(model: str, row_counts: Sequence[int]) -> None:
    weights = {part: layer_weights(*shape) for part, shape in MODELS[model].items()}
    for label in ("first", "again"):
        torch.cuda.synchronize()
        start = time.time()
        picks = [autotune_small_gemm(OPS[p], w, rows) for p, w in weights.items() for rows in row_counts]
        print(f"autotune {model}, {len(picks)} choices, {label}: {time.time() - start:.2f} s", flush=True)
    print("  ", "; ".join(f"{p.op} {p.n}x{p.k} M{p.rows} {p.us:.1f} {short(p.config)}" for p in picks), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--sweep", action="store_true", help="time many configurations, not only the tuner's candidates"
    )
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--most", type=int, default=4, help="configurations shown in a line")
    parser.add_argument("--json", type=Path, help="write every figure here")
    args = parser.parse_args()
    pick = sweep_configs if args.sweep else lambda part, n, k, rows: sg.candidate_configs(rows, n, k)
    shapes = [(model, part, *shape) for model in args.models for part, shape in MODELS[model].items()]
    jobs = {  # by what tells two binaries apart
        (OPS[p], k, c, min(r for r in (1, 2, 4, 8, 16) if r >= rows) if c.kernel == "fma" else 16): (p, n, k, rows, c)
        for _, p, n, k in shapes for rows in args.rows for c in pick(p, n, k, rows)
    }  # fmt: skip
    checked = [GemmConfig("fma", 8, 1024, 3), GemmConfig("fma", 8, 512, 2, 2), GemmConfig("tile", 16, 512, 2)]
    checked += [
        GemmConfig("tile", 16, 512, 2, 2),
        GemmConfig("stream", 64, 128, 4, 2),
        GemmConfig("stream", 32, 128, 3),
    ]
    precompile(list(jobs.values()), checked, args.workers)
    entries, best = [], {}
    for model, part, n, k in shapes:
        weights = layer_weights(n, k)
        for rows in args.rows:
            entries.append(table_rows(model, part, weights, rows, args.sweep))
            best[model, part, rows] = entries[-1]["best"]
            show(entries[-1], args.most)
        del weights
    results = [chain_row(model, rows, best) for model in args.models for rows in args.rows]
    if args.json:
        args.json.write_text(json.dumps({"table": entries, "chains": results}, default=short, indent=1))
    tuning_cost("0.6B" if "0.6B" in args.models else args.models[0], args.rows)


if __name__ == "__main__":
    main()
