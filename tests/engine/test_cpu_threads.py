"""Threads of an engine on a CPU: few for a small model, no more than there are cores, asleep while they wait."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes.process_checks import write_tiny_config
from programs import ROOT, run

from nanovllm.executor import cpu_threads
from nanovllm.executor.cpu_threads import threads_for
from nanovllm.processes import machine
from nanovllm.processes.machine import available_memory, usable_cores, usable_memory

SHAPE = {"vocab_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
PROGRAM = """
import json, sys, time
{first}
from nanovllm import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", load_format="dummy", skip_tokenizer_init=True, num_kvcache_blocks=64) as llm:
    for count in (2, 24):  # the first is the slowest
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        begin = time.process_time()
        llm.generate([[5] * 9] * 8, params, use_tqdm=False)
    import torch
    print(json.dumps([time.process_time() - begin, torch.get_num_threads()]))
"""


def cpu_seconds(model: str, first: str = "") -> float:
    """CPU seconds of generating eight short texts, in a program of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_"))}
    command = [sys.executable, "-c", PROGRAM.format(first=first), model]
    environment = {**clean, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    seconds, threads = json.loads(done.stdout)
    assert threads == usable_cores(), "the program's own setting stays"
    return float(seconds)


_alone: dict[int, float] = {}
"""CPU seconds of one thread, by width."""


@pytest.mark.parametrize(("width", "first"), [(192, ""), (192, "import torch"), (1024, "")])
def test_threads_that_wait_take_no_cpu_time(width: int, first: str, tmp_path: Path) -> None:
    """In CPU time, since others compute here, too: a spinning thread takes it without computing anything."""
    if usable_cores() < 2:
        pytest.skip("needs two cores")
    model = write_tiny_config(tmp_path, **SHAPE, hidden_size=width)
    if width not in _alone:
        seconds, threads = json.loads(run("-c", PROGRAM.format(first=""), model, forks=True))
        assert threads == 1, "the program's own setting stays"
        _alone[width] = seconds
    alone = _alone[width]
    assert any(cpu_seconds(model, first) < 1.8 * alone + 0.1 for _ in range(3))


def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    cpu_threads.let_waiting_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_small_models_take_one_thread_and_large_ones_all_cores() -> None:
    assert [threads_for(width, 16) for width in (64, 192, 896, 1024, 2048, 8192)] == [1, 1, 1, 2, 8, 16]
    assert threads_for(8192, 0) == 1


InGroups = Callable[[str, dict[str, str]], None]


@pytest.fixture
def in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InGroups:
    """Puts the process in control groups of these files."""

    def write(groups: str, files: dict[str, str]) -> None:
        (own := tmp_path / "groups").write_text(groups)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n")
        monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
        monkeypatch.setattr(machine, "_OWN_CGROUPS", own)

    return write


V1, V2 = "4:memory:/here\n3:cpu,cpuacct:/box/one\n", "0::/box/one\n"


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        (V2, {}, 8),
        (V2, {"cpu.max": "max 100000"}, 8),
        (V2, {"box/one/cpu.max": "max 100000", "box/cpu.max": "250000 100000"}, 2),
        (V2, {"cpu.max": "50000 100000"}, 1),
        (V2, {"cpu.max": "nonsense"}, 8),
        (V1, {"cpu/box/one/cpu.cfs_quota_us": "-1", "cpu/box/one/cpu.cfs_period_us": "100000"}, 8),
        (V1, {"cpu/box/cpu.cfs_quota_us": "300000", "cpu/box/cpu.cfs_period_us": "100000"}, 3),
        ("", {}, 8),
    ],
)  # fmt: skip
def test_control_groups_count(
    groups: str, files: dict[str, str], cores: int, in_groups: InGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of versions 1 and 2, and of all that a process is in."""
    in_groups(groups, files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores() == cores


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/pod/own", {"pod/memory.max": str(1 << 30), "pod/own/memory.max": "max",
                         "pod/memory.current": str((1 << 30) - 4096),
                         "pod/memory.stat": "anon 9\nactive_file 1000\ninactive_file 24"}, 1 << 30),
        ("4:cpu:/a\n5:memory:/own",
         {"memory/own/memory.limit_in_bytes": str(1 << 29), "memory/own/memory.usage_in_bytes": str((1 << 29) - 4096),
          "memory/own/memory.stat": "active_file 1\ntotal_active_file 1000\ntotal_inactive_file 24"}, 1 << 29),
        ("0::/own", {"own/memory.max": "max"}, None),
    ],
)  # fmt: skip
def test_memory_is_what_a_control_group_allows(
    groups: str, files: dict[str, str], limit: int | None, in_groups: InGroups
) -> None:
    in_groups(groups, files)
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usable_memory() == (whole if limit is None else limit)
    assert 0 < available_memory() < whole if limit is None else available_memory() == 4096 + 1024
