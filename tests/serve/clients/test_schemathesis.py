"""Requests made from OpenAI's own description of the paths; the answers follow it. Needs the extra "clients"."""

import subprocess
import sys
from pathlib import Path

import pytest
from serving import Server

pytest.importorskip("schemathesis")
SCHEMA = Path(__file__).resolve().parents[1] / "data" / "openai_core.json"
"""OpenAI's OpenAPI file (MIT), cut to four paths, with the model's name and few tokens fixed."""


def run(folder: Path, schema: str, url: str, checks: str, examples: int) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", schema, "--url", url, "--request-timeout", "30"]
    command += ["--checks", "not_a_server_error,content_type_conformance,response_schema_conformance" + checks]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(examples), "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=270, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.timeout(280)
def test_answers_follow_openais_schema(server: Server, tmp_path: Path) -> None:
    run(tmp_path, str(SCHEMA), server.url + "/v1", "", 30)


@pytest.mark.timeout(280)
def test_answers_follow_our_own(tmp_path: Path) -> None:
    with Server(tmp_path, "--override-generation-config", '{"max_new_tokens": 4}') as server:
        server.wait_until_ready()
        run(tmp_path, server.url + "/openapi.json", server.url, ",status_code_conformance", 10)
        assert "Traceback" not in server.log
