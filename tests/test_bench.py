"""bench.py and what it divides by: draws, limits, clocks, the command line, and the script that makes the tables."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import ROOT, load, run

from nanovllm.cli.bench import engine as bench
from nanovllm.cli.bench.modes import against
from nanovllm.cli.bench.roofline import DeviceFigures, Roofline, StepWork, device_figures
from nanovllm.cli.bench.workloads import draw_workload
from nanovllm.models.published import PUBLISHED_SHAPES
from nanovllm.models.registry import parse_config

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


bench_table = load(ROOT / "scripts" / "bench_table")


def requests_at_once(repeat: int = 0, vocab_size: int = 151936) -> Any:
    return draw_workload(256, (100, 1024), (100, 1024), seed=0, vocab_size=vocab_size, repeat=repeat)


def test_draws_are_those_of_nano_vllm() -> None:
    work = requests_at_once()
    assert sum(work.prompt_lens) == 142_827
    assert sum(work.output_lens) == 133_966
    assert len(work.prompts) == 256 and all(100 <= n <= 1024 for n in work.prompt_lens + work.output_lens)


def test_repeats_keep_lengths_and_change_prompts() -> None:
    first, second, third = (requests_at_once(repeat, vocab_size=97) for repeat in range(3))
    assert first.prompt_lens == second.prompt_lens == third.prompt_lens
    assert first.output_lens == second.output_lens == third.output_lens
    openings = {tuple(prompt[:16]) for work in (first, second, third) for prompt in work.prompts}
    assert len(openings) == 3 * 256
    assert max(max(prompt) for prompt in first.prompts) == 96
    assert requests_at_once(2, 97) == third


@pytest.mark.parametrize(("rows", "experts_read"), [(1, 8), (16, 128 * (1 - (1 - 8 / 128) ** 16)), (4096, 128)])
def test_a_mixture_reads_the_experts_that_somebody_chose_and_computes_each_token_in_its_own(
    rows: int, experts_read: float
) -> None:
    model = parse_config(PUBLISHED_SHAPES["Qwen3-30B-A3B"])
    work = StepWork(tokens=rows)
    expert = 3 * 2048 * 768
    layer = 2048 * 128 * (2 * 32 + 2 * 4) + 2048 * 128
    reads = Roofline(model, 1, DeviceFigures(2.0, 1e30)).step_seconds(work)
    assert reads == pytest.approx(48 * (layer + experts_read * expert))
    computes = Roofline(model, 1, DeviceFigures(1e30, 1.0)).step_seconds(work)
    assert computes == pytest.approx(48 * 2 * rows * (layer + 8 * expert))


def test_experts_in_a_latent_space_are_as_small_as_it_is() -> None:
    limits = Roofline(parse_config(PUBLISHED_SHAPES["Nemotron-3-Super-120B-A12B"]), 1, DeviceFigures(1.0, 1.0))
    assert limits.expert_work == 40 * 2 * 1024 * 2688 and limits.expert_bytes == 2 * limits.expert_work


def test_latent_attention_reads_one_row_a_token_and_multiplies_by_it_twice() -> None:
    """By the row, and by its latent; and by both projections, once for each token."""
    model = parse_config({**PUBLISHED_SHAPES["GLM-4.7-Flash"], "num_hidden_layers": 1})
    work, longer = StepWork(), StepWork()
    work.add_decodes(1, 100)
    longer.add_decodes(1, 300)
    reads, computes = (Roofline(model, 1, DeviceFigures(*speeds)) for speeds in ((2.0, 1e30), (1e30, 1.0)))
    assert reads.step_seconds(longer) - reads.step_seconds(work) == pytest.approx(200 * 576)
    assert computes.step_seconds(longer) - computes.step_seconds(work) == pytest.approx(200 * 2 * 20 * (576 + 512))
    projections = 2048 * (768 + 576) + 768 * 20 * 256 + 20 * (192 + 256) * 512 + 20 * 256 * 2048
    assert computes.layer_work == projections + 3 * 2048 * 10240


def test_limit_by_hand() -> None:
    """Two requests on a model small enough to count; one of the two, reading or arithmetic, takes no time."""
    model = parse_config(TINY)
    layers = 2 * (32 * (64 + 2 * 32) + 64 * 32 + 3 * 32 * 48)
    head, kv = 97 * 32, 2 * 2 * 2 * 16
    reads = Roofline(model, 1, DeviceFigures(2.0, 1e30))
    # Prompts of 3 and 5 tokens, 2 and 1 output tokens, 4 tokens a step: [3 + 1], [decode + 3 of 4], [the last of them].
    contexts = (3 + 1) + (4 + 4) + 5
    assert reads.batch_seconds([3, 5], [2, 1], 8, 4) == pytest.approx(3 * layers + 3 * head + kv * contexts)
    # One at a time: [3], [decode], [4], [1].
    contexts = 3 + 4 + 4 + 5
    assert reads.batch_seconds([3, 5], [2, 1], 1, 4) == pytest.approx(4 * layers + 3 * head + kv * contexts)
    computes = Roofline(model, 1, DeviceFigures(1e30, 1.0))
    pairs = 4 * 2 * 64 * (3 * 4 // 2 + 5 * 6 // 2 + 4)
    assert computes.batch_seconds([3, 5], [2, 1], 8, 4) == pytest.approx(2 * layers * 9 + 2 * head * 3 + pairs)


def test_ranks_share_the_work_and_pay_for_the_wire() -> None:
    model = parse_config(TINY)
    work = StepWork()
    work.add_decodes(3, 60)
    alone = Roofline(model, 1, DeviceFigures(1.0, 1e30)).step_seconds(work)
    two = Roofline(model, 2, DeviceFigures(1.0, 1e30)).step_seconds(work)
    assert two == pytest.approx(alone / 2, rel=0.01)  # 97 rows of the head do not divide
    wire = Roofline(model, 2, DeviceFigures(1.0, 1e30, 1.0)).step_seconds(work) - two
    assert wire == pytest.approx(2 * 2 * 3 * 32 * 2)
    four = Roofline(model, 4, DeviceFigures(1.0, 1e30))
    assert four.kv_elements_per_token == 2 * 2 * 16  # two KV heads on four ranks: one each, held twice


def test_no_limit_without_figures() -> None:
    assert device_figures("AMD EPYC") is None and device_figures("NVIDIA H200") is not None
    config = SimpleNamespace(tensor_parallel_size=1, dtype="auto")
    llm = SimpleNamespace(model_config=parse_config(TINY), config=config)
    info = {"device": "cpu", "dtype": "torch.float32"}
    for flags, known in (([], False), (["--peak-bandwidth", "0.1"], False), (["--peak-tflops", "1"], False)):
        assert (bench.find_limits(llm, info, bench.make_parser().parse_args(flags)) is not None) == known
    flags = ["--peak-bandwidth", "0.1", "--peak-tflops", "1"]
    limits = bench.find_limits(llm, info, bench.make_parser().parse_args(flags))
    assert limits.figures == DeviceFigures(0.1e12, 1e12) and limits.element_bytes == 4
    fp8 = bench.find_limits(llm, {**info, "kv_cache_dtype": "float8_e4m3fn"}, bench.make_parser().parse_args(flags))
    work = StepWork(decode_context=1 << 40)  # a key and its scale of two bytes, in place of 4 bytes an element
    head_dim = llm.model_config.head_dim
    assert fp8.step_seconds(work) == pytest.approx(limits.step_seconds(work) * (head_dim + 2) / (4 * head_dim))
    assert against(None, 1.0, "s", 1) == ""
    assert "limit 2 s, 50%" in against(2.0, 4.0, "s", 1)


def test_published_names_get_dummy_weights(tmp_path: Path) -> None:
    for name in ("8B", "Qwen3-8B"):
        args, options = bench.parse_args(["--model", name])
        assert args.model == "Qwen3-8B" and options["load_format"] == "dummy"
    args, options = bench.parse_args(["--model", str(tmp_path), "--max-num-seqs", "4"])
    assert args.model == str(tmp_path) and options["load_format"] == "auto" and options["max_num_seqs"] == 4
    assert "seed" not in bench.parse_args(["--seed", "5"])[1], "weights stay the same"
    arguments = ["--enforce-eager", "--attention-backend", "torch", "--cpu-kvcache-gib", "0.25"]
    _, options = bench.parse_args(arguments)
    assert (options["enforce_eager"], options["attention_backend"], options["cpu_kvcache_gib"]) == (True, "torch", 0.25)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--enforce-eagr"], "did you mean --enforce-eager?"),
        (["--decode-stall", "decodes"], "--decode-stall: Expected `int`, got `str` - at `$.decodes`"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--decode-stall", "decoders=1"], "--decode-stall: Object contains unknown field `decoders`"),
        (["--input-len", "9-3"], "--input-len: '9-3': must be LOW-HIGH with 1 <= LOW <= HIGH"),
        (["--output-len", "x"], "--output-len: 'x': must be LOW-HIGH"),
        (["--model", "7B"], "--model 7B: no such folder, no hub id (owner/name), not demo and not one of 0.6B"),
        (["--num-seqs", "0"], "--num-seqs"),
        (["--json", "/nowhere/result.json"], "--json /nowhere/result.json: must be a file in an existing folder"),
    ],
)
def test_mistakes_are_named(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_args(flags)
    assert named in capsys.readouterr().err


def test_step_profiles_take_the_same_options_and_need_a_gpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    command = [str(ROOT / "scripts" / "profile_step.py"), "--enforce-eager"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "a GPU is needed" in done.stderr


def test_age_of_the_process_counts_from_its_start() -> None:
    code = "import time; time.sleep(0.5); from nanovllm.cli.bench import engine; print(engine.process_age())"
    started = time.monotonic()
    output = run("-c", code)
    age = float(output)
    assert age <= time.monotonic() - started + 0.05
    if Path("/proc/self/stat").is_file():
        assert age >= 0.5


def write_tiny(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.mark.slow
def test_written_checkpoint_is_random_and_in_bfloat16(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    bench_table.write_checkpoint(tmp_path / "model", TINY)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert len(tensors) == 3 + TINY["num_hidden_layers"] * 11
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.bfloat16"}
    assert all(tensor.float().std() > 0 for name, tensor in tensors.items() if "norm" not in name)


def test_command_line_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model, result = write_tiny(tmp_path / "model"), tmp_path / "result.json"
    flags = "--throughput --latency --sampling-options --num-seqs 4 --input-len 5-20 --output-len 3-6 --repeats 2"
    stall = "--decode-stall decodes=2 decode_input=8 decode_output=12 prompts=2 prompt_len=40 interval=0.01"
    peaks = "--peak-bandwidth 0.02 --peak-tflops 0.1 --device cpu --num-kvcache-blocks 64"
    rates = '{"method":"ngram","num_speculative_tokens":2,"synthetic_acceptance_rates":[1,0.5]}'
    drafts = f"--speculative-config {rates}"
    command = f"--model {model} --load-format dummy {flags} {stall} {peaks} {drafts} --json {result}"
    printed = run("bench.py", *command.split(), forks=True)
    for words in ("tok/s", "start-up", "settings", "engine", "of it reached", "first token", "ms between tokens"):
        assert words in printed
    record = json.loads(result.read_text())
    by_mode = {entry["mode"]: entry for entry in record["results"]}
    assert set(by_mode) == {"throughput", "latency", "decode_stall", "sampling_options"}
    expected = sum(draw_workload(4, (5, 20), (3, 6), 0, 97).output_lens)
    assert [run["output_tokens"] for run in by_mode["throughput"]["runs"]] == [expected] * 2
    assert record["settings"]["num_kvcache_blocks"] == 64
    assert record["start_up"]["process_to_first_token_s"] >= record["start_up"]["engine_s"]
    counts = record["drafts"]
    assert sum(counts["spec_decode_accepted_per_pos"]) == counts["spec_decode_num_accepted_tokens"]
    assert (counts["spec_decode_num_drafts"] > 0) == ("drafts: spec_decode_num_drafts=" in printed)
    assert {"temperature 0.6", "greedy", "seed per request"} <= set(by_mode["sampling_options"]["tokens_per_second"])


def test_table_script_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    model, output = write_tiny(tmp_path / "model"), tmp_path / "out"
    sizes = f"--model {model} --load-format dummy --num-seqs 2 --input-len 5 --output-len 3"
    sizes += " --device cpu --num-kvcache-blocks 64"
    runs = [
        bench_table.Run("tiny", f"--throughput --latency {sizes}", cold=True),
        bench_table.Run("broken", f"--model {tmp_path}/missing"),
    ]
    monkeypatch.setitem(bench_table.GROUPS, "table", runs)
    monkeypatch.setattr(sys, "argv", ["bench_table", "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        bench_table.main()
    assert ended.value.code == 1  # "broken" is
    table = (output / "table.md").read_text()
    assert "tiny: 2 requests" in table and "tiny: process start to first token" in table
    assert "| broken | CalledProcessError" in table
    good, bad = map(json.loads, (output / "results.jsonl").read_text().splitlines())
    assert good["results"] and "error" in bad


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("bench_replicas.py", "--replicas 2 --requests 20 --input-len 28 --output-len 5", " a token"),
        ("bench_front.py", "--streams 2 --rate 20 --seconds 0.5 --requests 2", " a token"),
        ("bench_bounds.py", "first-token", "library: p50 "),
    ],
)
def test_the_fronts_benchmarks_run(script: str, options: str, said: str) -> None:
    """Their replicas and engines are simulated, and must speak as the real ones do."""
    assert said in run(ROOT / "scripts" / script, *options.split(), seconds=60)
