"""The files of deploy/ say what the server knows: options, probes, metrics."""

import json
import re
import shlex
from pathlib import Path

import httpx
import pytest
import yaml
from serving import ROOT

from nanovllm.cli import serve
from nanovllm.cli.config_file import parse_with_config

DEPLOY = ROOT / "deploy"


def commands() -> list[tuple[str, list[str]]]:
    """(file, arguments after `nanovllm`) of all that a file of ours starts or names."""
    found = []
    unit = (DEPLOY / "nanovllm.service").read_text()
    found += [("unit", shlex.split(line)[1:]) for line in re.findall(r"ExecStart=(.*)", unit)]
    docker = (DEPLOY / "Dockerfile").read_text()
    found += [("Dockerfile", json.loads(line)) for line in re.findall(r"^CMD (.*)", docker, re.MULTILINE)]
    found += [("docker run", shlex.split(line)) for line in re.findall(r"docker run .* nanovllm (serve .*)", docker)]
    found += [("kubernetes", container()["args"])]
    return found


def container() -> dict[str, object]:
    deployment = next(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    [found] = deployment["spec"]["template"]["spec"]["containers"]
    return found  # type: ignore[no-any-return]


def test_commands_are_understood() -> None:
    assert len(commands()) == 4
    for file, words in commands():
        assert words[0] == "serve", file
        assert parse_with_config(serve.make_parser(), words[1:]).host == "0.0.0.0"


def test_shutdown_is_waited_for() -> None:
    unit = (DEPLOY / "nanovllm.service").read_text()
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > 30
    deployment = next(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 30


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes(client: httpx.Client, probe: str) -> None:
    path = container()[probe]["httpGet"]["path"]  # type: ignore[index]
    assert client.get(path).status_code == 200


def test_metrics_of_the_board_are_there(client: httpx.Client) -> None:
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    served = set(re.findall(r"^([\w:]+)[{ ]", client.get("/metrics").text, re.MULTILINE))
    board = json.loads((DEPLOY / "grafana.json").read_text())
    queries = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    asked = re.findall(r"(vllm:\w+|http_requests\w+)", queries)
    assert asked and set(asked) - {"vllm:admission_rejections_total"} <= served, sorted(set(asked) - served)


def test_the_unit_can_write_weights_and_kernels() -> None:
    """Its user has no home folder, and the rest of the system is read-only to it."""
    unit = (DEPLOY / "nanovllm.service").read_text()
    folder = f"/var/cache/{re.findall(r'^CacheDirectory=(.*)', unit, re.MULTILINE)[0]}"
    settings = " ".join(re.findall(r"^Environment=(.*)", unit, re.MULTILINE)).split()
    places = dict(setting.split("=") for setting in settings)
    assert all(places[name].startswith(folder) for name in ("HF_HOME", "TRITON_CACHE_DIR"))


def test_copied_files_exist() -> None:
    docker = (DEPLOY / "Dockerfile").read_text()
    sources = [name for line in re.findall(r"^COPY (?!--)(.*)", docker, re.MULTILINE) for name in line.split()[:-1]]
    assert sources and all(Path(ROOT / name).exists() for name in sources)
    kept = (ROOT / ".dockerignore").read_text().split()
    assert all("!" + name in kept for name in sources)
