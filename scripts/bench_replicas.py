#!/usr/bin/env python
"""Measures the front of replicas: requests and tokens for each second of its CPU time, with replicas that compute
nothing.

    python scripts/bench_replicas.py --replicas 4 --input-len 228 --output-len 100
    python scripts/bench_replicas.py --replicas 64 --input-len 228 --output-len 50 --requests 8000

CPU time is that of this process with its threads: checks, block hashes, routing, messages, tokens taken in. Texts are
not made. Replicas are processes (simulated_engine.py) that give a token to up to 256 rows at once.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from nanovllm.config import EngineConfig  # noqa: E402
from nanovllm.engine.prompt import Prompt  # noqa: E402
from nanovllm.host import handle, wire  # noqa: E402
from nanovllm.host.engines import Engines  # noqa: E402
from nanovllm.host.fleet_engine import FleetEngine  # noqa: E402
from nanovllm.host.start import await_ready  # noqa: E402
from nanovllm.models.registry import read_model_config  # noqa: E402
from nanovllm.sampling_params import SamplingParams  # noqa: E402
from nanovllm.text.tokenizer import Tokenizer  # noqa: E402

_SIMULATED = {"text": [7], "rate": 0, "rows": 256}


def start(replicas: int, **options: Any) -> FleetEngine:
    """The engine over so many simulators. `options`: of simulated_engine.py."""
    config = EngineConfig(
        str(ROOT / "nanovllm" / "demo_model"), skip_tokenizer_init=True, max_model_len=4096, kvcache_block_size=128,
        hf_overrides={"max_position_embeddings": 4096}, data_parallel_size=replicas, data_parallel_backend="local",
    )  # fmt: skip

    handle.MODULE = "simulated_engine"
    engines = Engines(config.model, {**_SIMULATED, **options, "data_parallel_size": replicas})
    await_ready(engines)
    for one in engines.ready.values():
        one.info["model"], one.config = config.model, wire.config_fields(config)
    return FleetEngine(engines, config, read_model_config(config), Tokenizer(config))


def run(engine: FleetEngine, requests: int, input_len: int, output_len: int) -> None:
    chance = random.Random(1)
    vocab = engine.model_config.vocab_size
    prompts = [[chance.randrange(vocab) for _ in range(input_len)] for _ in range(requests)]
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    cpu, wall, tokens = time.process_time(), time.perf_counter(), 0
    for prompt in prompts:
        engine.add_request(Prompt(prompt), params)
    while engine.has_unfinished_requests():
        gained = engine.step()
        tokens += len(gained.numbers)
        for done in gained.done:
            engine.book.forget(done.request_id)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert tokens == requests * output_len
    each = f"{cpu / requests * 1e6:.0f} us a request, {cpu / tokens * 1e6:.2f} us a token"
    print(f"a core carries {requests / cpu:,.0f} requests/s, {tokens / cpu:,.0f} tokens/s ({each}; {wall:.1f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--input-len", type=int, default=228)
    parser.add_argument("--output-len", type=int, default=100)
    args = parser.parse_args()
    engine = start(args.replicas)
    try:
        run(engine, 200, args.input_len, args.output_len)
        run(engine, args.requests, args.input_len, args.output_len)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
