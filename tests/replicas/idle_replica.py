"""A replica that says only that it lives, as often as it can; and, without an argument, a front that never listens: it
forks, which leaves its socket open, and is killed once that is full."""

import os
import signal
import socket
import sys
import threading
import time
from typing import Any, cast

from nanovllm.replicas import replica
from nanovllm.replicas.inbox import Inbox
from nanovllm.replicas.link import ProcessLink


def run(*_: object) -> None:
    threading.Event().wait()


if len(sys.argv) > 1:
    replica._LIFE_SECONDS = 1e-4
    replica.run = run
    replica.main(int(sys.argv[1]))
link = ProcessLink(0, cast(Any, "start"), Inbox(), "idle_replica")
held = os.fork()
if held == 0:
    time.sleep(60)
    os._exit(0)
sizes = [0, 0]
while not sizes[-1] or sizes[-1] != sizes[-2]:
    time.sleep(0.3)
    sizes.append(len(link._channel._socket.recv(1 << 20, socket.MSG_PEEK)))
print(link.pid, held, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
