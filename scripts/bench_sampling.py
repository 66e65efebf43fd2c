"""What sampling options cost where all rows, or only some, have them: output tokens per second of 256 requests.

    python scripts/bench_sampling.py --model 0.6B                   # random weights; the table and mixed batches
    python scripts/bench_sampling.py --model 0.6B --schema          # also a JSON schema on a quarter of the requests

The first part is `bench.py --sampling-options`. For a JSON schema without a checkpoint the demo's small tokenizer
stands in for the model's: masks have the model's size, and computing them costs less than with a large vocabulary.
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

from bench import Bench, draw_workload, parse_args, sampling  # noqa: E402
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
    ("nobody", {}),
    ("top_p 0.9", {"top_p": 0.9}),
    ("penalties", {"presence_penalty": 0.5, "repetition_penalty": 1.1}),
    ("logprobs 5", {"logprobs": 5}),
]


def mixed(llm: LLM, name: str, options: dict[str, Any], every: int, plain: float | None, repeats: int) -> float:
    """Tokens per second with `options` on one request of `every`; printed beside those without."""
    speeds = []
    for repeat in range(repeats + 1):
        work = draw_workload(256, (128, 128), (129, 129), 7, llm.model_config.vocab_size, 100 + repeat)
        lengths = [8 if repeat == 0 else n for n in work.output_lens]  # the first is the warm-up
        params = [sampling(n, **(options if i % every == 0 else {})) for i, n in enumerate(lengths)]
        begin = time.perf_counter()
        outputs = llm.generate(work.prompts, params, use_tqdm=False)
        speeds.append(sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - begin))
    speed = statistics.median(speeds[1:])
    share = "" if plain is None else f", {speed / plain:.2f} of nobody"
    print(f"one request in {every} with {name}: {speed:.0f} tok/s{share}", flush=True)
    return speed


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
        Bench(llm, None, args).sampling_options()
        plain = mixed(llm, *MIXED[0], every=1, plain=None, repeats=args.repeats)
        for name, row in MIXED[1:]:
            mixed(llm, name, row, 4, plain, args.repeats)
        if own.schema:
            wanted = {"structured_outputs": StructuredOutput(json=SCHEMA)}
            mixed(llm, "a JSON schema", wanted, 4, plain, args.repeats)


if __name__ == "__main__":
    main()
