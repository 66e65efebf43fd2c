"""Starts tests/rollouts/trainer_process.py and does what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from system import free_port

from nanovllm.transfer.receiver import WeightReceiver

ROOT = Path(__file__).resolve().parents[2]


def init_info(**more: Any) -> dict[str, Any]:
    """Arguments of a group of a trainer and one engine on this host."""
    return {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2, **more}


def take_in(receiver: WeightReceiver, kind: str, folder: str, info: dict[str, Any], device: str) -> None:
    """The weights of a folder, which a trainer on `device` sends."""
    script = str(Path(__file__).with_name("trainer_process.py"))
    command = [sys.executable, script, kind, folder, json.dumps(info), device]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as trainer:
        receiver.init(info if kind == "group" else {})
        receiver.start()
        assert trainer.stdin is not None and trainer.stdout is not None
        for line in trainer.stdout:
            message = json.loads(line)
            if kind == "bucket":
                with pytest.raises(ValueError, match="nbytes=1099511627776"):
                    receiver.update({**message, "nbytes": 1 << 40})
            receiver.update(message)
            trainer.stdin.write("taken in\n")
            trainer.stdin.flush()
        receiver.finish()
    assert trainer.returncode == 0
