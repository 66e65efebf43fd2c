"""Commands of the program in processes of their own."""

import subprocess
import sys
from typing import Any

from serve.serving import ROOT


def nanovllm(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs a command to its end."""
    command = [sys.executable, "-m", "nanovllm", *arguments]
    options = {"capture_output": True, "text": True, "timeout": 200, "cwd": ROOT, "check": False, **options}
    return subprocess.run(command, **options)
