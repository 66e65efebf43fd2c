"""The store where ranks meet: other processes of this machine, also of the same user, cannot reach it by a port."""

import os
import select
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
from process_checks import listening_ports, tiny_llm, token_ids

from nanovllm.errors import WorkerError
from nanovllm.executor.store import WatchedStore, open_store

FORGER = """
import os, sys, time
from datetime import timedelta
import torch.distributed as dist
print("ready", flush=True)

for port in map(int, sys.argv[1:]):
    if os.fork() == 0:
        dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1)).set("forged", "1")
        print("forged", flush=True)
        os._exit(0)
time.sleep(60)
"""


def test_no_port_of_an_engine_answers_as_a_store(tiny: str, mark: str) -> None:
    others = listening_ports()  # of engines that tests before this one share
    with tiny_llm(tiny) as llm:
        token_ids(llm, [5, 6, 7])
        ports = [str(int(address.rpartition(":")[2], 16)) for address in listening_ports() - others]
        # Another process: torch holds the interpreter while it waits for an answer that never comes.
        command = [sys.executable, "-c", FORGER, *ports]
        with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, start_new_session=True) as forger:
            try:
                assert forger.stdout is not None and forger.stdout.readline() == b"ready\n"
                said = select.select([forger.stdout], [], [], 3.0)[0] and forger.stdout.readline()
                assert not said
            finally:
                os.killpg(forger.pid, signal.SIGKILL)


def test_a_wait_ends_when_the_rank_waited_for_has_died() -> None:
    looks = []

    def check() -> None:
        looks.append(1)
        if len(looks) > 3:
            raise WorkerError("rank 1 died")

    file = os.memfd_create("store")
    store = WatchedStore(open_store(file), check)
    store.set("here", "1")
    assert store.get("here") == b"1"
    with pytest.raises(WorkerError, match="rank 1 died"):
        store.get("never set")
    patient = WatchedStore(open_store(file))
    with pytest.raises(RuntimeError, match="no rank has set never set"):
        patient.wait(["never set"], timedelta(seconds=0.05))
    for each in (store, patient):
        each.close()
        with pytest.raises(RuntimeError, match="closed"):
            each.get("here")
    os.close(file)
