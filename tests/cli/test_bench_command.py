"""`bench` and `env`: figures add up, options of vLLM's are known, mistakes are named."""

import json
from pathlib import Path

import pytest
from programs import run
from running import nanovllm
from serve.serving import DEMO, Server

from nanovllm.cli.bench.data import PromptTokenizer
from nanovllm.cli.bench.report import Measured, summarise
from nanovllm.cli.main import main

SMALL = ("--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "8", "--ignore-eos")


def test_summary_of_known_times() -> None:
    slow = Measured(10, begin=1.0, times=[1.0, 2.0, 4.0], num_output_tokens=3)
    fast = Measured(20, begin=4.0, times=[0.5], num_output_tokens=1)
    broken = Measured(30, begin=4.0, error="gone")
    found = summarise([slow, fast, broken], 10.0, ["ttft", "tpot", "itl", "e2el"], [50, 100])
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 4)
    assert (found["output_throughput"], found["total_token_throughput"]) == (0.4, 3.4)
    assert (found["mean_ttft_ms"], found["p100_ttft_ms"], found["median_ttft_ms"]) == (750, 1000, 750)
    assert found["mean_tpot_ms"] == 1500
    assert (found["mean_itl_ms"], found["p100_itl_ms"]) == (1500, 2000)
    assert found["p100_e2el_ms"] == 4000
    assert found["max_concurrent_requests"] == 2
    assert summarise([broken], 10.0, ["itl"], [99])["p99_itl_ms"] == 0


def test_prompts_for_the_demo_model_are_of_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nanovllm serve` without a model names itself "demo", which is the folder in the package."""
    monkeypatch.chdir(tmp_path)
    tokenizer = PromptTokenizer("demo")
    assert tokenizer.usable == PromptTokenizer(str(DEMO)).usable
    text, count = tokenizer.text_of_length(tokenizer.usable[:50])
    assert len(tokenizer.encode(text)) == count and 40 <= count <= 60


@pytest.mark.parametrize(
    "options",
    [
        ("--prompt-token-ids", "--request-rate", "40", "--num-warmups", "2"),
        ("--backend", "openai-chat", "--max-concurrency", "2", "--temperature", "0"),
        ("--random-range-ratio", "0.5", "--random-prefix-len", "4", "--burstiness", "0.5", "--request-rate", "100"),
    ],
)
def test_serve(server: Server, tmp_path: Path, options: tuple[str, ...]) -> None:
    saving = ("--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "found.json")
    metrics = ("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99")
    done = nanovllm("bench", "serve", "--base-url", server.url, *SMALL, *options, *saving, *metrics)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["model_id"]) == (6, "demo")
    assert sum(found["output_lens"]) == found["total_output_tokens"]
    assert 0 < found["median_ttft_ms"] <= found["p99_e2el_ms"] and found["p99_tpot_ms"] > 0
    for line in ("Successful requests:                     6", "Mean TPOT (ms):", "P99 E2EL (ms):"):
        assert line in done.stdout
    if "--prompt-token-ids" in options:
        assert found["input_lens"] == [20] * 6 and found["output_lens"] == [8] * 6


def test_sharegpt(server: Server, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "What is the capital of France?"}, {"from": "gpt", "value": "It is Paris."}]
    path = tmp_path / "shared.json"
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    done = nanovllm(
        "bench", "serve", "--base-url", server.url, "--dataset-name", "sharegpt", "--dataset-path", str(path),
        "--num-prompts", "3", "--backend", "openai-chat",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Successful requests:                     3" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--request-rate", "0"), "request_rate"),
        (("--percentile-metrics", "speed"), "percentile_metrics"),
        (("--metric-percentiles", "50,9O"), "metric_percentiles='50,9O': must be"),
        (("--dataset-name", "sharegpt", "--dataset-path", __file__), "test_bench_command.py': must be ShareGPT's"),
        (("--backend", "openai-chat", "--prompt-token-ids"), "chats take text"),
        (("--tokenizer", "/no/such"), "no such folder, and not a hub id"),
        (("--extra-body", '{"temperature": -1}'), "temperature"),
        (("--dataset-name", "sharegpt"), "dataset_path"),
    ],
)
def test_mistakes(server: Server, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str) -> None:
    assert main(["bench", "serve", "--base-url", server.url, *SMALL, *options]) == 2
    assert said in capsys.readouterr().err


def test_the_engine_alone(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    own = ("--model", "demo", "--device", "cpu", "--num-kvcache-blocks", "128", "--output-json", str(path))
    assert main(["bench", "throughput", *own, "--num-prompts", "3", "--input-len", "8", "--output-len", "4"]) == 0
    [found] = json.loads(path.read_text())["results"]
    assert (found["mode"], found["requests"], found["runs"][0]["output_tokens"]) == ("throughput", 3, 12)
    assert main(["bench", "latency", *own, "--batch-size", "2", "--input-len", "8", "--output-len", "4"]) == 0
    [found] = json.loads(path.read_text())["results"]
    assert (found["mode"], found["batch_size"]) == ("latency", 2) and all(seconds > 0 for seconds in found["batches_s"])


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run("-m", "nanovllm", "env", "--json", forks=True))
    assert found["packages"]["torch"] and found["attention"]["backend"] in ("torch", "triton", "flash")
    assert main(["env"]) == 0 and "attention" in capsys.readouterr().out
