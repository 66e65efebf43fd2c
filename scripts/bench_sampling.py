"""What sampling options cost where all rows, or only some, have them: output tokens per second of 256 requests.

    python scripts/bench_sampling.py --model 0.6B                   # random weights; the table and mixed batches
    python scripts/bench_sampling.py --model 0.6B --schema          # also a JSON schema on a quarter of the requests

Runs with and without an option alternate, so that what changes in a process over time (its blocks, its heap, the
device's clock) does not pass for the option's cost. The share is the median of pairs. For a JSON schema without a
checkpoint the demo's small tokenizer stands in for the model's: masks have the model's size, and computing them costs
less than with a large vocabulary.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import SAMPLING_ROWS, draw_workload, parse_args, sampling  # noqa: E402
from nanovllm import LLM, StructuredOutput  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["fox", "rabbit", "owl"]},
        "sizes": {"type": "array", "items": {"type": "number"}, "minItems": 500},
    },
    "required": ["name", "kind", "sizes"],
}
MIXED: list[tuple[str, dict[str, Any]]] = [
    ("top_p 0.9", {"top_p": 0.9}),
    ("penalties", {"presence_penalty": 0.5, "repetition_penalty": 1.1}),
    ("logprobs 5", {"logprobs": 5}),
]


def speed(llm: LLM, options: dict[str, Any], every: int, repeat: int) -> float:
    """Tokens per second with `options` on one request of `every`; repeat 0 is a short warm-up."""
    work = draw_workload(256, (128, 128), (129, 129), 7, llm.model_config.vocab_size, 100 + repeat)
    lengths = [8 if repeat == 0 else n for n in work.output_lens]
    own = [{**options, "seed": n} if "seed" in options else options for n in range(len(lengths))]
    params = [sampling(n, **(own[i] if i % every == 0 else {})) for i, n in enumerate(lengths)]
    begin = time.perf_counter()
    outputs = llm.generate(work.prompts, params, use_tqdm=False)
    return sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - begin)


def compare(llm: LLM, name: str, options: dict[str, Any], every: int, repeats: int) -> None:
    """Prints the speed with `options` beside that without."""
    speed(llm, options, every, 0)
    pairs = [(speed(llm, {}, 1, 2 * n + 1), speed(llm, options, every, 2 * n + 2)) for n in range(repeats)]
    share = statistics.median(ours / plain for plain, ours in pairs)
    who = "every request" if every == 1 else f"one request in {every}"
    median = statistics.median(ours for _, ours in pairs)
    print(f"{who} with {name}: {median:.0f} tok/s, {share:.3f} of the same without", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schema", action="store_true", help="a JSON schema on every fourth request")
    own, rest = parser.parse_known_args(argv)
    args, options = parse_args(rest)
    if own.schema:
        options |= {"skip_tokenizer_init": False}
        if not Path(args.model).is_dir():
            options["tokenizer"] = str(ROOT / "assets" / "demo-qwen3")
    with LLM(args.model, **options) as llm:
        speed(llm, {}, 1, 0)
        for name, row in SAMPLING_ROWS:
            compare(llm, name, row, 1, args.repeats)
        for name, row in MIXED:
            compare(llm, name, row, 4, args.repeats)
        if own.schema:
            compare(llm, "a JSON schema", {"structured_outputs": StructuredOutput(json=SCHEMA)}, 4, args.repeats)


if __name__ == "__main__":
    main()
