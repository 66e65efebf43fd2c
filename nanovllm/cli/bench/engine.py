"""`nanovllm bench engine`, and bench.py: measures the engine and compares the result with the limit of the device.

    bench.py                               256 requests, 100..1024 tokens in and out, Qwen3-0.6B with random weights
    bench.py --model 8B --latency          one request alone: time per output token, first token
    bench.py --model 8B --decode-stall     running decodes while long prompts arrive
    bench.py --sampling-options            what each sampling option costs
    bench.py --model path/or/hub-id --enforce-eager --attention-backend triton

Several modes in one call share the engine. Prompts are token ids, so no tokenizer is loaded.
"""

import argparse
import importlib.metadata
import json
import os
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nanovllm.cli.bench.workloads import StallWorkload, sampling
from nanovllm.cli.options import Parser, add_fields, chosen
from nanovllm.config import DEMO_MODEL, EngineConfig
from nanovllm.models.published import PUBLISHED_SHAPES

if TYPE_CHECKING:
    from nanovllm.cli.bench.roofline import Roofline

IMPORTED_AT = time.perf_counter()
SIZES = ", ".join(name.removeprefix("Qwen3-") for name in PUBLISHED_SHAPES)


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


def parse_range(text: str) -> tuple[int, int]:
    """"100-1024", or one number -> the bounds."""
    low, _, high = text.partition("-")
    high = high or low
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"{text!r}: must be LOW-HIGH with 1 <= LOW <= HIGH, or one number")
    return int(low), int(high)


def parse_stall(pairs: Sequence[str]) -> StallWorkload:
    """["decodes=4"] -> the workload with these values. Raises ValueError for an unknown name or a wrong value."""
    values = dict(pair.partition("=")[::2] for pair in pairs)
    try:
        return msgspec.convert(values, StallWorkload, strict=False)
    except ValueError as error:
        raise ValueError(f"--decode-stall: {error}") from None


def add_engine_options(parser: Parser, model: str = "0.6B") -> None:
    """--model, and every option of the engine but the seed."""
    text = "with every option of docs/options.md, such as --tensor-parallel-size 2, --quantization fp8, --disable pdl"
    group = parser.add_argument_group("engine", text)
    sizes = f"demo (ships with nanovllm), or, for random weights, one of {SIZES}"
    group.add_argument("--model", default=model, help=f"a folder, a hub id, {sizes} [{model}]")
    add_fields(group, EngineConfig, leave_out=["model", "seed"])


def engine_options(parser: Parser, args: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """The options of LLM() that were given, above `defaults`; ends with an error that names a wrong one. Replaces a
    size in `args.model` by its whole name: such a model has random weights."""
    published = None if Path(args.model).is_dir() else published_name(args.model)
    args.model = published or args.model
    if not published and not Path(args.model).is_dir() and args.model.count("/") != 1 and args.model != DEMO_MODEL:
        parser.error(f"--model {args.model}: no such folder, no hub id (owner/name), not demo and not one of {SIZES}")
    load_format = "dummy" if published else "auto"
    options = {"load_format": load_format, "skip_tokenizer_init": True, **defaults, **chosen(args, EngineConfig)}
    options.pop("seed", None)  # a program's own, for what it draws
    try:
        EngineConfig.from_options(**options)  # a mistake shows before anything is loaded
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return options


def add_options(parser: Parser) -> None:
    add_engine_options(parser)
    modes = parser.add_argument_group("modes (any number; default: --throughput)")
    modes.add_argument("--throughput", action="store_true", help="all requests at once")
    modes.add_argument("--latency", action="store_true", help="one request alone, 128 tokens in, 512 out")
    modes.add_argument("--sampling-options", action="store_true", help="throughput by option, 128 tokens in, 129 out")
    stall = ", ".join(f"{name}={value}" for name, value in msgspec.structs.asdict(StallWorkload()).items())
    modes.add_argument("--decode-stall", nargs="*", metavar="KEY=VALUE", help=f"long prompts arrive; defaults: {stall}")
    modes.add_argument("--start-up", action="store_true", help="nothing after the first token, which every mode times")
    work = parser.add_argument_group("workload")
    work.add_argument("--num-seqs", "--num-prompts", type=int, default=256, help="requests of --throughput [256]")
    work.add_argument("--batch-size", type=int, default=1, help="requests at a time of --latency [1]")
    work.add_argument("--input-len", type=parse_range, metavar="LOW-HIGH", help="prompt tokens, by default 100-1024")
    work.add_argument("--output-len", type=parse_range, metavar="LOW-HIGH", help="output tokens, by default 100-1024")
    work.add_argument("--seed", type=int, default=0)
    work.add_argument("--repeats", type=int, default=1, help="runs, each with fresh prompts; the median counts [1]")
    limit = parser.add_argument_group("limit of the device (known for: H200, H100 SXM)")
    limit.add_argument("--peak-bandwidth", type=float, help="memory reads, TB/s")
    limit.add_argument("--peak-tflops", type=float, help="dense 16-bit matrix products, TFLOP/s")
    limit.add_argument("--peak-link", type=float, help="to the other ranks, GB/s each way")
    parser.add_argument("--json", "--output-json", metavar="FILE", help="write everything there as well")


def make_parser() -> Parser:
    parser = Parser(prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    return parser


def published_name(model: str) -> str | None:
    """"8B" -> "Qwen3-8B"; other families by their whole names; None where there is no such shape."""
    return next((name for name in (model, f"Qwen3-{model}") if name in PUBLISHED_SHAPES), None)


def parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The arguments, and the engine's options as LLM(**options) takes them."""
    parser = make_parser()
    args = parser.parse_args(argv)
    return args, check(parser, args)


def check(parser: Parser, args: argparse.Namespace) -> dict[str, Any]:
    """Refuses wrong arguments by name. Returns the engine's options."""
    for name in ("num_seqs", "repeats", "batch_size"):
        if (value := getattr(args, name)) < 1:
            parser.error(f"--{name.replace('_', '-')}={value}: must be at least 1")
    if args.json and (Path(args.json).is_dir() or not Path(args.json).absolute().parent.is_dir()):
        parser.error(f"--json {args.json}: must be a file in an existing folder")
    try:
        args.decode_stall = None if args.decode_stall is None else parse_stall(args.decode_stall)
    except ValueError as error:
        parser.error(str(error))
    replicas = {} if "data_parallel_size" not in args else {"data_parallel_backend": "local"}
    return engine_options(parser, args, **replicas)


def find_limits(llm: Any, info: dict[str, Any], args: argparse.Namespace) -> "Roofline | None":
    """The roofline of this model on this device, where its figures are known or were given."""
    from nanovllm.cli.bench.roofline import DeviceFigures, Roofline, device_figures

    known = device_figures(info["device"])
    bandwidth = args.peak_bandwidth * 1e12 if args.peak_bandwidth else known and known.read_bytes_per_second
    flops = args.peak_tflops * 1e12 if args.peak_tflops else known and known.flops_per_second
    link = args.peak_link * 1e9 if args.peak_link else known and known.link_bytes_per_second
    model = llm.model_config
    if not bandwidth or not flops or model.implementation != "native":
        return None
    figures = DeviceFigures(bandwidth, flops, link) if link else DeviceFigures(bandwidth, flops)
    # A head of a token has a scale of two bytes.
    kv_bytes = 1 + 2 / model.head_dim if info.get("kv_cache_dtype") == "float8_e4m3fn" else None
    return Roofline(model, llm.config.tensor_parallel_size, figures, info["dtype"].removeprefix("torch."), kv_bytes)


def print_engine(name: str, values: dict[str, Any]) -> None:
    parts = [f"{key}={value:.2f}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()]
    print(textwrap.fill(f"{name}: " + ", ".join(parts), width=120, subsequent_indent="  "), flush=True)


def versions() -> dict[str, str]:
    """Versions of the installed packages that decide the speed, by name."""
    names = {"triton", "flash-attn-4", "transformers"}
    return {package.name: package.version for package in importlib.metadata.distributions() if package.name in names}


def run(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    from nanovllm.llm import LLM

    started = time.perf_counter()
    try:
        engine = LLM(**options)
    except (ValueError, OSError) as error:
        raise SystemExit(f"nanovllm bench: {error}") from None
    with engine as llm:
        ready = time.perf_counter() - started
        from nanovllm.cli.bench.modes import Bench  # brings torch, which the engine's processes import side by side

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
        stats = asdict(llm.stats())
        drafts = {name: value for name, value in stats.items() if name.startswith("spec_decode_")}
        if drafts["spec_decode_num_drafts"]:
            print_engine("drafts", drafts)
    return {
        "model": args.model, "settings": settings, "engine": info, "start_up": start_up, "drafts": drafts,
        "results": results,
    }  # fmt: skip


def measure(args: argparse.Namespace, options: dict[str, Any]) -> None:
    record = json.dumps(run(args, options), indent=1, default=str)
    if args.json:
        Path(args.json).write_text(record + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    measure(*parse_args(argv))
