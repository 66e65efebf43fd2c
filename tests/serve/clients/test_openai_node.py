"""OpenAI's package for Node: `npm install openai` somewhere that NODE_PATH names."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import ANSWER, Server
from system import wait_for

SCRIPT = Path(__file__).with_name("openai.js")


def has_package() -> bool:
    if shutil.which("node") is None:
        return False
    return subprocess.run(["node", "-e", "require('openai')"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not has_package(), reason="node, or its package openai, is not there")
def test_openai_for_node(server: Server) -> None:
    done = subprocess.run(["node", SCRIPT, server.url], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {
        "chat": ANSWER,
        "streamed": ANSWER,
        "streamed_tokens": 9,
        "aborted": True,
        "call": ["answer", "boolean"],
        "response": ANSWER,
        "missing": [True, 404, "model_not_found"],
    }
    wait_for(lambda: server.num_running() == 0, "abort of the stream that was left")
