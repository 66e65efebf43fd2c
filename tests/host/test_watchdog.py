"""A step that does not end is the end of its process, with the stacks in its log."""

import subprocess
import sys
from pathlib import Path

CODE = """
import time
from nanovllm.host import watchdog

watchdog._LOOK = 0.05
watch = watchdog.Watchdog(0.5)

def hang():
    while True:
        pass

for _ in range(8):  # together they take longer
    with watch:
        time.sleep(0.1)
time.sleep(0.7)  # nor does rest count
print("alive", flush=True)
with watch:
    hang()
"""


def test_a_step_that_does_not_end() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", CODE], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "alive\n")
    assert "a step has not finished for" in done.stderr and "in hang" in done.stderr
