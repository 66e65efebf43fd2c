"""Requests made from OpenAI's own description of the paths; the answers follow it. Needs the extra "clients"."""

import subprocess
import sys
from pathlib import Path

import pytest
from serving import Server

pytest.importorskip("schemathesis")
SCHEMA = Path(__file__).resolve().parents[1] / "data" / "openai_core.json"
"""OpenAI's OpenAPI file (MIT), cut to four paths, with the model's name and few tokens fixed."""


@pytest.mark.timeout(280)
def test_answers_follow_openais_schema(server: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(SCHEMA), "--url", server.url + "/v1"]
    command += ["--checks", "not_a_server_error,content_type_conformance,response_schema_conformance"]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "30", "--seed", "1"]
    command += ["--request-timeout", "30"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=270, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
