"""Programs where the system has less than usual."""

import os
from pathlib import Path

import pytest
from programs import run

from nanovllm.executor import store
from nanovllm.processes.child import start_python

NO_LONGER_ROOT = """
import ctypes, sys
for change in ((24, 19), (4, 0)):  # PR_CAPBSET_DROP of CAP_SYS_PTRACE, PR_SET_DUMPABLE: nobody opens its files
    ctypes.CDLL(None).prctl(*change)
from nanovllm import LLM, SamplingParams
llm = LLM("demo", device="cpu", tensor_parallel_size=2, num_kvcache_blocks=64)
print(llm.generate(["The capital of France is"], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)[0].text)
"""


def test_ranks_of_a_program_that_was_root_once() -> None:
    """As of a server that has left root with setuid: only root may look into its part of /proc."""
    assert run("-c", NO_LONGER_ROOT).strip().startswith("Paris")


def test_a_working_folder_that_has_been_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(OSError, match="the working folder has been deleted: start in another one"):
        start_python("nanovllm.executor.worker", pass_fds=())


def test_a_machine_without_proc_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_OPEN_FILES", str(tmp_path))  # torch waits for a file there for minutes
    memory = os.memfd_create("store")
    try:
        with pytest.raises(OSError, match="tensor_parallel_size: several ranks need /proc"):
            store.open_store(memory)
    finally:
        os.close(memory)
