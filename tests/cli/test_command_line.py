"""Options on the command line: one source, V's spellings, files of options, mistakes named."""

import io
import json
import re
import shlex
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import nanovllm
from nanovllm.cli import serve
from nanovllm.cli.config_file import parse_with_config
from nanovllm.cli.main import COMMANDS, command, main
from nanovllm.cli.options import chosen, count, field_docs, has_text
from nanovllm.config import EngineConfig
from nanovllm.serve.options import ServeOptions


def engine_options(*arguments: str) -> dict[str, Any]:
    return chosen(parse_with_config(serve.make_parser(), arguments), EngineConfig)


def server_options(*arguments: str) -> dict[str, Any]:
    return chosen(parse_with_config(serve.make_parser(), arguments), ServeOptions)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_with_config(serve.make_parser(), arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", [EngineConfig, ServeOptions])
def test_every_field_is_an_option_with_help(kind: type) -> None:
    parser = serve.make_parser()
    for option in fields(kind):
        if option.name in ("model", "api_keys", "admin_api_keys", "max_queued_requests") or not has_text(option):
            continue
        action = parser.action("--" + option.name.replace("_", "-"))
        assert action is not None, option.name
        assert action.help and action.dest == option.name
        assert option.name in field_docs(kind)


def test_spellings_and_nothing_that_is_not_given() -> None:
    assert engine_options("m") == {"model": "m"} and server_options() == {}
    given = engine_options("m", "-tp", "2", "--max_model_len=32k", "--no-enable-prefix-caching", "--disable", "a", "b")
    assert given == {
        "model": "m", "tensor_parallel_size": 2, "max_model_len": 32000, "enable_prefix_caching": False,
        "disable": ("a", "b"),
    }  # fmt: skip
    given = server_options("--served-model-name", "A", "B", "--no-ui", "--default-chat-template-kwargs", '{"a": 1}')
    assert given == {"served_model_name": ("A", "B"), "ui": False, "default_chat_template_kwargs": {"a": 1}}
    given = engine_options("m", "-dp", "2", "--enable-sleep-mode")
    assert given == {"model": "m", "data_parallel_size": 2, "enable_sleep": True}


TAKEN: list[tuple[list[str], dict[str, Any], dict[str, Any]]] = [
    (["--block-size", "32", "--num-gpu-blocks-override", "7"], {"kvcache_block_size": 32, "num_kvcache_blocks": 7}, {}),
    (["--kv-cache-dtype", "fp8_e4m3", "--dtype", "half"], {"kv_cache_dtype": "fp8", "dtype": "float16"}, {}),
    (["--max-logprobs", "-1", "--skip-tokenizer-init"], {"max_logprobs": -1, "skip_tokenizer_init": True},
     {"skip_tokenizer_init": True}),
    (["--tokenizer-mode", "auto", "--pipeline-parallel-size", "1", "--swap-space", "0"], {}, {}),
    (["--no-trust-remote-code", "--enable-chunked-prefill", "--no-enable-lora"], {"enable_lora": False}, {}),
    (["--logprobs-mode", "processed_logprobs", "--load-format=safetensors"],
     {"logprobs_mode": "processed", "load_format": "auto"}, {}),
    (["--disable-log-stats"], {}, {"disable_log_stats": True}),
    (["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_xml"], {},
     {"reasoning_parser": "think", "tool_call_parser": "qwen3_coder"}),
    (["--disable-log-requests", "--enable-auto-tool-choice", "--weight-transfer-config", "{}"], {}, {}),
]  # fmt: skip
REFUSED = [
    (["--pipeline-parallel-size", "2"], "use tensor_parallel_size"),
    (["--middleware", "a.b"], "put a proxy before the server"),
    (["--no-enable-chunked-prefill"], "max_num_prefill_tokens_with_decodes"),
    (["--max-queued-requests", "3"], "use max_num_queued_reqs"),
]


@pytest.mark.parametrize(("arguments", "engine", "server"), TAKEN, ids=lambda value: str(value)[:40])
def test_options_of_vllm(arguments: list[str], engine: dict[str, Any], server: dict[str, Any]) -> None:
    given = parse_with_config(serve.make_parser(), ["m", *arguments])
    assert serve.translated_options(given) == (engine | {"model": "m"}, server)


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_options_of_vllm_that_mean_something_else(arguments: list[str], said: str) -> None:
    """Refused with what takes their place, before anything starts."""
    given = parse_with_config(serve.make_parser(), ["m", *arguments])
    with pytest.raises(ValueError, match=f"not supported; .*{said}"):
        serve.translated_options(given)


def test_counts() -> None:
    assert [*map(count, ("7", "4k", "4K", "1.5m", "1M"))] == [7, 4000, 4096, 1_500_000, 1 << 20]
    with pytest.raises(ArgumentTypeError, match="'1e999k' is not an integer"):
        count("1e999k")


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "options.yaml").write_text("model: [m]\ntrust_remote_code: true")
    for arguments, said in (
        (["serve", "m", "--max-modell-len", "3"], "did you mean --max-model-len?"),
        (["serve", "m", "--max-num-seqs", "many"], "--max-num-seqs"), (["serve", "m", "--hf-overrides", "{"], "JSON"),
        (["chat", "--temp", "3"], "did you mean --temperature?"), (["serv"], "did you mean 'serve'?"),
        (["run-batch", "in.jsonl"], "run-batch: takes one input and one output: IN.jsonl OUT.jsonl"),
        (["serve", "m", "--trust-remote-code"], "code from a checkpoint is never run"),
        (["serve", "--config", str(tmp_path / "options.yaml")], "code from a checkpoint is never run"),
        (["serve", "m", "--gpu-memory-utilization", "7"], "gpu_memory_utilization=7.0"),
        (["serve", "owner/name", "--api-key", "@no-such"], "--api-key='@no-such': No such file"),
        (["serve", "m", "--hf-overrides", '{"a": NaN}'], "NaN is no number"),
        (["complete", "--temperature", "nan"], "--temperature: 'nan' is not a finite number"),
        (["bench", "throughput", "--num-prompts", "0"], "--num-seqs=0: must be at least 1"),
    ):  # fmt: skip
        try:
            code: Any = main(arguments)
        except SystemExit as ended:
            code = ended.code
        assert code == 2 and said in capsys.readouterr().err, arguments


@pytest.mark.parametrize("name", ["chat", "complete"])
def test_piped_bytes_that_are_no_text_are_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for errors in ("strict", "surrogateescape"):  # of a UTF-8 locale, and of the C locale
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8", errors))
        assert main([name, "--url", "http://localhost:1"]) == 2
        assert "stdin: must be UTF-8" in capsys.readouterr().err


def test_a_benchmark_of_a_server_needs_no_torch() -> None:
    code = "import sys; from nanovllm.cli import bench; bench.make_parser(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_benchmark_starts_its_engine_before_torch_comes_in() -> None:
    """Which would take its time before the engine's processes import it too, side by side."""
    code = (
        "import sys, nanovllm.llm as library\n"
        "def engine(**options): raise SystemExit(f\"torch: {'torch' in sys.modules}\")\n"
        "library.LLM = engine\n"
        "from nanovllm.cli.bench.engine import main; main(['--model', 'demo', '--device', 'cpu'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "torch: False\n"


def test_closed_streams_are_empty_ones() -> None:
    script = f"{sys.executable} -m nanovllm complete --url http://127.0.0.1:1 {{}}; echo $?"
    for arguments, said in (("<&-", "prompt='': must not be empty"), ("-p x 2>&-", ""), ("-p x <&- >&- 2>&-", "")):
        done = subprocess.run(["sh", "-c", script.format(arguments)], capture_output=True, text=True, timeout=60)
        assert done.stdout.endswith("2\n") and said in done.stderr and "Traceback" not in done.stderr


def test_a_terminal_without_unicode_gets_the_rest() -> None:
    code = "from nanovllm.cli.main import main; main([]); print('caf\\xe9 \\u65e5')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env={"PYTHONIOENCODING": "latin-1"})
    assert done.stdout == b"caf\xe9 \\u65e5\n", done.stderr


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "options.yaml"
    path.write_text(
        "model: from-file\nport: 1234\ntensor_parallel_size: 2\nmax-model-len: 4K\nui: false\nno-enforce-eager: false\n"
        "served-model-name: [A, B]\nhf-overrides: {rope_theta: 5}\napi-key: [one, two]\n"
    )
    return path


def test_config_file(config: Path) -> None:
    given = parse_with_config(serve.make_parser(), ["--config", str(config)])
    assert chosen(given, EngineConfig) == {
        "model": "from-file", "tensor_parallel_size": 2, "max_model_len": 4096, "enforce_eager": True,
        "hf_overrides": {"rope_theta": 5},
    }  # fmt: skip
    assert chosen(given, ServeOptions) == {"port": 1234, "ui": False, "served_model_name": ("A", "B")}
    assert given.api_key == ["one", "two"]


def test_the_model_is_no_value_of_a_list_before_it(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    for text, words in (("", ["other"]), ("\nmodel: other\n", [])):
        path.write_text("served-model-name: [A, B]" + text)
        given = parse_with_config(serve.make_parser(), [*words, "--config", str(path)])
        assert (given.model, given.served_model_name) == ("other", ["A", "B"])


def test_command_line_wins_over_the_file(config: Path) -> None:
    arguments = ["mine", "--port", "5", "-tp", "4", "--ui", "--api-key", "three", "--config", str(config)]
    given = parse_with_config(serve.make_parser(), [*arguments, "--served-model-name", "C"])
    assert (given.model, given.port, given.tensor_parallel_size, given.ui) == ("mine", 5, 4, True)
    assert (given.api_key, given.served_model_name) == (["three"], ["C"])


def test_mistakes_in_the_file_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    for text, said in (
        ("prot: 1", "did you mean --port?"), ("ui: 3", "not true or false"), ("port: [1, 2]", "takes one value"),
        ("- a", "option: value"), ("a: [", "not valid YAML"), ("port: x", "--port"), ("config: a", "not in a file"),
    ):  # fmt: skip
        path.write_text(text)
        assert said in refused(capsys, "--config", str(path)), text
    assert "no-such-file" in refused(capsys, "--config", "no-such-file")


def test_help_is_two_screens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert len(serve.make_parser().format_help().splitlines()) <= 120


def test_demo_model_ships_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(EngineConfig("demo").model)
    assert json.loads((folder / "config.json").read_text())["architectures"]
    assert (folder / "model.safetensors").stat().st_size < 8 << 20
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    assert EngineConfig("demo").model == "demo", "a folder of that name comes first"


def test_where_no_model_is_named_the_demo_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    monkeypatch.setattr("nanovllm.serve.lifecycle.serve", lambda model, *_: served.append(model))
    for arguments in ([], ["demo"], ["--max-num-seqs", "4"]):
        serve.run(serve.make_parser(), arguments)
    assert served == ["demo"] * 3


def test_commands_start_without_torch() -> None:
    """Which takes two seconds to import, and some never need; `plan` always does."""
    code = "import sys; sys.modules['torch'] = None; from nanovllm.cli.main import COMMANDS, command"
    code += "; [command(name).make_parser() for name in COMMANDS if name != 'plan']"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version_and_help_of_the_program() -> None:
    run = [sys.executable, "-m", "nanovllm"]
    assert subprocess.check_output([*run, "--version"], text=True).strip() == nanovllm.__version__
    shown = subprocess.check_output([*run, "--help"], text=True)
    assert all(f"{name}  " in shown for name in COMMANDS), "each on a line with what it does"
    assert subprocess.run(run, capture_output=True, check=False).returncode == 2


def documented() -> list[list[str]]:
    """Arguments of every `nanovllm ...` line in README and docs."""
    root = Path(__file__).resolve().parents[2]
    found = []
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith("    ") and (command := re.search(r"(?:^ +|\| )nanovllm (.+)", line)):
                found.append(shlex.split(command[1].partition(" > ")[0], comments=True))
    return found


@pytest.mark.parametrize("arguments", documented(), ids=" ".join)
def test_commands_of_the_docs_are_understood(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if "--help" in arguments:
        with pytest.raises(SystemExit):
            main(arguments)
        assert "usage" in capsys.readouterr().out
    else:
        command(arguments[0]).make_parser().parse_args(arguments[1:])


@pytest.mark.parametrize("value", ["", " ", "@empty", "@blank"])
def test_a_key_that_is_none_opens_no_server(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "blank").write_text("\n \n")
    monkeypatch.chdir(tmp_path)
    for option in ("--api-key", "--admin-api-key"):
        assert main(["serve", "owner/name", option, value]) == 2
        assert f"{option}{'=' + repr(value) if '@' in value else ''}: holds no key" in capsys.readouterr().err
        variable = f"NANOVLLM{option.upper().replace('-', '_')[1:]}"
        with monkeypatch.context() as patched:
            patched.setenv(variable, value)
            assert main(["serve", "owner/name"]) == 2
        assert f"{variable}: holds no key" in capsys.readouterr().err


def test_keys_are_in_no_repr() -> None:
    assert "sesame" not in repr(ServeOptions(api_keys=("sesame",), admin_api_keys=("open-sesame",)))
