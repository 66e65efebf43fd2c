#!/usr/bin/env python3
"""Measures the engine, and compares the result with what the device allows at best.

    bench.py                               256 requests, 100..1024 tokens in and out, Qwen3-0.6B with random weights
    bench.py --model 8B --latency          one request alone: time per output token, first token
    bench.py --model 8B --decode-stall     running decodes while long prompts arrive
    bench.py --sampling-options            what each sampling option costs
    bench.py --model path/or/hub-id --enforce-eager --attention-backend triton

Several modes in one call share the engine. Prompts are token ids, so no tokenizer is loaded.
"""

import argparse
import ast
import gc
import importlib.metadata
import itertools
import json
import os
import random
import statistics
import textwrap
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_workloads import SAMPLING_ROWS, StallWorkload, Workload, draw_workload, random_prompt, sampling
from nanovllm.cli.options import Parser, add_fields, chosen
from nanovllm.config import EngineConfig
from nanovllm.models.published import PUBLISHED_SHAPES
from roofline import DeviceFigures, Roofline, device_figures

IMPORTED_AT = time.perf_counter()
LATENCY_REQUESTS = 5
SIZES = ", ".join(name.removeprefix("Qwen3-") for name in PUBLISHED_SHAPES)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0..1) of all lie below, by nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def process_age() -> float:
    """Seconds since the kernel made this process; where it does not say, since this file began to run."""
    since_import = time.perf_counter() - IMPORTED_AT
    try:
        # Field 22 of proc(5)'s stat, in clock ticks after boot. The second may hold blanks; the last ")" ends it.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return since_import
    # Some sandboxes count the two clocks from different moments: believe only an age that the import time allows.
    return age if since_import - 0.02 <= age <= since_import + 60 else since_import


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
        input_len = (self.args.input_len or (128, 128))[1]
        output_len = (self.args.output_len or (512, 512))[1]
        first, mean, gaps = [], [], []
        for number in range(1 + max(self.args.repeats, LATENCY_REQUESTS)):
            stamps: dict[int, list[float]] = defaultdict(list)
            started = time.perf_counter()
            request = self.llm.add_request(self.prompt(input_len), sampling(output_len))
            while not self.llm.is_finished():
                self.step(stamps)
            times = stamps[request]
            if number:  # the first is the warm-up
                first.append(times[0] - started)
                mean.append((times[-1] - times[0]) / max(1, len(times) - 1))
                gaps += [later - sooner for sooner, later in pairwise(times)] or [0.0]
        first_limit = self.limits.first_token_seconds(input_len) if self.limits else None
        token_limit = self.limits.token_seconds(input_len, output_len) if self.limits else None
        first_p50, token_mean, token_p50 = statistics.median(first), statistics.median(mean), statistics.median(gaps)
        print(f"latency: one request, {input_len} tokens in, {output_len} out; {len(first)} of them")
        print(f"  first token {first_p50 * 1e3:.2f} ms (p50){against(first_limit, first_p50, 'ms', 1e3)}")
        share = against(token_limit, token_mean, "ms", 1e3)
        print(f"  per token after it {token_mean * 1e3:.3f} ms, p50 {token_p50 * 1e3:.3f} ms{share}", flush=True)
        seconds = {"first_token_s": first_p50, "token_mean_s": token_mean, "token_p50_s": token_p50}
        limits = {"first_token_limit_s": first_limit, "token_limit_s": token_limit}
        return {"mode": "latency", "input_len": input_len, "output_len": output_len, **seconds, **limits}

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
    """What follows a time on its line: the limit and the share reached; nothing where no limit is known."""
    return "" if limit is None else f"; limit {limit * scale:.3g} {unit}, {limit / seconds:.0%} of it reached"


def parse_range(text: str) -> tuple[int, int]:
    """"100-1024", or one number -> the bounds."""
    low, _, high = text.partition("-")
    high = high or low
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"{text!r}: must be LOW-HIGH with 1 <= LOW <= HIGH, or one number")
    return int(low), int(high)


def parse_stall(pairs: Sequence[str]) -> StallWorkload:
    values, known = parse_assignments(pairs), {item.name: item.type for item in fields(StallWorkload)}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"--decode-stall {name}: must be one of {', '.join(known)}")
        kinds, least = ((int,), 1) if known[name] is int else ((int, float), 0)
        if type(value) not in kinds or value < least:
            raise ValueError(f"--decode-stall {name}={value!r}: must be a number >= {least}")
    return StallWorkload(**values)


def parse_assignments(pairs: Sequence[str]) -> dict[str, Any]:
    """["enforce_eager=True", "device=cpu"] -> {"enforce_eager": True, "device": "cpu"}."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r}: expected key=value")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return values


def add_engine_options(parser: Parser, model: str = "0.6B") -> None:
    """--model, and every option of the engine but the seed."""
    text = "with every option of docs/options.md, such as --tensor-parallel-size 2, --quantization fp8, --disable pdl"
    group = parser.add_argument_group("engine", text)
    group.add_argument("--model", default=model, help=f"folder, hub id, or, for random weights, one of {SIZES}")
    add_fields(group, EngineConfig, {}, leave_out=["model", "seed"], shown=False)


def engine_options(parser: Parser, args: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """The options of LLM() that were given, above `defaults`; ends with an error that names a wrong one. Replaces a
    size in `args.model` by its whole name: such a model has random weights."""
    published = None if Path(args.model).is_dir() else published_name(args.model)
    args.model = published or args.model
    if not published and not Path(args.model).is_dir() and args.model.count("/") != 1:
        parser.error(f"--model {args.model}: no such folder, no hub id (owner/name), and not one of {SIZES}")
    load_format = "dummy" if published else "auto"
    options = {"load_format": load_format, "skip_tokenizer_init": True, **defaults, **chosen(args, EngineConfig)}
    options.pop("seed", None)  # a program's own, for what it draws
    try:
        EngineConfig.from_options(**options)  # a mistake shows before anything is loaded
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return options


def make_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    modes = parser.add_argument_group("modes (any number; default: --throughput)")
    modes.add_argument("--throughput", action="store_true", help="all requests at once")
    modes.add_argument("--latency", action="store_true", help="one request alone, 128 tokens in, 512 out")
    modes.add_argument("--sampling-options", action="store_true", help="throughput by option, 128 tokens in, 129 out")
    stall = ", ".join(f"{item.name}={item.default}" for item in fields(StallWorkload))
    modes.add_argument("--decode-stall", nargs="*", metavar="KEY=VALUE", help=f"long prompts arrive; defaults: {stall}")
    modes.add_argument("--start-up", action="store_true", help="nothing after the first token, which every mode times")
    work = parser.add_argument_group("workload")
    work.add_argument("--num-seqs", type=int, default=256, help="requests")
    work.add_argument("--input-len", type=parse_range, metavar="LOW-HIGH", help="prompt tokens, by default 100-1024")
    work.add_argument("--output-len", type=parse_range, metavar="LOW-HIGH", help="output tokens, by default 100-1024")
    work.add_argument("--seed", type=int, default=0)
    work.add_argument("--repeats", type=int, default=1, help="runs, each with fresh prompts; the median counts")
    limit = parser.add_argument_group("limit of the device (known for: H200)")
    limit.add_argument("--peak-bandwidth", type=float, help="memory reads, TB/s")
    limit.add_argument("--peak-tflops", type=float, help="dense 16-bit matrix products, TFLOP/s")
    limit.add_argument("--peak-link", type=float, help="to the other ranks, GB/s each way")
    parser.add_argument("--json", metavar="FILE", help="write everything there as well")
    return parser


def published_name(model: str) -> str | None:
    """"8B" -> "Qwen3-8B"; other families by their whole names; None where there is no such shape."""
    return next((name for name in (model, f"Qwen3-{model}") if name in PUBLISHED_SHAPES), None)


def parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The arguments, and the engine's options as LLM(**options) takes them."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if min(args.num_seqs, args.repeats) < 1:
        parser.error("--num-seqs and --repeats must be at least 1")
    if args.json and (Path(args.json).is_dir() or not Path(args.json).absolute().parent.is_dir()):
        parser.error(f"--json {args.json}: must be a file in a folder that is there")
    try:
        args.decode_stall = None if args.decode_stall is None else parse_stall(args.decode_stall)
    except ValueError as error:
        parser.error(str(error))
    replicas = {} if "data_parallel_size" not in args else {"data_parallel_backend": "local"}
    options = engine_options(parser, args, **replicas)
    return args, options


def find_limits(llm: Any, info: dict[str, Any], args: argparse.Namespace) -> Roofline | None:
    """The roofline of this model on this device, where its figures are known or were given."""
    known = device_figures(info["device"])
    bandwidth = args.peak_bandwidth * 1e12 if args.peak_bandwidth else known and known.read_bytes_per_second
    flops = args.peak_tflops * 1e12 if args.peak_tflops else known and known.flops_per_second
    link = args.peak_link * 1e9 if args.peak_link else known and known.link_bytes_per_second
    if not bandwidth or not flops:
        return None
    figures = DeviceFigures(bandwidth, flops, link) if link else DeviceFigures(bandwidth, flops)
    model = llm.model_config
    # A head of a token has a scale of two bytes.
    kv_bytes = 1 + 2 / model.head_dim if info.get("kv_cache_dtype") == "float8_e4m3fn" else None
    return Roofline(model, llm.config.tensor_parallel_size, figures, 4 if "32" in info["dtype"] else 2, kv_bytes)


def print_engine(name: str, values: dict[str, Any]) -> None:
    parts = [f"{key}={value:.2f}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()]
    print(textwrap.fill(f"{name}: " + ", ".join(parts), width=120, subsequent_indent="  "), flush=True)


def versions() -> dict[str, str]:
    """Those of the packages that decide the speed, as far as they are installed."""
    names = {"triton", "flash-attn-4", "transformers"}
    return {package.name: package.version for package in importlib.metadata.distributions() if package.name in names}


def run(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    from nanovllm import LLM

    started = time.perf_counter()
    try:
        engine = LLM(**options)
    except (ValueError, OSError) as error:
        raise SystemExit(f"bench.py: {error}") from None
    with engine as llm:
        ready = time.perf_counter() - started
        info = llm.engine_info()
        bench = Bench(llm, find_limits(llm, info, args), args)
        llm.generate([bench.prompt((args.input_len or (128, 128))[0])], sampling(1), use_tqdm=False)
        start_up = {"engine_s": ready, "process_to_first_token_s": process_age()}
        info, settings = info | versions(), asdict(llm.config)
        print_engine("settings", {name: value for name, value in settings.items() if value not in (None, {})})
        print_engine("engine", info)
        print_engine("start-up", start_up)
        if info["device"] == "cpu" and args.model in PUBLISHED_SHAPES:
            print("a model of this size is slow on a CPU; README has a command that takes seconds", flush=True)
        modes = [
            (args.throughput or not (args.latency or args.decode_stall or args.sampling_options), bench.throughput),
            (args.latency, bench.latency),
            (args.decode_stall, bench.decode_stall),
            (args.sampling_options, bench.sampling_options),
        ]
        results = [] if args.start_up else [mode() for wanted, mode in modes if wanted]
    return {"model": args.model, "settings": settings, "engine": info, "start_up": start_up, "results": results}


def main(argv: Sequence[str] | None = None) -> None:
    args, options = parse_args(argv)
    record = json.dumps(run(args, options), indent=1, default=str)
    if args.json:
        Path(args.json).write_text(record + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
