"""`nanovllm bench throughput` and `latency`: the engine without a server."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.cli.bench.data import add_dataset_options, draw_samples
from nanovllm.cli.options import Parser, add_fields, chosen, count
from nanovllm.cli.serve import demo_model
from nanovllm.config import EngineConfig


def _add_engine_options(parser: Parser) -> None:
    parser.add_argument("--model", help="a folder or a hub id; none: the small demo model")
    parser.add_argument("--output-json", metavar="FILE", help="the results as JSON")
    add_fields(parser, EngineConfig, {}, leave_out=["model", "seed"], shown=False)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and sampling [0]")
    parser.epilog = "The engine options of `nanovllm serve` are taken too."


def add_throughput_options(parser: Parser) -> None:
    _add_engine_options(parser)
    add_dataset_options(parser, 256)
    parser.set_defaults(prompt_token_ids=True)


def add_latency_options(parser: Parser) -> None:
    _add_engine_options(parser)
    parser.add_argument("--input-len", type=count, default=32, metavar="N", help="[32]")
    parser.add_argument("--output-len", type=count, default=128, metavar="N", help="[128]")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="[8]")
    parser.add_argument("--num-iters-warmup", type=count, default=3, metavar="N", help="[3]")
    parser.add_argument("--num-iters", type=count, default=10, metavar="N", help="[10]")


def _engine(given: argparse.Namespace) -> Any:
    from nanovllm.llm import LLM

    options = chosen(given, EngineConfig)
    model = options.pop("model", None)
    return LLM(demo_model() if model is None else model, **options)


def _write(given: argparse.Namespace, found: dict[str, Any]) -> None:
    if given.output_json is not None:
        Path(given.output_json).write_text(json.dumps(found) + "\n", encoding="utf-8")


def throughput(given: argparse.Namespace) -> int:
    """All requests at once; the clock runs from the first to the last token."""
    from nanovllm.sampling_params import SamplingParams

    with _engine(given) as llm:
        samples = draw_samples(given, llm.config.tokenizer or llm.config.model)
        params = [SamplingParams(max_tokens=sample.num_output_tokens, ignore_eos=True) for sample in samples]
        prompts = [sample.prompt for sample in samples]
        llm.generate(prompts[:1], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - begin
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.token_ids) for output in outputs)
    found = {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": num_prompt + num_output,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": (num_prompt + num_output) / seconds,
        "output_tokens_per_second": num_output / seconds,
    }
    print(
        f"Throughput: {found['requests_per_second']:.2f} requests/s, {found['tokens_per_second']:.2f} total tokens/s, "
        f"{found['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_prompt}\nTotal num output tokens:  {num_output}")
    _write(given, found)
    return 0


def latency(given: argparse.Namespace) -> int:
    """One batch after another, each from its start to its last token."""
    import random

    from nanovllm.sampling_params import SamplingParams

    for name in ("input_len", "output_len", "batch_size", "num_iters"):
        if getattr(given, name) < 1:
            raise ValueError(f"{name}={getattr(given, name)}: must be >= 1")
    rng = random.Random(given.seed)
    params = SamplingParams(max_tokens=given.output_len, ignore_eos=True, detokenize=False)
    seconds = []
    with _engine(given) as llm:
        vocab = llm.model_config.vocab_size
        for n in range(given.num_iters_warmup + given.num_iters):
            prompts = [rng.choices(range(vocab), k=given.input_len) for _ in range(given.batch_size)]
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if n >= given.num_iters_warmup:
                seconds.append(time.perf_counter() - begin)
    percents = {percent: float(np.percentile(seconds, percent)) for percent in (10, 25, 50, 75, 90, 99)}
    mean = sum(seconds) / len(seconds)
    print(f"Avg latency: {mean:.6f} seconds")
    for percent, value in percents.items():
        print(f"{percent}% percentile latency: {value:.6f} seconds")
    _write(given, {"avg_latency": mean, "latencies": seconds, "percentiles": percents})
    return 0
