"""Modes of the engine's benchmark: throughput, latency, long prompts beside decodes, the cost of sampling options."""

import argparse
import gc
import itertools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from msgspec.structs import asdict, replace

from nanovllm.cli.bench.roofline import Roofline
from nanovllm.cli.bench.workloads import SAMPLING_ROWS, StallWorkload, Workload, draw_workload, random_prompt, sampling

LATENCY_REQUESTS = 5


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0..1) of all lie below, by nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@dataclass
class Bench:
    """The modes. Each prints its lines and returns the same figures as a dictionary."""

    llm: Any
    limits: Roofline | None
    args: argparse.Namespace

    def __post_init__(self) -> None:
        self.vocab_size = self.llm.model_config.vocab_size
        self.rng = random.Random(f"{self.args.seed}, warm-up and single prompts")

    def prompt(self, length: int) -> list[int]:
        return random_prompt(self.rng, length, self.vocab_size)

    def draw(self, default_input: tuple[int, int], default_output: tuple[int, int], repeat: int) -> Workload:
        input_len, output_len = self.args.input_len or default_input, self.args.output_len or default_output
        return draw_workload(self.args.num_seqs, input_len, output_len, self.args.seed, self.vocab_size, repeat)

    def generate(self, work: Workload, every: int = 1, **options: Any) -> tuple[float, list[Any]]:
        """Runs all requests at once, one in `every` with the options; "seed" stands for a different seed for each."""
        own: list[dict[str, Any]] = [{} if n % every else dict(options) for n in range(len(work.prompts))]
        for number, option in enumerate(own):
            if "seed" in option:
                option["seed"] = number
        params = [sampling(output_len, **option) for output_len, option in zip(work.output_lens, own, strict=True)]
        gc.collect()  # else one run in some tens has a full collection in it: a fifth of half a second
        started = time.perf_counter()
        outputs = self.llm.generate(work.prompts, params, use_tqdm=False)
        return time.perf_counter() - started, outputs

    def warm_up(self, work: Workload, num_seqs: int, max_tokens: int, **options: Any) -> None:
        """A shorter run of other prompts of the same lengths."""
        prompts = [self.prompt(length) for length in work.prompt_lens[:num_seqs]]
        self.generate(Workload(prompts, [min(n, max_tokens) for n in work.output_lens[:num_seqs]]), **options)

    def step(self, stamps: dict[int, list[float]]) -> None:
        """One step of the engine; notes for each request when its tokens reached the caller."""
        outputs = self.llm.step()
        now = time.perf_counter()
        for output in outputs:
            stamps[output.request_id].extend([now] * len(output.new_token_ids))

    def throughput(self) -> dict[str, Any]:
        work = self.draw((100, 1024), (100, 1024), 0)
        self.warm_up(work, num_seqs=32, max_tokens=16)
        runs, limit = [], None
        for repeat in range(self.args.repeats):
            work = self.draw((100, 1024), (100, 1024), repeat)
            seconds, outputs = self.generate(work)
            produced = sum(len(output.token_ids) for output in outputs)
            cached = sum(output.num_cached_tokens for output in outputs)
            runs.append({"seconds": seconds, "output_tokens": produced, "tokens_per_second": produced / seconds})
            line = f"throughput: {len(outputs)} requests, {sum(work.prompt_lens)} prompt tokens ({cached} cached), "
            print(f"{line}{produced} output tokens in {seconds:.2f} s: {produced / seconds:.0f} tok/s", flush=True)
        if self.limits is not None:
            budgets = self.llm.config.max_num_seqs, self.llm.config.max_num_batched_tokens
            share = slice(None, None, self.llm.config.data_parallel_size)  # of one replica, were they dealt out in turn
            limit = self.limits.batch_seconds(work.prompt_lens[share], work.output_lens[share], *budgets)
        seconds = statistics.median(run["seconds"] for run in runs)
        speed = statistics.median(run["tokens_per_second"] for run in runs)
        print(f"throughput: {speed:.0f} tok/s, median of {len(runs)}{against(limit, seconds, 's', 1)}")
        median = {"tokens_per_second": speed, "seconds": seconds}
        return {"mode": "throughput", "requests": len(work.prompts), **median, "limit_seconds": limit, "runs": runs}

    def latency(self) -> dict[str, Any]:
        """One batch after another, each alone; times of the tokens of all its requests."""
        input_len = (self.args.input_len or (128, 128))[1]
        output_len = (self.args.output_len or (512, 512))[1]
        batch = self.args.batch_size
        first, mean, gaps, whole = [], [], [], []
        for number in range(1 + max(self.args.repeats, LATENCY_REQUESTS)):
            stamps: dict[int, list[float]] = defaultdict(list)
            started = time.perf_counter()
            for _ in range(batch):
                self.llm.add_request(self.prompt(input_len), sampling(output_len))
            while not self.llm.is_finished():
                self.step(stamps)
            if number:  # the first is the warm-up
                whole.append(time.perf_counter() - started)
                for times in stamps.values():
                    first.append(times[0] - started)
                    mean.append((times[-1] - times[0]) / max(1, len(times) - 1))
                    gaps += [later - sooner for sooner, later in pairwise(times)] or [0.0]
        alone = self.limits if batch == 1 else None
        first_limit = alone.first_token_seconds(input_len) if alone else None
        token_limit = alone.token_seconds(input_len, output_len) if alone else None
        first_p50, token_mean, token_p50 = statistics.median(first), statistics.median(mean), statistics.median(gaps)
        requests = "one request" if batch == 1 else f"{batch} requests at once"
        print(f"latency: {requests}, {input_len} tokens in, {output_len} out; {len(whole)} times")
        print(f"  first token {first_p50 * 1e3:.2f} ms (p50){against(first_limit, first_p50, 'ms', 1e3)}")
        share = against(token_limit, token_mean, "ms", 1e3)
        print(f"  per token after it {token_mean * 1e3:.3f} ms, p50 {token_p50 * 1e3:.3f} ms{share}", flush=True)
        seconds = {"first_token_s": first_p50, "token_mean_s": token_mean, "token_p50_s": token_p50, "batches_s": whole}
        limits = {"first_token_limit_s": first_limit, "token_limit_s": token_limit}
        sizes = {"batch_size": batch, "input_len": input_len, "output_len": output_len}
        return {"mode": "latency", **sizes, **seconds, **limits}

    def decode_stall(self) -> dict[str, Any]:
        work: StallWorkload = self.args.decode_stall
        self._stall_run(replace(work, decode_output=min(16, work.decode_output), prompts=1, first_at=0.0))  # warm-up
        result: dict[str, Any] = {"mode": "decode_stall", "workload": asdict(work)}
        print(f"decode stall: {work.decodes} decodes of {work.decode_output} tokens; {work.prompts} prompts of "
              f"{work.prompt_len}, one every {work.interval * 1e3:.0f} ms")  # fmt: skip
        for name, prompts in (("no prompts", 0), ("prompts", work.prompts)):
            gaps, first = self._stall_run(replace(work, prompts=prompts))
            parts = {f"p{share:g}_s": percentile(gaps, share / 100) for share in (50, 90, 99)} | {"max_s": max(gaps)}
            line = ", ".join(f"{part[:-2]} {value * 1e3:.1f}" for part, value in parts.items())
            if first:
                parts["first_token_p50_s"] = statistics.median(first)
                line += f"; first token of the prompts, p50: {statistics.median(first) * 1e3:.0f} ms"
            print(f"  {name}: ms between tokens {line}", flush=True)
            result[name.replace(" ", "_")] = parts
        return result

    def _stall_run(self, work: StallWorkload) -> tuple[list[float], list[float]]:
        """Seconds between the tokens of each decode, and from when a prompt was due to its first token."""
        decodes = [(self.prompt(work.decode_input), sampling(work.decode_output)) for _ in range(work.decodes)]
        prompts = [self.prompt(work.prompt_len) for _ in range(work.prompts)]
        stamps: dict[int, list[float]] = defaultdict(list)
        started = time.perf_counter()
        ids = [self.llm.add_request(*decode) for decode in decodes]
        due: dict[int, float] = {}
        while prompts or not self.llm.is_finished():
            next_due = started + work.first_at + len(due) * work.interval
            if prompts and time.perf_counter() >= next_due:
                due[self.llm.add_request(prompts.pop(), sampling(work.prompt_output))] = next_due
            elif self.llm.is_finished():
                time.sleep(max(0.0, next_due - time.perf_counter()))
            else:
                self.step(stamps)
        gaps = [later - sooner for request in ids for sooner, later in pairwise(stamps[request])]
        return gaps, [stamps[request][0] - moment for request, moment in due.items()]

    def sampling_options(self) -> dict[str, Any]:
        """Runs with and without an option in turn: what changes in a process over time is not the option's cost."""
        speeds: dict[str, float] = {}
        shares: dict[str, float] = {}
        numbers = itertools.count(1)

        def speed(every: int = 1, **options: Any) -> float:
            seconds, outputs = self.generate(self.draw((128, 128), (129, 129), next(numbers)), every, **options)
            return sum(len(output.token_ids) for output in outputs) / seconds

        for name, options, every in SAMPLING_ROWS:
            if "structured_outputs" in options and self.llm.config.skip_tokenizer_init:
                continue
            self.warm_up(self.draw((128, 128), (129, 129), 0), self.args.num_seqs, 8, **options)
            pairs = [(speed(), speed(every, **options)) for _ in range(self.args.repeats)]
            speeds[name] = statistics.median(ours for _, ours in pairs)
            shares[name] = statistics.median(ours / plain for plain, ours in pairs)
            print(f"sampling options: {name}: {speeds[name]:.0f} tok/s, {shares[name]:.3f} of plain", flush=True)
        return {"mode": "sampling_options", "tokens_per_second": speeds, "share_of_plain": shares}


def against(limit: float | None, seconds: float, unit: str, scale: float) -> str:
    """Text that follows a time on its line: the limit and the share of it that is reached; "" where no limit is
    known."""
    return "" if limit is None else f"; limit {limit * scale:.3g} {unit}, {limit / seconds:.0%} of it reached"
