"""Report of `bench serve`: measured requests -> the table and the JSON that `vllm bench serve` gives."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

METRICS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
_WIDTH = 50


@dataclass
class Measured:
    """One request."""

    num_prompt_tokens: int
    begin: float = 0.0
    """Moment at which it was sent, in seconds of time.perf_counter()."""
    times: list[float] = field(default_factory=list)
    """Seconds from then to each piece of the answer."""
    num_output_tokens: int = 0
    error: str = ""

    @property
    def itl(self) -> list[float]:
        """Seconds between two pieces."""
        return [after - before for before, after in pairwise(self.times)]


def summarise(
    measured: Sequence[Measured], seconds: float, metrics: Sequence[str], percents: Sequence[float]
) -> dict[str, Any]:
    """Totals, and mean, median, standard deviation and percentiles of each metric in ms."""
    good = [each for each in measured if not each.error]
    prompt = sum(each.num_prompt_tokens for each in good)
    output = sum(each.num_output_tokens for each in good)
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(measured) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
        "max_concurrent_requests": _most_at_once(good),
    }
    values = {
        "ttft": [each.times[0] for each in good],
        "tpot": [
            (one.times[-1] - one.times[0]) / (one.num_output_tokens - 1) for one in good if one.num_output_tokens > 1
        ],
        "itl": [gap for each in good for gap in each.itl],
        "e2el": [each.times[-1] for each in good],
    }
    for name in metrics:
        ms = 1000 * np.array(values[name] or [0.0])
        found[f"mean_{name}_ms"], found[f"std_{name}_ms"] = float(ms.mean()), float(ms.std())
        for key, percent in (("median", 50.0), *((f"p{percent:g}", percent) for percent in percents)):
            found[f"{key}_{name}_ms"] = float(np.percentile(ms, percent))
    return found


def _most_at_once(measured: Sequence[Measured]) -> int:
    changes = sorted([(one.begin, 1) for one in measured] + [(one.begin + one.times[-1], -1) for one in measured])
    return max(accumulate(change for _, change in changes), default=0)


def _line(name: str, value: float | int) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {shown:<10}".rstrip()


def table(
    found: dict[str, Any], metrics: Sequence[str], percents: Sequence[float], rate: float, concurrency: int | None
) -> str:
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [_line("Successful requests:", found["completed"]), _line("Failed requests:", found["failed"])]
    if concurrency is not None:
        lines.append(_line("Maximum request concurrency:", concurrency))
    if rate != float("inf"):
        lines.append(_line("Request rate configured (RPS):", rate))
    for name, key in (
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
    ):
        lines.append(_line(name, found[key]))
    for name in metrics:
        title, short = METRICS[name]
        lines.append(title.center(_WIDTH, "-"))
        lines.append(_line(f"Mean {short} (ms):", found[f"mean_{name}_ms"]))
        lines.append(_line(f"Median {short} (ms):", found[f"median_{name}_ms"]))
        lines += [_line(f"P{percent:g} {short} (ms):", found[f"p{percent:g}_{name}_ms"]) for percent in percents]
    return "\n".join([*lines, "=" * _WIDTH])
