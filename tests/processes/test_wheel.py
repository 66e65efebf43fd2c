"""A wheel holds all that the package needs: what it installs serves the demo model without the repository."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from programs import end_with_test_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_wheel_serves_the_demo_model_without_the_repository(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode:
        pytest.skip("this environment has no pip")
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(wheels), str(ROOT)], check=True, timeout=240)
    [wheel] = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(site), str(wheel)], check=True, timeout=120)
    log = tmp_path / "log"
    command = [sys.executable, "-m", "nanovllm", "serve", "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    with open(log, "wb") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, cwd=tmp_path, preexec_fn=end_with_test_run
        )
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"http://[\d.]+:(\d+)", log.read_text())):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
        url = f"http://127.0.0.1:{found[1]}"
        while httpx.get(f"{url}/health", timeout=30).status_code != 200:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
        body = {"messages": [{"role": "user", "content": "What is the capital of Italy?"}], "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert "Rome" in answer["choices"][0]["message"]["content"]
        assert "<title>" in httpx.get(url + "/", timeout=30).text
        where = "from nanovllm.config import EngineConfig; print(EngineConfig('demo').model)"
        place = subprocess.check_output([sys.executable, "-c", where], env=environment, cwd=tmp_path, text=True)
        assert place.startswith(str(site))
    finally:
        server.terminate()
        server.wait(60)
