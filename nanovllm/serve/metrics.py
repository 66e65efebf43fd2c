"""Counters of the front, as plain numbers; made into Prometheus' text when asked for. Names are vLLM's."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nanovllm.outputs import ITERATION_TOKENS
from nanovllm.serve.frames import ControlState, Done, Stats

if TYPE_CHECKING:
    from nanovllm.serve.request import Completion, Request

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


class Histogram:
    """Counts of values up to each bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus has them."""
        total, found = 0, []
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class Metrics:
    """What has been counted since the start."""

    def __init__(self) -> None:
        self.first_token = Histogram(_FIRST_TOKEN)
        self.inter_token = Histogram(_PER_TOKEN)
        self.per_token = Histogram(_PER_TOKEN)
        self.end_to_end, self.queue = Histogram(_REQUEST), Histogram(_REQUEST)
        self.prefill, self.decode, self.inference = Histogram(_REQUEST), Histogram(_REQUEST), Histogram(_REQUEST)
        self.prompt_lengths, self.output_lengths = Histogram(_LENGTHS), Histogram(_LENGTHS)
        self.max_lengths, self.max_tokens = Histogram(_LENGTHS), Histogram(_LENGTHS)
        self.n = Histogram((1, 2, 5, 10, 20))
        self.slow_clients = 0
        self.finished: Counter[str] = Counter(stop=0, length=0, abort=0, error=0)
        self.rejected: Counter[str] = Counter(queue_full=0, loading=0, draining=0)
        self.http: Counter[tuple[str, str, str]] = Counter()
        self.http_seconds: dict[str, Histogram] = {}
        self.engine = Stats()
        """The engine's latest gauges and counters."""
        self.control = ControlState()
        self.info: dict[str, Any] = {}
        """Of the engine, once it is ready."""

    def count_completion(self, completion: "Completion") -> None:
        self.finished[completion.finish_reason or "stop"] += 1
        self.output_lengths.observe(completion.num_tokens)

    def count_part(self, part: Done, request: "Request", num_prompt_tokens: int, now: float) -> None:
        """A prompt's completions have all ended."""
        self.prompt_lengths.observe(num_prompt_tokens)
        self.queue.observe(part.queued)
        self.prefill.observe(part.prefill)
        self.decode.observe(part.decode)
        self.inference.observe(part.prefill + part.decode)
        self.end_to_end.observe(now - request.arrival)
        longest = max(each.num_tokens for each in request.completions)
        self.max_lengths.observe(longest)
        if longest > 1:
            self.per_token.observe(part.decode / (longest - 1))

    def count_request(self, n: int, max_tokens: int) -> None:
        """A request was taken in."""
        self.n.observe(n)
        self.max_tokens.observe(max_tokens)

    def count_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        self.http[handler, method, f"{status // 100}xx"] += 1
        self.http_seconds.setdefault(handler, Histogram(_HTTP)).observe(seconds)

    # -- text ---------------------------------------------------------------------------------------------------

    def text(self, model_name: str) -> bytes:
        """Prometheus' exposition format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(_Collector(self, {"model_name": model_name, "engine": "0"}))
        return generate_latest(registry)

    def counters(self) -> dict[str, float]:
        engine = self.engine
        return {
            "prompt_tokens": engine.prompt_tokens,
            "generation_tokens": engine.generation_tokens,
            "prefix_cache_queries": engine.prefix_cache_queries,
            "prefix_cache_hits": engine.prefix_cache_hits,
            "prompt_tokens_cached": engine.prefix_cache_hits,
            "num_preemptions": engine.num_preemptions,
            "slow_clients_closed": self.slow_clients,
        }

    def gauges(self) -> dict[str, float]:
        engine = self.engine
        return {
            "num_requests_running": engine.running,
            "num_requests_waiting": engine.waiting,
            "kv_cache_usage_perc": engine.kv_usage,
            "gpu_cache_usage_perc": engine.kv_usage,
        }

    def histograms(self) -> dict[str, Histogram]:
        steps = Histogram(ITERATION_TOKENS)
        steps.counts, steps.sum = self.engine.iteration_tokens or steps.counts, self.engine.iteration_tokens_sum
        return {
            "time_to_first_token_seconds": self.first_token,
            "inter_token_latency_seconds": self.inter_token,
            "time_per_output_token_seconds": self.inter_token,
            "request_time_per_output_token_seconds": self.per_token,
            "e2e_request_latency_seconds": self.end_to_end,
            "request_queue_time_seconds": self.queue,
            "request_prefill_time_seconds": self.prefill,
            "request_decode_time_seconds": self.decode,
            "request_inference_time_seconds": self.inference,
            "request_prompt_tokens": self.prompt_lengths,
            "request_generation_tokens": self.output_lengths,
            "request_max_num_generation_tokens": self.max_lengths,
            "request_params_n": self.n,
            "request_params_max_tokens": self.max_tokens,
            "iteration_tokens_total": steps,
        }


class _Collector:
    def __init__(self, metrics: Metrics, labels: dict[str, str]) -> None:
        self._metrics, self._labels = metrics, labels

    def collect(self) -> Iterator[Any]:
        from prometheus_client import core

        metrics, names, values = self._metrics, list(self._labels), list(self._labels.values())
        for name, number in metrics.gauges().items():
            gauge = core.GaugeMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=names)
            gauge.add_metric(values, number)
            yield gauge
        for name, number in metrics.counters().items():
            counter = core.CounterMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=names)
            counter.add_metric(values, number)
            yield counter
        for name, label, counts in (
            ("request_success", "finished_reason", metrics.finished),
            ("admission_rejections", "reason", metrics.rejected),
        ):
            counter = core.CounterMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=[*names, label])
            for which, number in counts.items():
                counter.add_metric([*values, which], number)
            yield counter
        for name, histogram in metrics.histograms().items():
            family = core.HistogramMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=names)
            family.add_metric(values, histogram.buckets(), histogram.sum)
            yield family
        yield from self._engine_state(core)
        yield from self._http(core)

    def _engine_state(self, core: Any) -> Iterator[Any]:
        names, values = list(self._labels), list(self._labels.values())
        sleep = core.GaugeMetricFamily("vllm:engine_sleep_state", "engine sleep state", labels=[*names, "sleep_state"])
        states = ("awake", "weights_offloaded", "discard_all")
        now = states[self._metrics.control.level if self._metrics.control.asleep else 0]
        for state in states:
            sleep.add_metric([*values, state], float(state == now))
        yield sleep
        info = {name: str(value) for name, value in self._metrics.info.items() if isinstance(value, (str, int, float))}
        if info:
            shown = core.GaugeMetricFamily("vllm:cache_config_info", "cache config", labels=["engine", *info])
            shown.add_metric(["0", *info.values()], 1.0)
            yield shown

    def _http(self, core: Any) -> Iterator[Any]:
        requests = core.CounterMetricFamily("http_requests", "requests", labels=["handler", "method", "status"])
        for (handler, method, status), number in self._metrics.http.items():
            requests.add_metric([handler, method, status], number)
        yield requests
        seconds = core.HistogramMetricFamily("http_request_duration_seconds", "seconds", labels=["handler"])
        for handler, histogram in self._metrics.http_seconds.items():
            seconds.add_metric([handler], histogram.buckets(), histogram.sum)
        yield seconds
