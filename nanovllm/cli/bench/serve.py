"""`nanovllm bench serve`: requests to an OpenAI server, at a rate or all at once."""

import argparse
import asyncio
import json
import math
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.cli.bench.data import Sample, add_dataset_options, draw_samples
from nanovllm.cli.bench.report import METRICS, Measured, summarise, table
from nanovllm.cli.options import Parser, count, json_object, number

if TYPE_CHECKING:
    from nanovllm.cli.http_client import Client

_PATHS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}


def add_options(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", choices=tuple(_PATHS), default="openai", help="completions or chats [openai]")
    group.add_argument("--base-url", metavar="URL", help="instead of host and port; unix:PATH for a socket")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=8000)
    group.add_argument("--endpoint", metavar="PATH", help="instead of the backend's")
    group.add_argument("--model", help="model name to request; default: the server's first")
    group.add_argument("--served-model-name", metavar="NAME", help="the same, where --model is a folder")
    group.add_argument("--tokenizer", metavar="DIR", help="tokenizer to draw prompts from; default: the model's")
    group.add_argument("--header", action="append", default=[], metavar="KEY=VALUE")
    add_dataset_options(parser)
    group = parser.add_argument_group("requests")
    group.add_argument("--request-rate", type=float, default=float("inf"), metavar="N", help="a second [inf: at once]")
    text = "1: a Poisson process; smaller: burstier (the shape of gamma-distributed gaps) [1]"
    group.add_argument("--burstiness", type=float, default=1.0, metavar="N", help=text)
    group.add_argument("--max-concurrency", type=count, metavar="N", help="maximum requests in flight")
    group.add_argument("--num-warmups", type=count, default=0, metavar="N", help="requests before the clock runs [0]")
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument("--temperature", type=number, metavar="N")
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON")
    group.add_argument("--seed", type=int, default=0)
    group = parser.add_argument_group("results")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl", metavar="LIST", help=f"of {','.join(METRICS)}")
    group.add_argument("--metric-percentiles", default="99", metavar="LIST", help="for example 50,90,99 [99]")
    group.add_argument("--save-result", action="store_true", help="as JSON")
    group.add_argument("--save-detailed", action="store_true", help="with the times of each request")
    group.add_argument("--result-dir", default=".", metavar="DIR")
    group.add_argument("--result-filename", metavar="FILE")
    group.add_argument("--disable-tqdm", action="store_true")


class Bench:
    """One run against one server."""

    def __init__(self, client: "Client", given: argparse.Namespace, model: str) -> None:
        self._client, self._given, self._model = client, given, model
        self._path = given.endpoint or _PATHS[given.backend]
        self._is_chat = self._path.endswith("/chat/completions")

    def _body(self, sample: Sample) -> dict[str, Any]:
        chat = {"messages": [{"role": "user", "content": sample.prompt}]}
        optional = {"ignore_eos": self._given.ignore_eos or None, "temperature": self._given.temperature}
        return {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": sample.num_output_tokens,
            **(chat if self._is_chat else {"prompt": sample.prompt}),
            **{name: value for name, value in optional.items() if value is not None},
            **self._given.extra_body,
        }

    async def ask(self, sample: Sample) -> Measured:
        """Sends one request and reads its stream."""
        found = Measured(sample.num_prompt_tokens, time.perf_counter())
        try:
            async with self._client.stream(self._path, self._body(sample)) as events:
                async for now, event in events:
                    self._take(found, now, event)
            if not found.times:
                found.error = "the server sent no tokens"
        except OSError as error:
            found.error = str(error)
        return found

    def _take(self, found: Measured, now: float, event: dict[str, Any]) -> None:
        if event.get("choices"):
            choice = event["choices"][0]
            delta = choice.get("delta")
            said = choice.get("text") if delta is None else any(value for key, value in delta.items() if key != "role")
            if said:
                found.times.append(now - found.begin)
                found.num_output_tokens += 1
        if usage := event.get("usage"):
            found.num_output_tokens = usage["completion_tokens"]
            found.num_prompt_tokens = usage["prompt_tokens"]

    async def run(self, samples: Sequence[Sample], progress: Any) -> tuple[list[Measured], float]:
        """Sends all requests at the asked rate; returns what was measured, and the seconds that it took."""
        slots = asyncio.Semaphore(self._given.max_concurrency or len(samples))

        async def one(sample: Sample) -> Measured:
            async with slots:
                found = await self.ask(sample)
            progress.update(1)
            return found

        begin = time.perf_counter()
        tasks = [asyncio.create_task(one(sample)) async for sample in self._arrivals(samples)]
        measured = await asyncio.gather(*tasks)
        return list(measured), time.perf_counter() - begin

    async def _arrivals(self, samples: Sequence[Sample]) -> AsyncIterator[Sample]:
        """Yields the requests at moments fixed before the start, so that a late one does not move all others."""
        given, rng = self._given, random.Random(self._given.seed)
        moment = time.perf_counter()
        for sample in samples:
            if (wait := moment - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            yield sample
            if given.request_rate != float("inf"):
                moment += rng.gammavariate(given.burstiness, 1 / (given.request_rate * given.burstiness))


def _check(given: argparse.Namespace) -> tuple[list[str], list[float]]:
    """The metrics and percentiles to show. Raises ValueError."""
    for name in ("request_rate", "burstiness"):
        if not getattr(given, name) > 0:
            raise ValueError(f"{name}={getattr(given, name)}: must be > 0")
    if given.max_concurrency is not None and given.max_concurrency < 1:
        raise ValueError(f"max_concurrency={given.max_concurrency}: must be >= 1")
    metrics = [name for name in given.percentile_metrics.split(",") if name]
    if unknown := [name for name in metrics if name not in METRICS]:
        raise ValueError(f"percentile_metrics={unknown[0]!r}: must be of {', '.join(METRICS)}")
    try:
        percents = [float(text) for text in given.metric_percentiles.split(",")]
    except ValueError:
        percents = [math.nan]
    if not all(0 <= percent <= 100 for percent in percents):
        raise ValueError(f"metric_percentiles={given.metric_percentiles!r}: must be numbers in 0..100, such as 50,99")
    if given.prompt_token_ids and _PATHS[given.backend].endswith("/chat/completions"):
        raise ValueError("prompt_token_ids: chats take text; use --backend openai")
    return metrics, percents


def _client(given: argparse.Namespace) -> "Client":
    from nanovllm.cli.http_client import Client

    headers = {}
    for header in given.header:
        name, equals, value = header.partition("=")
        if not equals or not name.isascii() or any(each in header for each in "\r\n"):
            raise ValueError(f"header={header[:200]!r}: must be KEY=VALUE")
        headers[name.lower()] = value
    url = given.base_url or f"http://{given.host}:{given.port}"
    return Client(url, os.environ.get("OPENAI_API_KEY") or os.environ.get("NANOVLLM_API_KEY"), headers)


async def _measure(given: argparse.Namespace) -> tuple[list[Measured], float, str]:
    async with _client(given) as client:
        served = (await client.get("/v1/models"))["data"][0]
        model = given.served_model_name or given.model or served["id"]
        samples = draw_samples(given, given.tokenizer or given.model or served.get("root") or served["id"])
        bench = Bench(client, given, model)
        first = await bench.ask(samples[0])
        if first.error:
            raise OSError(f"the first request, a test, failed: {first.error}")
        await asyncio.gather(*(bench.ask(samples[n % len(samples)]) for n in range(given.num_warmups)))
        from tqdm import tqdm

        hidden = given.disable_tqdm or not sys.stderr.isatty()
        with tqdm(total=len(samples), disable=hidden, unit="req", dynamic_ncols=True) as progress:
            measured, seconds = await bench.run(samples, progress)
    return measured, seconds, model


def run(given: argparse.Namespace) -> int:
    metrics, percents = _check(given)
    measured, seconds, model = asyncio.run(_measure(given))
    found = summarise(measured, seconds, metrics, percents)
    print(table(found, metrics, percents, given.request_rate, given.max_concurrency))
    if errors := [each.error for each in measured if each.error]:
        print(f"the first of {len(errors)} errors: {errors[0]}", file=sys.stderr)
    if given.save_result or given.save_detailed:
        print(f"written: {_save(given, found, measured, model)}", file=sys.stderr)
    return 1 if errors else 0


def _save(given: argparse.Namespace, found: dict[str, Any], measured: list[Measured], model: str) -> Path:
    moment = datetime.now().strftime("%Y%m%d-%H%M%S")
    rate = given.request_rate if given.request_rate != float("inf") else "inf"
    same = {name: getattr(given, name) for name in ("backend", "num_prompts", "burstiness", "max_concurrency")}
    entry: dict[str, Any] = {"date": moment, "model_id": model, "request_rate": rate, **same, **found}
    if given.save_detailed:
        good = [each for each in measured if not each.error]
        entry |= {
            "input_lens": [each.num_prompt_tokens for each in good],
            "output_lens": [each.num_output_tokens for each in good],
            "ttfts": [each.times[0] for each in good],
            "itls": [each.itl for each in good],
            "errors": [each.error for each in measured],
        }
    path = Path(given.result_dir) / (given.result_filename or f"{given.backend}-{rate}qps-{moment}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entry) + "\n", encoding="utf-8")
    return path
