"""Chooses what multiplies in decode steps by timing whole steps, and writes the choices for `kernel_choices`.

    python scripts/tune_steps.py --model 8B --out choices.json
    python scripts/tune_steps.py --model 8B --tensor-parallel-size 2 --rows 2 4 8 16 --budget 120
    python scripts/tune_steps.py --model 32B --tensor-parallel-size 2 --options \\
        'hf_overrides={"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 12800,
                       "vocab_size": 75968, "eos_token_id": 7}'

The last is what each of four ranks holds of 32B, on two GPUs: half a model over half as many ranks.

Each projection in turn takes every contender, inside steps with attention, norms and sums over the ranks, and keeps
what makes the step shortest: kernels that start early help or hinder their neighbours, which a product by itself does
not show. So the tables of few_rows_rule.py were made, and much of mid_gemm_rule.py and cublas_lt_rule.py. Needs a GPU
for each rank; some 10 s for a number of rows, and twice that where kernels are compiled.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import parse_assignments
from nanovllm import LLM, SamplingParams
from nanovllm.kernels.gemm import decode_rule as mid_gemm_rule
from nanovllm.kernels.gemm.cublas_lt import CublasLtError, Problem
from nanovllm.kernels.gemm.cublas_lt_tune import by_rough_time, candidates
from nanovllm.kernels.gemm.decode import SplitConfig
from nanovllm.kernels.gemm.lt_config import LtConfig
from nanovllm.kernels.gemm.skinny import MAX_ROWS, candidate_configs
from nanovllm.kernels.gemm.skinny_tune import rotation
from nanovllm.layers.few_rows import linear
from nanovllm.runner import tuning
from nanovllm.runner.tuning import Choices, Config
from nanovllm.wire.shapes import decode_buckets

MAX_NUM_SEQS = 256
SUM_PARTS = ("o", "down")
"""Projections whose consumer adds up parts of K."""
ALGORITHMS, FINALISTS = 80, 7
"""Of the library: how many are timed by themselves, and how many of them inside steps."""
GAIN = 0.0015
"""Share of a step that a choice must save, twice: less is noise."""

Timer = Callable[[Choices, int], float]
"""Microseconds of a step with these choices, over so many replays."""


def with_choice(choices: Choices, part: str, rows: int, config: Config | None) -> Choices:
    """`choices`, with another for one projection; None: cuBLAS."""
    changed = {name: dict(by_rows) for name, by_rows in choices.items()}
    changed[part].pop(rows, None)
    if config is not None:
        changed[part][rows] = config
    return changed


def improve(
    choices: Choices, rows: int, parts: dict[str, Callable[[], list[Config | None]]], step_us: Timer, deadline: float
) -> Choices:
    """`choices` with the best contender for each of `parts`, one after the other, as far as the time goes."""
    fastest = min(step_us(choices, 8), step_us(choices, 8))
    for part, contenders in parts.items():
        base, tried = choices, {choices[part].get(rows)}
        for config in contenders():
            if config in tried or time.monotonic() > deadline:
                continue
            tried.add(config)
            trial = with_choice(base, part, rows, config)
            us = step_us(trial, 5)
            if us < fastest * (1 - GAIN) and (us := max(us, step_us(trial, 8))) < fastest * (1 - GAIN):
                fastest, choices = us, trial
                print(f"  {rows} rows: {part} by {config or 'cuBLAS'}: {us:.1f} us", flush=True)
    return choices


class Tuner:
    """An engine that runs the same decode step over and over."""

    def __init__(self, llm: LLM) -> None:
        self.executor = llm.engine.executor
        self.runner = self.executor.runner
        self.layers = tuning.projections(self.runner.model)
        self.rule = tuning.measured(self.runner.model, llm.config.tensor_parallel_size == 1, MAX_NUM_SEQS)

    def step_us(self, rows: int) -> Timer:
        """The slowest rank's."""
        return lambda choices, replays: max(self.executor.call("time_step", choices, rows, replays))

    def contenders(self, part: str, rows: int) -> list[Config | None]:
        """cuBLAS itself, our kernels, and the library's algorithms that are best by themselves."""
        n, k = self.layers[part][0].weight.shape
        found: list[Config | None] = [None]
        if rows <= MAX_ROWS:
            found += candidate_configs(rows, n, k)
        if part != "head":
            own = mid_gemm_rule.GATED_VARIANTS if part == "gate_up" else mid_gemm_rule.VARIANTS
            found += own
            if part in SUM_PARTS:
                found += [SplitConfig(2), *(config.split(2) for config in own)]
        return found if rows <= MAX_ROWS else [*found, *self._algorithms(part, rows)]

    def _algorithms(self, part: str, rows: int) -> list[LtConfig]:
        """On this rank's device alone, without sums."""
        weights = rotation([layer.weight for layer in self.layers[part]])
        with torch.inference_mode(), self.runner.io.stream_context():
            x = torch.randn(rows, weights[0].shape[1], dtype=weights[0].dtype, device=weights[0].device)
            ways = (1, 2) if part in SUM_PARTS else (1,)
            try:
                found = [c for split in ways for c in candidates(Problem.of(x, weights[0], split), ALGORITHMS)]
            except CublasLtError as error:
                print(f"  {rows} rows: {part}: {error}", flush=True)
                return []
            return by_rough_time(found, lambda config: lambda w: linear(x, w, config), weights)[:FINALISTS]

    def _all_fused(self, rows: int) -> Iterator[Choices]:
        """Our kernels for few rows everywhere: where they fuse norm and residual, one among others brings little."""
        for rank in (0, 1) if rows <= MAX_ROWS else ():
            configs = {}
            for name, layers in self.layers.items():
                found = candidate_configs(rows, *layers[0].weight.shape)
                configs[name] = {rows: found[min(rank, len(found) - 1)]}
            yield configs

    def tune(self, rows: int, deadline: float) -> Choices:
        """The best choices for so many rows, which must be those of the engine's last step."""
        start = {name: {rows: by_rows[rows]} if rows in by_rows else {} for name, by_rows in self.rule.items()}
        parts = {
            part: lambda part=part: self.contenders(part, rows) for part in ("gate_up", "down", "o", "qkv", "head")
        }
        step_us = self.step_us(rows)
        best = min([start, *self._all_fused(rows)], key=lambda choices: step_us(choices, 8))
        best = improve(best, rows, parts, step_us, deadline)
        before, now = (min(step_us(choices, 8) for _ in range(2)) for choices in (start, best))
        print(f"{rows} rows: {before:.1f} us before, {now:.1f} now ({1 - now / before:.1%} less)", flush=True)
        return best if now < before else start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B", help="a size of Qwen3, with random weights")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", help="default: those of captured decode steps from 2 to 256")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of searching")
    parser.add_argument("--out", type=Path, help="where the choices go")
    parser.add_argument("--options", nargs="+", default=[], metavar="KEY=VALUE", help="any other option of the engine")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a GPU is needed: what is timed are its kernels")
    buckets = decode_buckets(MAX_NUM_SEQS)
    all_rows = sorted(args.rows or buckets[1:], reverse=True)
    if not set(all_rows) <= set(buckets):
        parser.error(f"--rows {args.rows}: must be of {buckets}")
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": MAX_NUM_SEQS, "step_mailbox": False}
    options |= {"gpu_memory_utilization": 0.85, "step_timeout": 300.0}
    options |= {"tensor_parallel_size": args.tensor_parallel_size}
    try:
        options |= parse_assignments(args.options)
    except ValueError as error:
        parser.error(str(error))
    with LLM(f"Qwen3-{args.model}", **options) as llm:
        params = SamplingParams(temperature=0.6, max_tokens=4000, ignore_eos=True)
        # Prompts of one token each, which no two share, so that no keys are read for two.
        running = [llm.add_request([number] * (300 + 3 * number), params) for number in range(all_rows[0])]
        while llm.engine.scheduler.num_waiting or len(llm.engine.scheduler.running) < len(running):
            llm.step()
        tuner, deadline = Tuner(llm), time.monotonic() + args.budget
        chosen = tuner.rule
        for rows in all_rows:
            while len(running) > rows:
                llm.abort(running.pop())
            for _ in range(4):  # until the last step is one of so many rows
                llm.step()
            if time.monotonic() > deadline:
                print(f"out of time before {rows} rows", flush=True)
                break
            best = tuner.tune(rows, deadline)
            chosen = {
                name: {number: config for number, config in by_rows.items() if number != rows} | best[name]
                for name, by_rows in chosen.items()
            }
        if args.out:
            tuning.save(args.out, chosen)


if __name__ == "__main__":
    main()
