"""A replica whose end fails, in a process with a thread that does not end."""

import sys
import threading

from nanovllm.replicas import replica


def run(*_: object) -> None:
    threading.Thread(target=threading.Event().wait).start()
    raise RuntimeError("it cannot be closed")


replica.run = run
replica.main(int(sys.argv[1]))
