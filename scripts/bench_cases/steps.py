"""Whole steps of an engine with random weights, as it is and with an option against it.

Tensor-parallel layers, their all-reduces and two-batch overlap are compared here, among the kernels that they meet.
"""

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench import parse_assignments
from bench_cases.harness import Line, Setup
from nanovllm import LLM, SamplingParams

DECODE_ROWS, PROMPT_TOKENS = (1, 16, 64, 128, 256), (2304, 4096, 8192)
CONTEXT, PROMPT = 300, 1024
STEPS, REPEATS = 30, 5
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "eos_token_id": 7}
DRY: dict[str, Any] = {
    "hf_overrides": {**TINY, "head_dim": 16},
    "num_kvcache_blocks": 512,
    "device": "cpu",
    "kvcache_block_size": 16,
}


def decode_steps(setup: Setup) -> Iterator[Line]:
    """us of a decode step of so many rows."""
    yield from against(setup, setup.rows(DECODE_ROWS), decode_us)


def prompt_steps(setup: Setup) -> Iterator[Line]:
    """us of prompts of so many tokens, with one token sampled of each: one step where the batch allows it."""
    yield from against(setup, setup.rows(PROMPT_TOKENS, (100,)), prompt_us)


def against(setup: Setup, sizes: Any, measure: Any) -> Iterator[Line]:
    """A line for each size. Engines follow one another, since each takes the whole GPU."""
    settings: list[dict[str, Any]] = [{}, parse_assignments(setup.options.against)]
    times: list[list[float]] = []
    for options in settings[: 2 if setup.options.against else 1]:
        dry: dict[str, Any] = DRY if setup.dry else {}
        with LLM(
            setup.options.model, load_format="dummy", skip_tokenizer_init=True,
            tensor_parallel_size=setup.options.ranks, enable_prefix_caching=False, **{**dry, **options},
        ) as llm:  # fmt: skip
            times.append([measure(llm, size) for size in sizes])
    for number, size in enumerate(sizes):
        ours, *other = (of_setting[number] for of_setting in times)
        line: Line = {"rows": size, "us": ours}
        if other:
            line |= {" ".join(setup.options.against): other[0], "%": 100 * (other[0] / ours - 1)}
        yield line


def decode_us(llm: LLM, rows: int) -> float:
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=4 * STEPS)
    ids = [llm.add_request([1 + number % 97] * CONTEXT, params) for number in range(rows)]
    while llm.engine.num_prefill_tokens < rows * CONTEXT and not llm.is_finished():
        llm.step()
    for _ in range(STEPS // 3):
        llm.step()
    times = [seconds_of(partial(run_steps, llm, STEPS // 3)) / (STEPS // 3) for _ in range(3)]
    for request_id in ids:
        llm.abort(request_id)
    while not llm.is_finished():
        llm.step()
    return statistics.median(times) * 1e6


def run_steps(llm: LLM, count: int) -> None:
    for _ in range(count):
        llm.step()


def prompt_us(llm: LLM, tokens: int) -> float:
    lengths = [PROMPT] * (tokens // PROMPT) + ([tokens % PROMPT] if tokens % PROMPT else [])
    prompts = [[2 + number] * length for number, length in enumerate(lengths)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
    run = partial(llm.generate, prompts, params, use_tqdm=False)
    run()
    return statistics.median(seconds_of(run) for _ in range(REPEATS)) * 1e6


def seconds_of(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
