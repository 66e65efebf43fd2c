"""A file of requests: every line answered once, whatever happens in between."""

import json
import resource
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import run
from running import nanovllm
from safetensors.numpy import save_file
from serve.serving import ROOT, Server
from system import wait_for


def chat(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"Say {custom_id}"}], "max_tokens": 12, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "Once upon a time", "max_tokens": 8, "model": "demo", **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, entries: Iterable[Any]) -> str:
    lines = (entry if isinstance(entry, str) else json.dumps(entry) for entry in entries)
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def records(path: Path) -> dict[str, Any]:
    """Records by id; no id twice."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["id"] for record in found}) == len(found)
    return {record["id"]: record for record in found}


def texts(path: Path) -> dict[str, Any]:
    """Parts of the records that are the same in every run: all but times and what the cache had."""
    return {name: record["response"]["body"]["choices"] for name, record in records(path).items()}


def test_chats_and_completions(server: Server, tmp_path: Path) -> None:
    first = "\ufeff" + json.dumps(chat("a")) + "\r"  # as some editors on Windows write it
    file = write(tmp_path / "in", [first, completion("b"), completion("c", seed=5), completion("d", seed=5), ""])
    done = nanovllm("run-batch", file, str(tmp_path / "out"), "--url", server.url)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 requests" in done.stderr and "tok/s" in done.stderr
    found = records(tmp_path / "out")
    assert [found[f"batch_req_{n}"]["custom_id"] for n in (1, 2, 3, 4)] == ["a", "b", "c", "d"]
    assert all(record["error"] is None for record in found.values())
    answer = found["batch_req_1"]["response"]
    assert answer["status_code"] == 200 and answer["body"]["object"] == "chat.completion"
    same = texts(tmp_path / "out")
    assert same["batch_req_3"] == same["batch_req_4"]
    again = nanovllm("run-batch", file, str(tmp_path / "out"), "--url", "http://localhost:1")
    assert again.returncode == 0  # all is there


def test_broken_lines_get_records_and_the_rest_goes_on(server: Server, tmp_path: Path) -> None:
    lines = [
        *("{", "[]", {"url": "/v1/completions", "body": {}}, {"custom_id": "w", "url": "/v1/files", "body": {}}),
        *(chat("s", stream=True), chat("t", temperature=-1), completion("ok"), completion("m", model="gpt-4")),
    ]
    done = nanovllm("run-batch", write(tmp_path / "in", lines), str(tmp_path / "out"), "--url", server.url)
    assert done.returncode == 0
    assert "7 of them errors" in done.stderr and "\nthe first error: line 1: not valid JSON" in done.stderr
    again = nanovllm("run-batch", str(tmp_path / "in"), str(tmp_path / "out"))
    assert (again.returncode, again.stderr) == (0, "all 8 requests have their results already\n")
    found = records(tmp_path / "out")
    assert [found[f"batch_req_{n}"]["error"]["code"] for n in range(1, 6)] == ["invalid_line"] * 5
    said = "url='/v1/files': must be one of '/v1/chat/completions', '/v1/completions'"
    assert found["batch_req_4"]["error"]["message"] == said
    assert found["batch_req_6"]["response"]["status_code"] == 400
    assert "temperature" in found["batch_req_6"]["response"]["body"]["error"]["message"]
    assert "this server has `demo`" in found["batch_req_8"]["response"]["body"]["error"]["message"]
    assert found["batch_req_7"]["response"]["status_code"] == 200


def test_killed_and_run_again(server: Server, tmp_path: Path) -> None:
    """The same records as those of a run that nothing has ended."""
    file = write(tmp_path / "in", [completion(f"r{n}", max_tokens=24, ignore_eos=True) for n in range(24)])
    assert nanovllm("run-batch", file, str(tmp_path / "whole"), "--url", server.url).returncode == 0
    out = tmp_path / "out"
    command = [sys.executable, "-m", "nanovllm", "run-batch", file, str(out), "--url", server.url]
    running = subprocess.Popen([*command, "--max-concurrency", "2"], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") >= 4, "records", interval=0.002)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    before = out.read_bytes()
    assert 4 <= before.count(b"\n") < 24
    with out.open("ab") as file_of_results:
        file_of_results.write(b'{"id": "batch_req_23", "custom')  # torn
    assert nanovllm("run-batch", file, str(out), "--url", server.url).returncode == 0
    assert out.read_bytes().startswith(before[: before.rindex(b"\n")])
    assert texts(out) == texts(tmp_path / "whole")


def test_full_disk(server: Server, tmp_path: Path) -> None:
    file, out = write(tmp_path / "in", [completion(f"r{n}") for n in range(8)]), tmp_path / "out"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))

    full = nanovllm("run-batch", file, str(out), "--url", server.url, preexec_fn=limit)
    assert full.returncode == 2
    assert str(out) in full.stderr and "goes on" in full.stderr and "Traceback" not in full.stderr
    assert out.read_bytes().endswith(b"\n") and out.stat().st_size <= 1500
    assert nanovllm("run-batch", file, str(out), "--url", server.url).returncode == 0
    assert len(records(out)) == 8


POISON = {"a 500": 500, "a page of a proxy": 502, "a closed connection": 0}


@pytest.fixture
def failing_server() -> Iterator[ThreadingHTTPServer]:
    """A server that fails with the prompts in POISON each time, and has no room for "busy" the first time."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
            asked[prompt] += 1
            status = POISON.get(prompt, 429 if prompt == "busy" and asked[prompt] == 1 else 200)
            if not status:
                self.close_connection = True
                return
            body = b"<html>" if status == 502 else json.dumps({"choices": prompt, "message": "no room"}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    asked: Counter[str] = Counter()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("poison", POISON)
def test_a_request_with_which_the_server_fails_is_an_error_and_the_rest_goes_on(
    failing_server: ThreadingHTTPServer, tmp_path: Path, poison: str
) -> None:
    url = f"http://127.0.0.1:{failing_server.server_port}"
    lines = [completion(f"r{n}", prompt=prompt) for n, prompt in enumerate(["a", poison, "busy", "b"])]
    file, out = write(tmp_path / "in", lines), tmp_path / "out"
    done = nanovllm("run-batch", file, str(out), "--url", url, "--max-concurrency", "1")
    assert done.returncode == 0 and "waiting: the server answers 429: no room" in done.stderr, done.stderr
    found = records(out)
    answers = [found[f"batch_req_{n}"]["response"]["body"]["choices"] for n in (1, 3, 4)]
    assert answers == ["a", "busy", "b"]
    failed, status = found["batch_req_2"], POISON[poison]
    assert (failed["error"] or {}).get("code") == (None if status else "no_answer")
    assert (failed["response"] or {}).get("status_code", 0) == status


def test_a_server_that_fails_with_everything_ends_the_run_and_no_line_is_met_for_ever(
    failing_server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{failing_server.server_port}"
    file = write(tmp_path / "in", [completion(f"r{n}", prompt="a 500") for n in range(7)] + [completion("last")])
    out = tmp_path / "out"
    command = ("run-batch", file, str(out), "--url", url, "--max-concurrency", "1")
    first = nanovllm(*command)
    assert first.returncode == 2 and "failed with 5 requests in a row. line 5: the server answers 500" in first.stderr
    assert len(records(out)) == 5
    assert nanovllm(*command).returncode == 0 and len(records(out)) == 8


def test_a_line_that_python_cannot_write_or_read_is_an_error(server: Server, tmp_path: Path) -> None:
    half = json.dumps(chat("a\ud83d"))
    deep = json.dumps(completion("deep")).replace('"model"', '"x": ' + "[" * 3000 + "]" * 3000 + ', "model"')
    digits = json.dumps(completion("digits", seed=0)).replace('"seed": 0', '"seed": ' + "9" * 5000)
    file, out = write(tmp_path / "in", [half, deep, digits, completion("ok")]), tmp_path / "out"
    for said in ("4 of 4 requests, 3 of them errors", "all 4 requests have their results already"):
        done = nanovllm("run-batch", file, str(out), "--url", server.url)
        assert done.returncode == 0 and said in done.stderr
    found = [record["error"] and record["error"]["code"] for _, record in sorted(records(out).items())]
    assert found == ["invalid_line"] * 3 + [None]
    assert records(out)["batch_req_1"]["custom_id"] == "a\ud83d"


def test_results_of_something_else(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = write(tmp_path / "in", [completion("a"), completion("b")])
    others = [{"id": f"batch_req_{n}", "custom_id": "other", "response": None, "error": None} for n in (1, 2)]
    for found, said in (
        (["notes"], "not a result of run-batch"), (others[:1], "another input"), (others, "another input"),
    ):  # fmt: skip
        write(out, found)
        done = nanovllm("run-batch", file, str(out), "--url", server.url)
        assert done.returncode == 2 and said in done.stderr
    done = nanovllm("run-batch", "no-such-file", str(out), "--url", server.url)
    assert done.returncode == 2 and done.stderr == "nanovllm: no-such-file: No such file or directory\n"
    assert nanovllm("run-batch", file, file, "--url", server.url).returncode == 2


def test_every_record_failed(server: Server, tmp_path: Path) -> None:
    """The exit status says so, also of a run that finds them there, until one of them has an answer."""
    file, out = write(tmp_path / "in", [completion("a", model="gpt-4"), "{"]), str(tmp_path / "out")
    for _ in range(2):
        assert nanovllm("run-batch", "-i", file, "-o", out, "--url", server.url).returncode == 1
    write(tmp_path / "in", [completion("a", model="gpt-4"), "{", completion("b")])
    assert nanovllm("run-batch", file, "--output-file", out, "--url", server.url).returncode == 0
    assert len(records(tmp_path / "out")) == 3
    write(tmp_path / "in", [])
    assert nanovllm("run-batch", file, str(tmp_path / "new"), "--url", server.url).returncode == 0


@pytest.mark.parametrize("places", [[], ["a"], ["a", "b", "-i", "c"], ["-i", "a"], ["a", "-i", "b", "-o", "c"]])
def test_input_and_output_are_named_once(places: list[str]) -> None:
    done = nanovllm("run-batch", *places)
    assert done.returncode == 2 and "-i IN.jsonl -o OUT.jsonl" in done.stderr


def test_a_model_of_its_own_has_the_names_it_is_given(tmp_path: Path) -> None:
    """The demo model that of `serve`, where there is none."""
    options = ["--device", "cpu", "--num-kvcache-blocks", "64", "-q"]
    for name, names in (("demo", []), ("mine", ["--served-model-name", "other", "mine"])):
        file, out = write(tmp_path / "in", [completion("a", model=name)]), tmp_path / name
        run("-m", "nanovllm", "run-batch", file, out, *options, *names, forks=True)
    done = nanovllm("run-batch", file, str(tmp_path / "x"), "--url", "http://localhost:1", "--served-model-name", "a")
    assert done.returncode == 2 and "--served-model-name: not together with --url" in done.stderr


def test_requests_name_adapters_as_their_model(tmp_path: Path) -> None:
    """Of folders; without the option that makes room for them, or a server of its own, the command says so."""
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    model = json.loads((ROOT / "assets" / "demo-qwen3" / "config.json").read_text())
    shapes = (4, model["hidden_size"]), (model["num_attention_heads"] * model["head_dim"], 4)
    tensors = {f"{q}.lora_{half}.weight": np.zeros(shape, "float32") for half, shape in zip("AB", shapes, strict=True)}
    (folder := tmp_path / "sql").mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": [q.removeprefix("base_model.model.")]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    file, out = write(tmp_path / "in", [completion("a", model="sql")]), tmp_path / "out"
    modules, own = ["--lora-modules", f"sql={folder}"], ["--device", "cpu", "--num-kvcache-blocks", "64", "-q"]
    run("-m", "nanovllm", "run-batch", file, out, *own, "--enable-lora", *modules, forks=True)
    there = ["--url", "http://localhost:1"]
    for more, said in ((own, "lora_modules: needs enable_lora"), (there, "--lora-modules: not together with --url")):
        done = nanovllm("run-batch", file, str(tmp_path / "x"), *more, *modules)
        assert done.returncode == 2 and said in done.stderr


def test_with_a_model_of_its_own(server: Server, tmp_path: Path) -> None:
    """It gives what the server's gives."""
    file = write(tmp_path / "in", [chat(f"r{n}", temperature=0.7) for n in range(4)])
    assert nanovllm("run-batch", file, str(tmp_path / "one"), "--url", server.url).returncode == 0
    own = ["--device", "cpu", "--num-kvcache-blocks", "256"]
    run("-m", "nanovllm", "run-batch", file, tmp_path / "two", *own, forks=True)
    assert texts(tmp_path / "one") == texts(tmp_path / "two")


@pytest.mark.parametrize("arguments", [("--url", "http://localhost:1"), ("--url", "http://x", "--model", "m")])
def test_no_server(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = nanovllm("run-batch", write(tmp_path / "in", [chat("a")]), str(tmp_path / "out"), *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert (tmp_path / "out").read_text() == ""
