"""Counters of the front, as plain numbers; made into Prometheus' text when asked for. Names are vLLM's."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.engine_stats import ITERATION_TOKENS, EngineStats
from nanovllm.engine.step import Done
from nanovllm.serve.request import Row

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
    *(640, 2560),
)
_PER_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80),
)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_HTTP = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 600)
_COUNTERS = (
    *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("prefix_cache_state_misses", "num_preemptions"),
)
_DRAFT_COUNTERS = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
"""Fields of EngineStats that are shown under their names."""
_LORA_LABELS = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""Names of the sleep states by level."""
_SHOWN_INFO = (
    *("max_model_len", "max_num_seqs", "vocab_size", "num_kv_tokens", "block_size", "dtype", "device"),
    *("tensor_parallel_size", "data_parallel_size", "startup_seconds"),
)
"""Entries of the engine's description that are shown: /metrics needs no key, so it shows no paths and no process id."""


class Histogram:
    """Counts of values up to each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus has them."""
        bounds = *map(str, map(float, self.bounds)), "+Inf"
        return [*zip(bounds, map(float, accumulate(self.counts)), strict=True)]


_HISTOGRAMS: dict[str, Sequence[float]] = {
    "time_to_first_token_seconds": _FIRST_TOKEN,
    "inter_token_latency_seconds": _PER_TOKEN,
    "request_time_per_output_token_seconds": _PER_TOKEN,
    "e2e_request_latency_seconds": _REQUEST,
    "request_queue_time_seconds": _REQUEST,
    "request_prefill_time_seconds": _REQUEST,
    "request_decode_time_seconds": _REQUEST,
    "request_inference_time_seconds": _REQUEST,
    "request_prompt_tokens": _LENGTHS,
    "request_generation_tokens": _LENGTHS,
    "request_max_num_generation_tokens": _LENGTHS,
    "request_params_n": (1, 2, 5, 10, 20),
    "request_params_max_tokens": _LENGTHS,
    "iteration_tokens_total": ITERATION_TOKENS,
}


class Metrics:
    """Counters and histograms since the start."""

    def __init__(
        self, model_name: str = "", state: Callable[[], EngineState] = EngineState,
        stats: Callable[[], EngineStats] = EngineStats,
    ) -> None:  # fmt: skip
        """`state`, `stats`: of the engines, now."""
        self._state, self.stats = state, stats
        self._labels = {"model_name": model_name, "engine": "0"}
        self._histograms = {name: Histogram(bounds) for name, bounds in _HISTOGRAMS.items()}
        self.first_token = self._histograms["time_to_first_token_seconds"]
        self.inter_token = self._histograms["inter_token_latency_seconds"]
        self._histograms["time_per_output_token_seconds"] = self.inter_token  # its older name
        self.slow_clients = 0
        self.finished: Counter[str] = Counter(stop=0, length=0, abort=0, error=0)
        self.rejected: Counter[str] = Counter(queue_full=0, key_full=0, loading=0, draining=0)
        self.http: Counter[tuple[str, str, str]] = Counter()
        self.http_seconds: dict[str, Histogram] = {}
        self.info: dict[str, Any] = {}
        """Description of the engine, once it is ready."""

    def _observe(self, **values: float) -> None:
        for name, value in values.items():
            self._histograms[name].observe(value)

    def count_row(self, row: Row) -> None:
        self.finished["stop" if row.end is None else row.end.reason] += 1
        self._observe(request_generation_tokens=row.num_tokens)

    def count_end(self, done: Done, rows: Sequence[Row], num_prompt_tokens: int, seconds: float) -> None:
        """A prompt's completions have all ended, so many seconds after its request came."""
        longest = max(each.num_tokens for each in rows)
        self._observe(
            request_prompt_tokens=num_prompt_tokens,
            request_queue_time_seconds=done.queued,
            request_prefill_time_seconds=done.prefill,
            request_decode_time_seconds=done.decode,
            request_inference_time_seconds=done.prefill + done.decode,
            e2e_request_latency_seconds=seconds,
            request_max_num_generation_tokens=longest,
        )
        if longest > 1:
            self._observe(request_time_per_output_token_seconds=done.decode / (longest - 1))

    def count_prompt(self, n: int, max_tokens: int) -> None:
        """A prompt of a request was taken in."""
        self._observe(request_params_n=n, request_params_max_tokens=max_tokens)

    def count_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        self.http[handler, method, f"{status // 100}xx"] += 1
        self.http_seconds.setdefault(handler, Histogram(_HTTP)).observe(seconds)

    # -- text ---------------------------------------------------------------------------------------------------

    def text(self) -> bytes:
        """Prometheus' exposition format."""
        from prometheus_client import generate_latest

        return generate_latest(cast(Any, self))  # which asks `collect` alone

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        engine = self.stats()
        steps = self._histograms["iteration_tokens_total"]
        steps.counts, steps.sum = [*engine.iteration_tokens] or steps.counts, engine.iteration_tokens_sum
        gauges = {
            "num_requests_running": engine.num_running,
            "num_requests_waiting": engine.num_waiting,
            "kv_cache_usage_perc": engine.kv_cache_usage,
            "gpu_cache_usage_perc": engine.kv_cache_usage,
        }
        counters = {name: getattr(engine, name) for name in _COUNTERS}
        counters |= {"prompt_tokens_cached": engine.prefix_cache_hits, "slow_clients_closed": self.slow_clients}
        if accepted := engine.spec_decode_accepted_per_pos:
            counters |= {name: getattr(engine, name) for name in _DRAFT_COUNTERS}
        for name, number in gauges.items():
            yield self._family(GaugeMetricFamily, name, {"": number})
        for name, number in counters.items():
            yield self._family(CounterMetricFamily, name, {"": number})
        if accepted:
            by_place = {str(place): number for place, number in enumerate(accepted)}
            yield self._family(CounterMetricFamily, "spec_decode_num_accepted_tokens_per_pos", by_place, "position")
        if most := self.info.get("max_loras"):
            adapters = GaugeMetricFamily("vllm:lora_requests_info", "lora requests info", labels=_LORA_LABELS)
            names = (",".join(each) for each in (engine.waiting_adapters, engine.running_adapters))
            adapters.add_metric([str(most), *names], time.time())
            yield adapters
        yield self._family(CounterMetricFamily, "request_success", self.finished, "finished_reason")
        yield self._family(CounterMetricFamily, "admission_rejections", self.rejected, "reason")
        state = self._state()
        current = _SLEEP_STATES[state.level if state.asleep else 0]
        states = {name: float(name == current) for name in _SLEEP_STATES}
        yield self._family(GaugeMetricFamily, "engine_sleep_state", states, "sleep_state")
        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=[*self._labels])
            family.add_metric([*self._labels.values()], histogram.buckets(), histogram.sum)
            yield family
        info = {name: str(self.info[name]) for name in _SHOWN_INFO if name in self.info}
        if info:
            shown = GaugeMetricFamily("vllm:cache_config_info", "cache config", labels=["engine", *info])
            shown.add_metric(["0", *info.values()], 1.0)
            yield shown
        requests = CounterMetricFamily("http_requests", "requests", labels=["handler", "method", "status"])
        for labels, number in self.http.items():
            requests.add_metric(labels, number)
        yield requests
        seconds = HistogramMetricFamily("http_request_duration_seconds", "seconds", labels=["handler"])
        for handler, histogram in self.http_seconds.items():
            seconds.add_metric([handler], histogram.buckets(), histogram.sum)
        yield seconds

    def _family(self, kind: Any, name: str, numbers: Mapping[str, float], *labels: str) -> Any:
        """A metric with a number, or with one for each value of a label."""
        family = kind(f"vllm:{name}", name.replace("_", " "), labels=[*self._labels, *labels])
        for value, number in numbers.items():
            family.add_metric([*self._labels.values(), value][: len(self._labels) + len(labels)], number)
        return family
