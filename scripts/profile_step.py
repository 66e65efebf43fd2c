"""Shows where a decode step's time goes: a table of its kernels, the gaps between them, and the host's share.

    python scripts/profile_step.py --model 8B --batch 1 256 --context 512

Takes a profiler trace of steady decode steps on one GPU and prints, per step: each kernel's launches, its time, what it
adds to the step, from the end of all before it to its own; the idle time between kernels inside a step, and the idle
time between one step's last kernel and the next one's first. Kernels that start early count the time that they wait, so
their times add up to more than the step; what they add does not.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nanovllm import LLM, SamplingParams
from nanovllm.cli.bench.engine import add_engine_options, engine_options
from nanovllm.cli.options import Parser

FIRST_KERNEL = "prepare_decode"  # every decode step begins with it


def device_events(trace: Path) -> list[dict[str, Any]]:
    """Kernels and copies of the trace, in order of start; times in microseconds."""
    events = json.loads(trace.read_text())["traceEvents"]
    found = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e]
    return sorted(found, key=lambda event: event["ts"])


def split_steps(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Events of each whole step; a step runs from its first kernel to whatever follows before the next one's."""
    starts = [index for index, event in enumerate(events) if FIRST_KERNEL in event["name"]]
    return [events[a:b] for a, b in pairwise(starts)]


def report(steps: list[list[dict[str, Any]]], rows: int) -> dict[str, Any]:
    """Medians over steps, in microseconds; prints the table and returns the figures."""
    calls: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    added: dict[str, float] = defaultdict(float)
    inside, between, spans, counts = [], [], [], []
    for step, following in pairwise(steps):
        end, idle, kernels = step[0]["ts"], 0.0, 0
        for event in step:
            # copies are between steps: the one in belongs to the next step, the one out is on no critical path
            if event["cat"] == "kernel":
                idle += max(0.0, event["ts"] - end)
                added[event["name"]] += max(0.0, event["ts"] + event["dur"] - end)
                end = max(end, event["ts"] + event["dur"])
                kernels += 1
            calls[event["name"]] += 1
            times[event["name"]] += event["dur"]
        inside.append(idle)
        between.append(max(0.0, following[0]["ts"] - end))
        spans.append(following[0]["ts"] - step[0]["ts"])
        counts.append(kernels)
    count = len(spans)
    print(f"{'kernel':62s} {'calls':>7s} {'us/step':>9s} {'us/call':>8s} {'added':>9s}")
    for name in sorted(times, key=lambda key: -times[key])[:rows]:
        us = f"{times[name] / count:9.1f} {times[name] / calls[name]:8.2f} {added[name] / count:9.1f}"
        print(f"{name[:62]:62s} {calls[name] / count:7.1f} {us}")
    figures = {
        "step_us": statistics.median(spans),
        "kernels": statistics.median(counts),
        "gaps_inside_us": statistics.median(inside),
        "idle_between_steps_us": statistics.median(between),
    }
    for name, value in figures.items():
        print(f"{name:70s} {value:26.1f}")
    share = figures["idle_between_steps_us"] / figures["step_us"]
    print(f"{'idle between steps, share of the step':70s} {share:26.2%}")
    return figures


def profile(llm: LLM, batch: int, context: int, num_steps: int, rows: int) -> None:
    """Prints the table of steady decode steps of so many requests, with prompts of `context` tokens."""
    draw = random.Random(batch)
    vocab = llm.model_config.vocab_size
    # no more than is needed: rows wait until the KV cache has room for all of their tokens
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=2 * num_steps + 150)
    begin = llm.engine.computed[0]
    for _ in range(batch):
        llm.add_request([draw.randrange(vocab) for _ in range(context)], params)
    while llm.engine.computed[0] < begin + batch * context:
        llm.step()
    for _ in range(20):
        llm.step()
    start = time.perf_counter()
    for _ in range(num_steps):
        llm.step()
    plain = (time.perf_counter() - start) / num_steps * 1e6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(num_steps):
            llm.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        print(f"\n{batch} rows with prompts of {context} tokens")
        report(split_steps(device_events(trace)), rows)
    print(f"{'host clock per step without the profiler, us':70s} {plain:26.1f}", flush=True)
    llm.abort_all()
    while llm.has_unfinished_requests():
        llm.step()


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[256], help="numbers of requests, one table for each")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of each request")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=24, help="kernels to list")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a GPU is needed: what is profiled are its kernels")
    with LLM(**engine_options(parser, args, max_num_seqs=max(*args.batch, 16))) as llm:
        for batch in args.batch:
            profile(llm, batch, args.context, args.steps, args.rows)


if __name__ == "__main__":
    main()
